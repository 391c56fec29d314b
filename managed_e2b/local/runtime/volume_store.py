"""`volumes.Volumes` over the spawner: each volume is a directory, all below one, which is mounted in a room."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from managed_e2b.local.runtime.base import Reply
from managed_e2b.local.runtime.ground import Ground
from managed_e2b.local.runtime.link import OperationFailed, SpawnerLink
from managed_e2b.local.runtime.volumes import Mount, MountFailed


class VolumeStore:
    """One a runtime. Nothing is made before the first volume is."""

    def __init__(self, spawner: Callable[[], SpawnerLink], ground: Ground) -> None:
        self._spawner = spawner
        self._ground = ground
        self._rooms = itertools.count(1)  # an overlay wants a directory of its own to work in
        self._room_of: SpawnerLink | None = None
        self._lock = asyncio.Lock()

    async def create(self, volume: str) -> None:
        await self._call(self._spawner(), "create_volume", volume=volume)

    async def remove(self, volume: str) -> None:
        await self._call(self._spawner(), "remove_volume", volume=volume)

    async def call(self, volume: str, op: str, **args: Any) -> Reply:
        return await self._call(self._spawner(), "volume", volume=volume, operation=op, args=args)

    async def mounts(self, spawner: SpawnerLink, wanted: Sequence[Mount]) -> list[int]:
        """For each a mount that is mounted nowhere yet, which the caller closes. Raises MountFailed, GuestGone."""
        if not wanted:
            return []
        try:
            return (await self._call(spawner, "mount_volumes", volumes=[mount.volume for mount in wanted])).fds
        except OperationFailed as error:
            raise MountFailed(f"its volumes cannot be mounted: {error.message}") from error

    async def _call(self, spawner: SpawnerLink, op: str, **args: Any) -> Reply:
        async with self._lock:
            if spawner is not self._room_of:
                scratch = f"{self._ground.view}/rooms/{next(self._rooms)}"
                store, overlay = f"{self._ground.view}/volumes", self._ground.overlay
                await spawner.call("open_room", store=store, scratch=scratch, overlay=overlay)
                self._room_of = spawner
        return await spawner.call(op, **args)
