"""Where volumes are that outlive their server: beside the servers' directories, for one server at a time.

The directory has `files/`, of the sandboxes' ids, with a directory for each volume, and `names/`, ours, with a file for
each, which holds its name. A volume exists while it has both: so neither step of making or removing one can be lost.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from managed_e2b.local.runtime.idmap import IdMap
from managed_e2b.local.runtime.volumes import VolumesTaken

FILES = "files"


class VolumeShelf:
    """`top`: where the servers' directories are. Opened with the object, until `close`.

    Raises VolumesTaken, OSError.
    """

    def __init__(self, top: Path, ids: IdMap) -> None:
        self.path = top / directory_name(ids)
        self._names = self.path / "names"
        self._files = self.path / FILES
        self.path.mkdir(mode=0o711, exist_ok=True)
        self._names.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._files.mkdir(mode=0o700, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(self._files, ids.root_uid, ids.root_gid)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise VolumesTaken(f"another server keeps the volumes in {top}") from error
            raise

    def look(self) -> tuple[dict[str, str], set[str]]:
        """The names of all volumes, by their ids; and the ids of those that exist by half."""
        names = {file.name: file.read_text("utf-8") for file in self._names.iterdir()}
        there = {directory.name for directory in self._files.iterdir()}
        return {volume: names[volume] for volume in names.keys() & there}, names.keys() ^ there

    def add(self, volume: str, name: str) -> None:
        """Its files are there."""
        (self._names / volume).write_text(name, "utf-8")

    def drop(self, volume: str) -> None:
        """Its files may go. Missing is fine."""
        (self._names / volume).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)


def directory_name(ids: IdMap) -> str:
    """Servers whose sandboxes have other ids have other volumes: these could not read the files."""
    return f"volumes-{ids.root_uid}"
