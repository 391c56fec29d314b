"""The images of a runtime with their files: made from what a sandbox changed, removed with the last who needs them."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence

from managed_e2b.local.runtime.base import GuestError, GuestGone, RuntimeUnavailable
from managed_e2b.local.runtime.images import MAX_LAYERS, Image, Images
from managed_e2b.local.runtime.link import OperationFailed, SpawnerLink

_log = logging.getLogger(__name__)


class ImageStore:
    """`spawner` tells the one to work with, or raises RuntimeUnavailable; `view` is the server's directory for it."""

    def __init__(self, spawner: Callable[[], SpawnerLink], view: Callable[[], str]) -> None:
        self._spawner = spawner
        self._view = view
        self._images = Images()
        self._removals: set[asyncio.Task[None]] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._images

    def add(self, name: str, image: Image) -> None:
        """Name what exists. Raises ValueError when the name is taken."""
        self._images.add(name, image)

    def get(self, name: str) -> Image:
        """Raises KeyError."""
        return self._images.get(name)

    def new_layer(self) -> str:
        """Where one more layer is to be made: a directory below the server's, not made yet."""
        return self._images.new_layer()

    @property
    def in_use(self) -> frozenset[str]:
        return self._images.in_use

    def hold(self, name: str) -> Image:
        """Somebody is being made of it, until `release`. Raises KeyError."""
        image = self._images.get(name)
        self._images.hold(image)
        return image

    def release(self, image: Image) -> None:
        """Who was made of it is gone."""
        self.discard(self._images.drop(image))

    async def commit(self, below: Image, name: str, changes: Sequence[str]) -> None:
        """`Guest.commit`, while the processes of the sandbox, made of `below`, stand still."""
        if name in self._images:
            raise ValueError(f"there is an image {name!r}")
        if not changes:
            raise GuestError(errno.EOPNOTSUPP, "its files are kept in a memory of its own: no place here can hold more")
        if len(below.root) >= MAX_LAYERS:
            raise GuestError(errno.EMLINK, f"it is made of {MAX_LAYERS} layers already")
        layer = self._images.new_layer()
        try:
            await self._spawner().call("keep", directories=list(changes), layer=f"{self._view()}/{layer}")
            self._images.add(name, below.on_top(layer))
        except BaseException:
            self.discard([layer])
            raise

    async def remove(self, name: str) -> None:
        """Raises KeyError."""
        await self._remove_layers(self._images.remove(name))

    async def settled(self) -> None:
        """Wait until nothing is being removed."""
        await asyncio.gather(*self._removals)

    def discard(self, layers: Sequence[str]) -> None:
        """Remove layers that no image has."""
        if layers:
            task = asyncio.create_task(self._remove_layers(layers))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _remove_layers(self, layers: Sequence[str]) -> None:
        for layer in layers:
            try:
                await self._spawner().call("remove", directory=f"{self._view()}/{layer}")
            except (GuestGone, RuntimeUnavailable):
                return  # removed with all that is ours, at the end
            except OperationFailed as error:
                _log.warning("cannot remove %s: %s", layer, error.message)
