"""Sandboxes as Linux namespaces, through bubblewrap: the runtime that the local server uses.

What it rests on is apart: the process that makes sandboxes and its replacement (`spawners`), the place and the layers
of `base` (`ground`), the images that sandboxes and builds make (`image_store`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import resource
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from managed_e2b.local.runtime import bwrap, channel, doctor, layers
from managed_e2b.local.runtime.base import PLAIN, GuestGone, GuestSpec, Recipe, RuntimeUnavailable
from managed_e2b.local.runtime.ground import Ground
from managed_e2b.local.runtime.guest import BubblewrapGuest
from managed_e2b.local.runtime.idmap import IdMap
from managed_e2b.local.runtime.image_store import ImageStore
from managed_e2b.local.runtime.images import BASE, Image
from managed_e2b.local.runtime.limits import Enforced
from managed_e2b.local.runtime.link import OperationFailed, SpawnerLink
from managed_e2b.local.runtime.recipes import Recipes
from managed_e2b.local.runtime.shelf import Shelf
from managed_e2b.local.runtime.shelf_library import MOST_BYTES, ShelfLibrary
from managed_e2b.local.runtime.spawners import Spawners
from managed_e2b.local.runtime.volume_store import VolumeStore
from managed_e2b.local.runtime.volumes import MountFailed

_log = logging.getLogger(__name__)
_SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LAUNCH_SECONDS = 30


class BubblewrapRuntime:
    """`base.Runtime`. One object a server process and event loop.

    `data_dir`: where sandboxes keep their files; None chooses /var/lib/me2b for root and ~/.cache/me2b/local for
    others, and memory (/dev/shm) where neither can hold an overlay. `cache_bytes`: of what builds keep there for later.
    `keep_volumes`: they stay there, for the next server that keeps them.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        cache_bytes: int = MOST_BYTES,
        keep_volumes: bool = False,
    ) -> None:
        self._cache_bytes = cache_bytes
        self._ground = Ground(data_dir)
        self._spawners = Spawners(self._ground.show, self._on_spawner_death)
        self._images = ImageStore(lambda: self.spawner_link, lambda: self._ground.view)
        self._recipes = Recipes(self._ground, self._images)
        self._library: ShelfLibrary | None = None
        self._volumes = VolumeStore(lambda: self.spawner_link, self._ground, keep=keep_volumes)
        self._guests: dict[str, BubblewrapGuest] = {}
        self._launching: dict[str, asyncio.Task[BubblewrapGuest]] = {}
        self._chores: set[asyncio.Task[None]] = set()

    @property
    def ids(self) -> IdMap:
        """Which ids of the host stand for those inside."""
        return self._ground.ids

    @property
    def spawner_link(self) -> SpawnerLink:
        """The process that makes sandboxes. Raises RuntimeUnavailable when there is none."""
        return self._spawners.link

    @property
    def guests_directory(self) -> Path:
        """Where each sandbox has a directory of its own, as the server sees it. Raises RuntimeUnavailable."""
        return self._ground.home.path / "guests"

    @property
    def live_sandboxes(self) -> int:
        """How many sandboxes are there: being made, running, or being ended."""
        return len(self._guests) + len(self._launching)

    @property
    def enforced(self) -> Enforced:
        return self._ground.enforced

    def describe(self) -> str:
        """Where the sandboxes' files are, for people. Once started."""
        return self._ground.describe()

    async def start(self) -> None:
        program = bwrap.find()
        if program is None:
            raise RuntimeUnavailable(f"bubblewrap is missing: {doctor.INSTALL_BUBBLEWRAP}")
        if not os.access("/bin/bash", os.X_OK):
            raise RuntimeUnavailable("/bin/bash is missing: install bash")
        _raise_descriptor_limit()
        try:
            self._images.add(BASE, await self._ground.lay(await self._spawners.start(), program))
            self._library = self._open_library()
            await self._library.tidy()
            self._spawners.replace_from_now_on()
        except GuestGone as error:
            await self.close()
            raise RuntimeUnavailable("the process that makes sandboxes died; its words are on stderr") from error
        except BaseException:
            await self.close()
            raise

    def _open_library(self) -> ShelfLibrary:
        home = self._ground.home
        shelf = Shelf(home, self._ground.ids, self._cache_bytes)
        return ShelfLibrary(
            self._images, shelf, lambda: self.spawner_link, self._recipes.provide, home.path, self._ground.view
        )

    @property
    def library(self) -> ShelfLibrary:
        """The images that builds make. Raises RuntimeUnavailable before the start."""
        if self._library is None:
            raise RuntimeUnavailable("the runtime is not started")
        return self._library

    @property
    def volumes(self) -> VolumeStore:
        return self._volumes

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    def offer(self, image: str, recipe: Recipe) -> None:
        self._recipes.offer(image, recipe)

    async def create(self, sandbox_id: str, spec: GuestSpec = PLAIN) -> BubblewrapGuest:
        await self._recipes.provide(spec.image)
        if not _SANDBOX_ID.fullmatch(sandbox_id) or sandbox_id in self._guests or sandbox_id in self._launching:
            raise ValueError(f"not a new sandbox id: {sandbox_id!r}")
        self.spawner_link  # noqa: B018 - raises: not started, or failed
        image = self._images.hold(spec.image)
        launching = asyncio.create_task(self._launch_surely(sandbox_id, image, spec))
        self._launching[sandbox_id] = launching
        launching.add_done_callback(lambda _: self._launching.pop(sandbox_id, None))
        try:
            return await asyncio.shield(launching)
        except asyncio.CancelledError:
            launching.add_done_callback(self._kill_unwanted)
            raise

    async def _launch_surely(self, sandbox_id: str, image: Image, spec: GuestSpec) -> BubblewrapGuest:
        """A spawner that dies under it costs a new sandbox only time."""
        try:
            spawner = await self._spawners.living()
            try:
                return await self._launch(spawner, sandbox_id, image, spec)
            except GuestGone:
                spawner = await self._spawners.living()
            try:
                await self._ground.remove_remains(spawner, sandbox_id)
                return await self._launch(spawner, sandbox_id, image, spec)
            except GuestGone as error:
                raise RuntimeUnavailable("the process that makes sandboxes died") from error
        except BaseException:
            self._images.release(image)
            raise

    async def _launch(self, spawner: SpawnerLink, sandbox_id: str, image: Image, spec: GuestSpec) -> BubblewrapGuest:
        volumes = [mount.path for mount in spec.mounts]
        layout = replace(self._ground.layout(sandbox_id, image), volumes=volumes)
        mounts = await self._volumes.mounts(spawner, spec.mounts)
        directory = f"{layout.home}/{layout.top}"
        try:
            async with asyncio.timeout(_LAUNCH_SECONDS):
                reply = await spawner.call(
                    "launch",
                    mounts,
                    sandbox=sandbox_id,
                    argv=self._ground.command_line(layout, spec.limits),
                    layout=asdict(layout),
                    limits=asdict(spec.limits),
                )
        except (OperationFailed, TimeoutError) as error:
            with contextlib.suppress(GuestGone, OperationFailed):
                await spawner.call("bury", sandbox=sandbox_id, directory=directory)
            detail = error.message if isinstance(error, OperationFailed) else f"not ready after {_LAUNCH_SECONDS} s"
            if detail.startswith(f"{layers.VOLUME_STEP}: "):
                raise MountFailed(f"a volume cannot be mounted there ({detail})") from error
            raise RuntimeUnavailable(f"a sandbox did not start ({detail}): {doctor.explain_launch(detail)}") from error
        finally:
            channel.close_all(mounts)
        guest = BubblewrapGuest(
            sandbox_id,
            directory,
            layout.changes,
            spawner,
            reply.value["pid"],
            reply.fds,
            self._spawners.expect_exit,
            functools.partial(self._images.commit, image),
            functools.partial(self._forget, image),
            self.enforced.kept(spec.limits),
        )
        self._guests[sandbox_id] = guest
        return guest

    def _kill_unwanted(self, task: asyncio.Task[BubblewrapGuest]) -> None:
        """The caller of `create` was cancelled while it went on: nobody else will kill what came of it."""
        if not task.cancelled() and task.exception() is None:
            self._do(task.result().kill())

    def _do(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    def _forget(self, image: Image, guest: BubblewrapGuest) -> None:
        self._guests.pop(guest.sandbox_id, None)
        self._images.release(image)

    async def remove_image(self, image: str) -> None:
        await self._images.remove(image)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _on_spawner_death(self) -> Callable[[SpawnerLink], None]:
        dead = list(self._guests.values())
        _log.warning("the process that makes sandboxes died, and %d sandboxes with it; starting another", len(dead))
        return lambda spawner: self._do(self._bury(spawner, dead))

    async def _bury(self, spawner: SpawnerLink, dead: list[BubblewrapGuest]) -> None:
        """Remove the files of sandboxes that died with their spawner."""
        with contextlib.suppress(GuestGone):  # this spawner died too; what is left is removed at the end
            for guest in dead:
                await guest.kill()
                await self._ground.remove_remains(spawner, guest.sandbox_id)

    async def failed(self) -> RuntimeUnavailable:
        return await self._spawners.failed()

    async def close(self) -> None:
        while self._launching:
            await asyncio.wait(list(self._launching.values()))
        await self._spawners.settled()
        try:
            await asyncio.gather(*(guest.kill() for guest in list(self._guests.values())))
            await asyncio.gather(*self._chores)
            await self._volumes.settled()
            await self._recipes.settled()
            if self._library is not None:
                await self._library.settled()
                with contextlib.suppress(GuestGone, RuntimeUnavailable):  # the next server here does it
                    await self._library.tidy()
            await self._images.settled()
        finally:
            spawner = self._spawners.retire()
            if spawner is not None:
                await self._ground.clear(spawner)
                await spawner.close()
            self._volumes.close()


def _raise_descriptor_limit() -> None:
    """A sandbox takes four descriptors and a command up to five: the usual soft limit would end at 200 sandboxes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
