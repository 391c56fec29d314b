"""`volumes.Volumes` over the spawner: each volume is a directory, all below one, which is mounted in a room."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from managed_e2b.local.runtime.base import GuestError, Reply
from managed_e2b.local.runtime.ground import Ground
from managed_e2b.local.runtime.link import OperationFailed, SpawnerLink
from managed_e2b.local.runtime.volume_shelf import FILES, VolumeShelf, directory_name
from managed_e2b.local.runtime.volumes import Mount, MountFailed

_log = logging.getLogger(__name__)


class VolumeStore:
    """One a runtime. Nothing is made before somebody asks. `keep`: they outlive the server, see `volume_shelf`."""

    def __init__(self, spawner: Callable[[], SpawnerLink], ground: Ground, *, keep: bool) -> None:
        self._spawner = spawner
        self._ground = ground
        self._keep = keep
        self._shelf: VolumeShelf | None = None
        self._rooms = itertools.count(1)  # an overlay wants a directory of its own to work in
        self._room_of: SpawnerLink | None = None
        self._lock = asyncio.Lock()
        self._removing: set[asyncio.Task[bool]] = set()

    async def open(self) -> dict[str, str]:
        if not self._keep:
            return {}
        try:
            if self._shelf is None:
                self._shelf = await asyncio.to_thread(VolumeShelf, self._ground.home.top, self._ground.ids)
            names, half = await asyncio.to_thread(self._shelf.look)
        except OSError as error:
            raise _failed(error) from error
        for volume in half:
            _log.warning("removing volume %s, which was being made or removed when an earlier server died", volume)
            while not await self.remove(volume):
                pass
        return names

    async def create(self, volume: str, name: str) -> None:
        await self._call(self._spawner(), "create_volume", volume=volume)
        if self._shelf is not None:
            try:
                await asyncio.to_thread(self._shelf.add, volume, name)
            except OSError as error:
                raise _failed(error) from error

    async def remove(self, volume: str) -> bool:
        removing = asyncio.create_task(self._remove(volume))
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)
        return await asyncio.shield(removing)

    async def _remove(self, volume: str) -> bool:
        if self._shelf is not None:
            await asyncio.to_thread(self._shelf.drop, volume)
        return bool((await self._call(self._spawner(), "remove_volume", volume=volume)).value)

    async def settled(self) -> None:
        """Wait until nothing is being removed."""
        await asyncio.gather(*self._removing, return_exceptions=True)

    async def call(self, volume: str, op: str, **args: Any) -> Reply:
        return await self._call(self._spawner(), "volume", volume=volume, operation=op, args=args)

    async def mounts(self, spawner: SpawnerLink, wanted: Sequence[Mount]) -> list[int]:
        """For each a mount that is mounted nowhere yet, which the caller closes. Raises MountFailed, GuestGone."""
        if not wanted:
            return []
        try:
            return (await self._call(spawner, "mount_volumes", volumes=[mount.volume for mount in wanted])).fds
        except OperationFailed as error:
            detail = "one was deleted" if error.errno == errno.ENOENT else error.message
            raise MountFailed(f"its volumes cannot be mounted ({detail})") from error

    def close(self) -> None:
        """Let another server have what is kept. Nothing is mounted any more."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            shelf.close()

    async def _call(self, spawner: SpawnerLink, op: str, **args: Any) -> Reply:
        async with self._lock:
            if spawner is not self._room_of:
                scratch = f"{self._ground.view}/rooms/{next(self._rooms)}"
                await spawner.call("open_room", store=self._store, scratch=scratch, overlay=self._ground.overlay)
                self._room_of = spawner
        return await spawner.call(op, **args)

    @property
    def _store(self) -> str:
        if self._shelf is None:
            return f"{self._ground.view}/volumes"
        return f"{os.path.dirname(self._ground.view)}/{directory_name(self._ground.ids)}/{FILES}"


def _failed(error: OSError) -> GuestError:
    return GuestError(error.errno or errno.EIO, error.strerror or str(error))
