"""Images that the server can make by itself, each when it is first asked for: `base` and one layer of the server's.

Such a layer outlives its server, as those of `base` do: the next one finds it by what it is made of.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import shutil
import stat
from pathlib import Path

from managed_e2b.local.runtime import storage
from managed_e2b.local.runtime.base import ImageUnavailable, Recipe
from managed_e2b.local.runtime.ground import Ground
from managed_e2b.local.runtime.image_store import ImageStore
from managed_e2b.local.runtime.images import BASE

_NAME = re.compile(r"[a-z0-9-]{1,64}")


class Recipes:
    """What a runtime offers beside what sandboxes and builds have made."""

    def __init__(self, ground: Ground, images: ImageStore) -> None:
        self._ground = ground
        self._images = images
        self._offers: dict[str, Recipe] = {}
        self._making: dict[str, asyncio.Task[None]] = {}

    def offer(self, image: str, recipe: Recipe) -> None:
        """`Runtime.offer`."""
        if not _NAME.fullmatch(image) or image == BASE or image in self._offers:
            raise ValueError(f"cannot offer an image {image!r}")
        self._offers[image] = recipe

    async def provide(self, image: str) -> None:
        """Make the image if it is an offer and not there yet. Raises ImageUnavailable; the next call tries again."""
        recipe = self._offers.get(image)
        if recipe is None or image in self._images:
            return
        making = self._making.get(image)
        if making is None:
            making = self._making[image] = asyncio.create_task(self._make(image, recipe))
            making.add_done_callback(lambda made: self._done(image, made))
        await asyncio.shield(making)  # it goes on for the others who wait, and for the next one

    def _done(self, image: str, made: asyncio.Task[None]) -> None:
        del self._making[image]
        if not made.cancelled():
            made.exception()  # told to who waits, if anybody still does

    async def settled(self) -> None:
        """Wait until nothing is being made."""
        await asyncio.gather(*self._making.values(), return_exceptions=True)

    async def _make(self, image: str, recipe: Recipe) -> None:
        layer = await asyncio.to_thread(self._layer, image, recipe)
        base = self._images.hold(BASE)
        try:
            self._images.add(image, base.on_top(layer))
        finally:
            self._images.release(base)

    def _layer(self, image: str, recipe: Recipe) -> str:
        """The layer's path, relative to our home."""
        home, ids = self._ground.home, self._ground.ids
        name = hashlib.sha256(f"{recipe.digest()} {storage.made_by(ids)}".encode()).hexdigest()[:32]
        kept = home.keep(ids, image)
        if not (kept / name).is_dir():
            scratch = home.path / f"new-{image}"
            try:
                for part in ("root", "usr"):
                    (scratch / part).mkdir(parents=True)
                recipe.fill(scratch)
                hand_over(scratch, *((ids.root_uid, ids.root_gid) if os.geteuid() == 0 else (-1, -1)))
                scratch.rename(kept / name)  # whole, or not there
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another server was quicker
                    raise ImageUnavailable(f"cannot make the image {image} in {home.top}: {error}") from error
            finally:
                shutil.rmtree(scratch, ignore_errors=True)  # what is left of it goes with our home
        home.retire(kept, name)
        return f"../{kept.name}/{name}"


def hand_over(top: Path, uid: int, gid: int) -> None:
    """Give a tree to an owner (-1: it stays), readable for everybody and writable for its owner alone.

    Whatever the umask was, and whatever bits its files had where they come from.
    """
    for parent, directories, files in os.walk(top):
        for path in (parent, *(os.path.join(parent, name) for name in (*directories, *files))):
            mode = os.lstat(path).st_mode
            os.chown(path, uid, gid, follow_symlinks=False)
            if not stat.S_ISLNK(mode):
                os.chmod(path, 0o755 if stat.S_ISDIR(mode) or mode & 0o111 else 0o644)
