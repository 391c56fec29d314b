"""Where sandboxes keep their files: one directory a server, with a lock that tells whether that server still lives."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from managed_e2b.local.runtime import base_template, standins
from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.runtime.idmap import IdMap

_SHM = Path("/dev/shm")
_SHM_MINIMUM = 256 * 1024 * 1024
_MAX_NOTE = 65536


def candidates(data_dir: str | os.PathLike[str] | None, uid: int, env: Mapping[str, str]) -> list[Path]:
    """Places to try, best first. Memory comes last: what a sandbox writes there is not on disk."""
    memory = [_SHM / f"me2b-{uid}"]
    if data_dir is not None:
        return [Path(data_dir), *memory]
    places = [Path("/var/lib/me2b")] if uid == 0 else []
    cache = env.get("XDG_CACHE_HOME") or (f"{env['HOME']}/.cache" if env.get("HOME") else "")
    if cache.startswith("/"):
        places.append(Path(cache) / "me2b" / "local")
    if env.get("XDG_RUNTIME_DIR", "").startswith("/"):
        places.append(Path(env["XDG_RUNTIME_DIR"]) / "me2b")
    return [*places, *memory]


def too_small(place: Path) -> bool:
    """Whether a place in memory has too little room to be of use: containers often have 64 MB there."""
    if _SHM not in place.parents:
        return False
    status = os.statvfs(_SHM)
    return status.f_bavail * status.f_frsize < _SHM_MINIMUM


@dataclass
class Home:
    """This server's directory below `top`, as the server sees it; `name` is its last component."""

    top: Path
    name: str
    lock: int

    @property
    def path(self) -> Path:
        return self.top / self.name

    def keep(self, ids: IdMap, of: str | None = None) -> Path:
        """The directory beside us for layers that outlive their server, and are shared by those of the same ids.

        `of`: an image that has a directory of its own for them. None: `base`.
        """
        path = self.top / ("layers-" + (f"{of}-" if of else "") + str(ids.root_uid))
        with _alone(self.top):
            if not path.exists():
                path.mkdir(mode=0o700)
                if os.geteuid() == 0:
                    os.chown(path, ids.root_uid, ids.root_gid)
        return path

    def retire(self, kept: Path, name: str) -> None:
        """Take all layers but `name` out of `kept`, if no other server lives: they go when we do.

        A server that starts from now on finds them gone; one that has started may be using them.
        """
        with _alone(self.top):
            if any(file.stem != self.name for file in self.top.glob("*.lock")):
                return
            for old in kept.iterdir():
                if old.name != name:
                    old.rename(self.path / f"old-{old.name}")

    @contextmanager
    def only_one(self) -> Iterator[bool]:
        """While it lasts no server starts or ends here. Yields whether there is no other one."""
        with _alone(self.top):
            yield not any(file.stem != self.name for file in self.top.glob("*.lock"))

    def note(self, facts: dict[str, Any]) -> None:
        """Let the next server know what is ours beside the directory, should we die."""
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps(facts).encode(), 0)

    def noted(self) -> dict[str, Any]:
        """What its server has noted."""
        try:
            facts = json.loads(os.pread(self.lock, _MAX_NOTE, 0))
        except ValueError:  # it died before it could
            return {}
        return facts if isinstance(facts, dict) else {}

    def release(self) -> None:
        """Remove the (emptied) directory and the lock."""
        with _alone(self.top):
            self.path.rmdir()
            _lock_file(self.top, self.name).unlink()
        os.close(self.lock)


def claim(place: Path, ids: IdMap) -> Home:
    """Make a directory of our own below `place`, which only the sandboxes' root enters. Raises RuntimeUnavailable."""
    top = place / "sandboxes"
    try:
        for directory in (place, top):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = directory.lstat()  # before anything is made in it: somebody else's link may be there
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise RuntimeUnavailable(f"{directory} is not a directory that only you can write to: choose another")
        top.chmod(0o711)  # the spawner shows `top` to the sandboxes' ids, who must pass it
        with _alone(top):
            return _make_home(top, ids)
    except OSError as error:
        message = f"cannot keep sandboxes in {place} ({error.strerror}): choose another data directory"
        raise RuntimeUnavailable(message) from error


def _make_home(top: Path, ids: IdMap) -> Home:
    name = secrets.token_hex(8)
    lock = os.open(_lock_file(top, name), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (top / name).mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(top / name, ids.root_uid, ids.root_gid)
    except BaseException:
        os.close(lock)
        raise
    return Home(top, name, lock)


def made_by(ids: IdMap) -> str:
    """What layers depend on beside the host's files: ids, the code, and the boot, as a crash may leave files empty."""
    digest = hashlib.sha256(repr((ids.uids, ids.gids)).encode())
    for module in (base_template, standins):
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    return digest.hexdigest()


def abandoned(top: Path) -> list[Home]:
    """Directories of servers that have ended, each now locked by us. Those of living servers are left alone."""
    found = []
    with _alone(top):
        for file in sorted(top.glob("*.lock")):
            lock = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            home = Home(top, file.name.removesuffix(".lock"), lock)
            home.path.mkdir(exist_ok=True)  # it died between its lock and its directory
            found.append(home)
    return found


def _lock_file(top: Path, name: str) -> Path:
    return top / f"{name}.lock"


@contextmanager
def _alone(top: Path) -> Iterator[None]:
    """One server at a time: between making a lock file and locking it, it would look abandoned."""
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
