"""Which volumes there are: their names, ids and tokens. Their files are the runtime's, see `runtime.volumes`."""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import secrets
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from managed_e2b.local.errors import ApiError, bad_request
from managed_e2b.local.runtime.base import GuestError, GuestGone, Runtime, RuntimeUnavailable
from managed_e2b.local.runtime.volumes import Volumes, VolumesTaken
from managed_e2b.local.tasks import Tasks
from managed_e2b.local.volumes.rules import VolumeMount, is_name, mount_problems

log = logging.getLogger(__name__)

MOST_VOLUMES = 1000
PATIENCE = 20.0
"""Seconds that the answer to a delete waits for the files to be gone; then they go on going."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Volume:
    """`token` is what the content API asks for."""

    volume_id: str
    name: str
    token: str = field(repr=False)


class VolumeCatalog:
    """All happens on one event loop: what has no `await` in it is atomic."""

    def __init__(self, runtime: Runtime, tasks: Tasks | None = None) -> None:
        self._runtime = runtime
        self._tasks = tasks or Tasks()
        self._volumes: dict[str, Volume] = {}
        self._making: set[str] = set()  # names
        self._loading = asyncio.Lock()
        self._loaded = False

    async def load(self) -> None:
        """Before all else that is asked of it. Raises ApiError(503) when another server has the volumes."""
        async with self._loading:
            if self._loaded:
                return
            try:
                kept = await self.files.open()
            except VolumesTaken as error:
                text = f"{error}: stop it, or start this one with --forget-volumes or another --data-dir"
                raise ApiError(503, text, headers={"Should-Retry": "false"}) from error
            except (GuestError, GuestGone, RuntimeUnavailable) as error:
                raise _refused("found", error) from error
            self._volumes = {volume_id: _volume(volume_id, name) for volume_id, name in sorted(kept.items())}
            self._loaded = True

    def __iter__(self) -> Iterator[Volume]:
        return iter(list(self._volumes.values()))

    @property
    def files(self) -> Volumes:
        """Of the volumes, by their ids."""
        return self._runtime.volumes

    @property
    def one_id(self) -> bool:
        """Whether all users of sandboxes are one here, and all files in volumes root's."""
        return self._runtime.library.one_id

    def get(self, volume_id: str) -> Volume:
        """Raises ApiError: 400 for what is no id, 404."""
        try:
            found = self._volumes.get(str(uuid.UUID(volume_id)))
        except ValueError as error:
            raise bad_request("Invalid volume ID") from error
        if found is None:
            raise ApiError(404, "Volume not found")
        return found

    def owner_of(self, volume_id: str, token: str) -> Volume | None:
        """The volume, if there is one whose token this is."""
        volume = self._volumes.get(volume_id)
        fits = hmac.compare_digest(token.encode(), (volume.token if volume else "").encode())
        return volume if volume is not None and fits else None

    async def create(self, name: str) -> Volume:
        """A new and empty one. Raises ApiError: 400 for a name that is taken or none, 507 (no space), 503."""
        if not is_name(name):
            raise bad_request("Invalid volume name")
        if name in self._making or any(volume.name == name for volume in self):
            raise bad_request(f"Volume with name '{name}' already exists")
        if len(self._volumes) + len(self._making) >= MOST_VOLUMES:
            raise ApiError(429, f"there are {MOST_VOLUMES} volumes already", headers={"Should-Retry": "false"})
        self._making.add(name)
        return await self._tasks.finish(self._create(name))

    async def _create(self, name: str) -> Volume:
        volume = _volume(str(uuid.uuid4()), name)
        try:
            await self.files.create(volume.volume_id, name)
        except (GuestError, GuestGone, RuntimeUnavailable) as error:
            raise _refused("created", error) from error
        finally:
            self._making.discard(name)
        self._volumes[volume.volume_id] = volume
        return volume

    async def delete(self, volume_id: str) -> None:
        """With all its files, also when sandboxes have it mounted: they find it empty. Raises ApiError: 400, 404."""
        volume = self.get(volume_id)
        del self._volumes[volume.volume_id]
        removing = self._tasks.start(self._remove(volume))
        await asyncio.wait([removing], timeout=PATIENCE)

    async def _remove(self, volume: Volume) -> None:
        try:
            while not await self.files.remove(volume.volume_id):
                pass
        except (GuestError, GuestGone, RuntimeUnavailable) as error:
            # nobody can reach them any more; the next server removes them, or they go with this one
            log.warning("the files of volume %s could not be removed: %s", volume.volume_id, error)

    def mounts(self, asked: Sequence[tuple[str, str]]) -> tuple[VolumeMount, ...]:
        """What was asked for, as pairs of a name and a path. Raises ApiError(400) that tells all that is wrong."""
        ids = {volume.name: volume.volume_id for volume in self}
        problems = mount_problems([path for _, path in asked])
        problems += [
            f"volume mount #{i}: volume '{name}' not found" for i, (name, _) in enumerate(asked) if name not in ids
        ]
        if problems:
            raise bad_request("invalid mounts:\n" + "\n".join(f"\t- {problem}" for problem in problems))
        return tuple(VolumeMount(name, path, ids[name]) for name, path in asked)

    async def close(self) -> None:
        await self._tasks.cancel()


def _volume(volume_id: str, name: str) -> Volume:
    return Volume(volume_id, name, secrets.token_urlsafe(32))


def _refused(what: str, error: GuestError | GuestGone | RuntimeUnavailable) -> ApiError:
    if isinstance(error, GuestError):
        if error.errno in _FULL:
            return ApiError(507, "there is no space left for a volume", headers={"Should-Retry": "false"})
        log.error("a volume could not be %s: %s", what, error.message)
        return ApiError(500, f"the volume could not be {what}")
    return ApiError(503, str(error))
