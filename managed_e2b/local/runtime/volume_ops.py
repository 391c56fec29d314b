"""The operations on the files of a volume: what the content API of volumes does with them.

Each runs in a fork that has the volume as its root directory, as root of the sandboxes' ids: whatever links a sandbox
has put into it, none leads out. Data does not flow through it: `open_read` and `open_write` hand out descriptors, and
`list` one from which the entries can be read, a line of JSON each.

Standard library only, and everything is imported at the top. An operation fails with OSError and nothing else.

| op | arguments | value |
|---|---|---|
| stat | path | an entry; of a link: the link's |
| list | path, depth | ; + descriptor to read the entries from, parents before what is in them |
| make_dir | path, owner, mode, force | the entry; `force`: with its parents, and it may exist |
| update | path, uid, gid, mode (None: as it is) | the entry |
| remove | path | |
| open_read | path | size; + descriptor of a regular file |
| open_write | path, owner, mode, force | the entry; + descriptor; `force`: with its parents, and it may exist |

`owner` is `[uid, gid]`, None: whoever has made it. An entry is `{"name", "path", "type", "size", "mode", "uid", "gid",
"target"}` and three times in ns; its mode has the nine bits of permissions.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from managed_e2b.local.runtime import agent_trees
from managed_e2b.local.runtime.agent_entries import (
    DIR_FLAGS,
    OPEN_FLAGS,
    is_gone,
    locate,
    open_regular,
    refuse_special,
    resolve,
    to_path,
    to_text,
)

Args = dict[str, Any]
Tell = Callable[[Any, Sequence[int]], None]

_PARENT_MODE = 0o777
_REMOVAL = 50.0  # seconds: a sandbox could keep a directory from being empty for ever
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def run(op: str, args: Args, tell: Tell) -> tuple[Any, list[int]] | None:
    """Do it. What it returns is to be told; None: it has told, and then done more."""
    if op == "list":
        _list(args, tell)
        return None
    return _HANDLERS[op](args)


def entry(path: bytes, shown: bytes | None = None) -> dict[str, Any]:
    """What is at `path`, told as `shown`."""
    status = os.lstat(path)
    shown = path if shown is None else shown
    return {
        "name": to_text(os.path.basename(shown)) or "/",
        "path": to_text(shown),
        "type": _KINDS.get(stat.S_IFMT(status.st_mode), "unknown"),
        "size": status.st_size,
        "mode": status.st_mode & 0o777,
        "uid": status.st_uid,
        "gid": status.st_gid,
        "atime_ns": status.st_atime_ns,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "target": to_text(os.readlink(path)) if stat.S_ISLNK(status.st_mode) else None,
    }


def _stat(args: Args) -> tuple[Any, list[int]]:
    path = to_path(args["path"])
    return entry(locate(path), path), []


def _list(args: Args, tell: Tell) -> None:
    path = to_path(args["path"])
    root = resolve(path)
    os.close(os.open(root, DIR_FLAGS))  # what is wrong with it must be told before anything else is
    reader, writer = os.pipe2(os.O_CLOEXEC)
    tell(None, [reader])
    os.close(reader)
    with open(writer, "wb") as lines:  # no text: a codec would be imported
        for found in _walk(root, path, int(args["depth"])):
            lines.write(json.dumps(found).encode() + b"\n")


def _walk(root: bytes, shown: bytes, depth: int) -> Iterator[dict[str, Any]]:
    """What goes away meanwhile is left out."""
    try:
        fd = os.open(root, DIR_FLAGS)
        try:
            names = sorted(os.fsencode(name) for name in os.listdir(fd))
        finally:
            os.close(fd)
    except OSError:
        return
    for name in names:
        child, told = os.path.join(root, name), os.path.join(shown, name)
        try:
            found = entry(child, told)
        except OSError as error:
            if not is_gone(error):
                raise
            continue
        yield found
        if found["type"] == "directory" and depth > 1:
            yield from _walk(child, told, depth - 1)


def _make_dir(args: Args) -> tuple[Any, list[int]]:
    path = to_path(args["path"])
    target, force = resolve(path), bool(args["force"])
    if force:
        _make_parents(target, args["owner"])
    try:
        os.mkdir(target, 0o700)
    except FileExistsError:
        if not force or not stat.S_ISDIR(os.stat(target).st_mode):
            raise
    else:
        fd = os.open(target, DIR_FLAGS)
        try:
            _give(fd, args["owner"], args["mode"])
        finally:
            os.close(fd)
    return entry(target, path), []


def _update(args: Args) -> tuple[Any, list[int]]:
    path = to_path(args["path"])
    target = resolve(path)
    if args["mode"] is not None:
        os.chmod(target, args["mode"])
    if args["uid"] is not None or args["gid"] is not None:
        uid, gid = (-1 if args[name] is None else args[name] for name in ("uid", "gid"))
        os.chown(target, uid, gid, follow_symlinks=False)
    return entry(target, path), []


def _remove(args: Args) -> tuple[Any, list[int]]:
    target = locate(os.path.normpath(to_path(args["path"])))
    if target == b"/":
        raise OSError(errno.EBUSY, "the root of a volume cannot be removed")
    os.lstat(target)
    deadline = time.monotonic() + _REMOVAL
    for _ in agent_trees.remove(target):
        if time.monotonic() > deadline:
            raise OSError(errno.ENOTEMPTY, "too much is in it, or more comes all the time: remove it again")
    return None, []


def _open_read(args: Args) -> tuple[Any, list[int]]:
    fd = open_regular(resolve(to_path(args["path"])), os.O_RDONLY)
    return {"size": os.fstat(fd).st_size}, [fd]


def _open_write(args: Args) -> tuple[Any, list[int]]:
    path = to_path(args["path"])
    target, force = resolve(path), bool(args["force"])
    if force:
        _make_parents(target, args["owner"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if force else os.O_EXCL)
    fd = os.open(target, flags | OPEN_FLAGS, 0o600)
    refuse_special(os.fstat(fd))
    os.ftruncate(fd, 0)
    _give(fd, args["owner"], args["mode"])
    return entry(target, path), [fd]


def _make_parents(target: bytes, owner: Sequence[int] | None) -> None:
    missing = []
    parent = os.path.dirname(target)
    while not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:  # somebody in a sandbox was quicker: it is theirs
            continue
        fd = os.open(directory, DIR_FLAGS)
        try:
            _give(fd, owner, _PARENT_MODE)
        finally:
            os.close(fd)


def _give(fd: int, owner: Sequence[int] | None, mode: int) -> None:
    if owner is not None:
        os.fchown(fd, *owner)
    os.fchmod(fd, mode)


_HANDLERS: dict[str, Callable[[Args], tuple[Any, list[int]]]] = {
    "stat": _stat,
    "make_dir": _make_dir,
    "update": _update,
    "remove": _remove,
    "open_read": _open_read,
    "open_write": _open_write,
}
