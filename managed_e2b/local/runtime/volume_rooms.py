"""The place where volumes are mounted: a mount namespace of the spawner's, in which no process stays.

All sandboxes that have a volume, and all that the server does with its files, must go through one mounted filesystem,
or one would not see what the other changes. It is an overlay with nothing below: of a plain bind of a directory of the
host, /proc/self/mountinfo in a sandbox would tell the whole path. Where there are no overlays, it is that bind.

Standard library only; all but `Room` runs in forks of the spawner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from managed_e2b.local.runtime import agent_trees, children, layers, linux, volume_ops

Answer = tuple[Any, list[int]]
_ALL_MAY_WRITE = 0o777
_SLICE = 2.0  # seconds of removal in one fork


@dataclass(frozen=True)
class Room:
    """`namespace` is the spawner's descriptor of it, `top` the path of all volumes in it."""

    namespace: int
    top: str


def open_room(maintenance: int, store: str, scratch: str, overlay: bool, report: socket.socket) -> None:
    """Mount `store`, made when it is missing, in a new room; tell its namespace. `scratch`: a new directory."""
    _enter(maintenance, report)
    with children.step("volumes"):
        os.makedirs(store, mode=0o700, exist_ok=True)
        os.makedirs(scratch, mode=0o700)
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        os.chdir(scratch)
        for name in ("none", "work", "all"):
            os.mkdir(name)
        flags = linux.MS_NOSUID | linux.MS_NODEV
        if overlay:
            upper = os.path.relpath(store, scratch)
            options = f"lowerdir=none,upperdir={upper},workdir=work,userxattr,volatile"
            linux.mount("overlay", "all", "overlay", flags, options)
        else:
            linux.mount(store, "all", None, linux.MS_BIND)
            linux.mount("none", "all", None, linux.MS_REMOUNT | linux.MS_BIND | flags)
    namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    children.tell(report, {"value": None}, [namespace])


def visit(maintenance: int, room: Room, work: Callable[[socket.socket], Answer | None], report: socket.socket) -> None:
    """Enter a room as root of the sandboxes' ids, do `work`, and tell what it returns, unless it has told by itself."""
    _enter(maintenance, report, room.namespace)
    with children.step("setns"):
        linux.setns(room.namespace, linux.CLONE_NEWNS)
    told = work(report)
    if told is not None:
        value, fds = told
        children.tell(report, {"value": value}, fds)


def create(path: str) -> Answer:
    """Make a volume."""
    os.mkdir(path)
    os.chmod(path, _ALL_MAY_WRITE)
    return None, []


def remove(top: str, name: str) -> Answer:
    """Remove a volume, or go on with it, for a while. The value tells whether all of it is gone.

    Sandboxes may be busy with it, and could keep it from being empty for ever. So what is in it is first moved to where
    no mount leads, which takes so little time that it is empty once; without its directory nothing more comes into it.
    """
    _confine(top)
    volume, grave = (b"/" + os.fsencode(f"{name}{suffix}") for suffix in ("", ".gone"))
    deadline = time.monotonic() + _SLICE
    with contextlib.suppress(FileExistsError):
        os.mkdir(grave, 0o700)
    while not _is_gone(volume):
        if time.monotonic() > deadline:
            return False, []
        _move_all(volume, grave)
    for _ in agent_trees.remove(grave):
        if time.monotonic() > deadline:
            return False, []
    return not os.path.lexists(grave), []


def _is_gone(directory: bytes) -> bool:
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def _move_all(source: bytes, destination: bytes) -> None:
    for name in os.listdir(source):
        with contextlib.suppress(FileNotFoundError):
            os.rename(os.path.join(source, name), b"%s/%d" % (destination, time.monotonic_ns()))


def mounts(paths: Sequence[str]) -> Answer:
    """For each path a copy of its mount, for a sandbox to mount. Raises StepError."""
    found: list[int] = []
    with children.step(layers.VOLUME_STEP):
        for path in paths:
            found.append(linux.clone_mount(path))
    return None, found


def operate(path: str, op: str, args: dict[str, Any], report: socket.socket) -> Answer | None:
    """Run an operation of `volume_ops` with a volume as the root."""
    _confine(path)
    return volume_ops.run(op, args, lambda value, fds: children.tell(report, {"value": value}, fds))


def _enter(maintenance: int, report: socket.socket, *more: int) -> None:
    children.keep_only([maintenance, report.fileno(), *more])
    children.detach_signals()
    linux.set_dumpable(False)
    children.seal_imports()
    with children.step("setns"):
        linux.setns(maintenance, linux.CLONE_NEWUSER)
    children.become_root()
    os.umask(0)


def _confine(path: str) -> None:
    os.chroot(path)
    os.chdir("/")
