"""Volumes: directories that sandboxes share and that outlive them, as the API sees them. No implementation here, see
`volume_store`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from managed_e2b.local.runtime.base import Reply

MOST_MOUNTS = 16
"""Of one sandbox."""


class MountFailed(Exception):
    """A volume cannot be mounted in a sandbox. The message says why, in one line."""


class VolumesTaken(Exception):
    """Another server has the volumes that are kept. The message says where, in one line."""


@dataclass(frozen=True)
class Mount:
    """A volume, by its id, at an absolute path of a sandbox. What is missing of the path is made."""

    volume: str
    path: str


class Volumes(Protocol):
    """Ids are the caller's. All raise GuestGone when what does the work died, which it does again at the next call."""

    async def open(self) -> dict[str, str]:
        """To be called once, before all else: the volumes that earlier servers kept, as names by ids.

        Raises VolumesTaken, GuestError; then it may be called again.
        """
        ...

    async def create(self, volume: str, name: str) -> None:
        """A new and empty one, which everybody in a sandbox may write to. Raises GuestError."""
        ...

    async def remove(self, volume: str) -> bool:
        """Remove it with all that is in it; missing is fine. Who has it mounted finds it empty, and full.

        It takes seconds at most; False: there is more to remove, call it again. Raises GuestError.
        """
        ...

    async def call(self, volume: str, op: str, **args: Any) -> Reply:
        """Run one operation on its files (see `volume_ops`) with the volume as its root: no link leads out of it.

        Raises GuestError (OSError there).
        """
        ...
