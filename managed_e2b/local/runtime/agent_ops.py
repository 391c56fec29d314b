"""The operations of the file agent: what a server may ask of the files of one sandbox.

The agent is a process of ours that has joined a sandbox's user, mount and network namespaces as its root. Every path
resolves in there, so no link can name a file of the host, and the caller need not look at paths at all. It is
single-threaded and answers each call within milliseconds; data never flows through it: `open_read` and `open_write`
hand out descriptors.

Once inside, the host's files are out of sight: this module and what it imports use the standard library alone, and
everything is imported at the top. The agent is not in the sandbox's pid namespace, so /proc/self does not exist for it.

A handler takes its arguments and the descriptors that came with them, and returns a JSON value and the descriptors to
send; those are closed for it afterwards. It fails with OSError and nothing else.

| op | arguments | value |
|---|---|---|
| user | name | name, uid, gid, groups, home, shell; ENOENT |
| stat | path | an entry (`agent_entries.Describer.entry`); links are not followed |
| list | path, depth | a job (`agent_trees.Jobs`) whose items are entries |
| remove | path | a job; what is missing is removed already |
| move | source, destination, uid, gid | a job whose result is the entry of the destination |
| job | job | go on with a job |
| drop | job | forget a job |
| make_dir | path, uid, gid | the entry; EEXIST for a directory, ENOTDIR for anything else |
| open_read | path | size, mtime_ns; + descriptor of a regular file |
| open_write | path, uid, gid, metadata | metadata as stored; + descriptor of an empty regular file |
| watch_open | | + descriptors to poll (`agent_watch.Watches.open`) |
| watch_add | path, recursive, entries, network | the number of the watch |
| watch_drain | | what happened (`agent_watch.Watches.drain`) |
| watch_remove | watch | |
| watch_close | | |
| way_out | | ; see `netlink.open_way_out` |
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from managed_e2b.local.runtime import netlink
from managed_e2b.local.runtime.agent_entries import (
    DIR_FLAGS,
    XATTR_PREFIX,
    Accounts,
    Describer,
    locate,
    metadata,
    open_regular,
    replace_metadata,
    resolve,
    to_path,
)
from managed_e2b.local.runtime.agent_trees import Job, Jobs, move_across, remove, walk
from managed_e2b.local.runtime.agent_watch import Watches

Args = dict[str, Any]
Result = tuple[Any, list[int]]

_accounts = Accounts()
_jobs = Jobs()
_watches = Watches(_accounts)


def op_user(args: Args, fds: list[int]) -> Result:
    return _accounts.user(str(args["name"])), []


def op_stat(args: Args, fds: list[int]) -> Result:
    path = to_path(args["path"])
    return Describer(_accounts).entry(locate(path), path), []


def op_list(args: Args, fds: list[int]) -> Result:
    path = to_path(args["path"])
    root = resolve(path)
    os.stat(root)  # what is wrong with it, a loop of links for example, it tells better than the listing
    return _jobs.start(walk(Describer(_accounts), root, path, int(args["depth"]))), []


def op_remove(args: Args, fds: list[int]) -> Result:
    return _watched(_jobs.start(remove(locate(to_path(args["path"]))))), []


def op_move(args: Args, fds: list[int]) -> Result:
    source, destination = locate(to_path(args["source"])), to_path(args["destination"])
    return _watched(_jobs.start(_move(source, destination, int(args["uid"]), int(args["gid"])))), []


def op_job(args: Args, fds: list[int]) -> Result:
    return _watched(_jobs.advance(int(args["job"]))), []


def op_drop(args: Args, fds: list[int]) -> Result:
    _jobs.drop(int(args["job"]))
    return None, []


def op_make_dir(args: Args, fds: list[int]) -> Result:
    path = to_path(args["path"])
    target = resolve(path)
    try:
        is_directory = stat.S_ISDIR(os.stat(target).st_mode)
    except FileNotFoundError:
        _make_dirs(target, int(args["uid"]), int(args["gid"]))
    else:
        if is_directory:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        # In E2B's words: clients tell by them that it is the path itself, and not one on the way to it.
        raise NotADirectoryError(errno.ENOTDIR, "path already exists but it is not a directory")
    return _watched(Describer(_accounts).entry(target, path)), []


def op_open_read(args: Args, fds: list[int]) -> Result:
    fd = open_regular(resolve(to_path(args["path"])), os.O_RDONLY)
    status = os.fstat(fd)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}, [fd]


def op_open_write(args: Args, fds: list[int]) -> Result:
    """Create the file and its parents, or empty it; it belongs to the user then, with `metadata` as its whole metadata.

    What cannot be stored is refused before anything is changed.
    """
    path, uid, gid, wanted = resolve(to_path(args["path"])), int(args["uid"]), int(args["gid"]), dict(args["metadata"])
    parent = os.path.dirname(path)
    _make_dirs(parent, uid, gid)
    _watched(None)
    if wanted:
        _refuse_without_xattrs(parent)
    with _umask(0o022):
        try:
            fd = open_regular(path, os.O_WRONLY | os.O_TRUNC)
        except FileNotFoundError:
            # Only now with O_CREAT: with it, fs.protected_regular refuses root what others have made in /tmp.
            fd = open_regular(path, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o666)
    try:
        os.fchown(fd, uid, gid)
        replace_metadata(fd, wanted)
        stored = metadata(fd)
    except BaseException:
        os.close(fd)
        raise
    return {"metadata": stored}, [fd]


def op_watch_open(args: Args, fds: list[int]) -> Result:
    return None, list(_watches.open())


def op_watch_add(args: Args, fds: list[int]) -> Result:
    number = _watches.add(
        to_path(args["path"]),
        recursive=bool(args["recursive"]),
        entries=bool(args["entries"]),
        network=bool(args["network"]),
    )
    return number, []


def op_watch_drain(args: Args, fds: list[int]) -> Result:
    return _watches.drain(), []


def op_watch_remove(args: Args, fds: list[int]) -> Result:
    _watches.remove(int(args["watch"]))
    return None, []


def op_watch_close(args: Args, fds: list[int]) -> Result:
    _watches.close()
    return None, []


def _watched(value: Any) -> Any:
    """A change of ours is done: watch the directories it made before anything is put into them."""
    _watches.pump()
    return value


def _move(source: bytes, destination: bytes, uid: int, gid: int) -> Job:
    os.lstat(source)  # a missing source must not leave the parents of a destination behind
    target = locate(destination)
    _make_dirs(os.path.dirname(target), uid, gid)
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        yield from move_across(source, target)
    return Describer(_accounts).entry(target, destination)


def _make_dirs(path: bytes, uid: int, gid: int) -> None:
    """Make a directory and its parents, each new one with mode 0755 and owned by the user. OSError(ENOTDIR)."""
    missing = []
    while True:
        try:
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            break
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            with _umask(0o022):
                os.mkdir(directory, 0o777)
        except FileExistsError:
            continue  # a process of the sandbox was quicker: it is theirs
        fd = os.open(directory, DIR_FLAGS)
        try:
            os.fchown(fd, uid, gid)
        finally:
            os.close(fd)


def _refuse_without_xattrs(directory: bytes) -> None:
    try:
        os.getxattr(directory, XATTR_PREFIX + "probe")
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise


@contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def op_way_out(_args: Args, _fds: list[int]) -> Result:
    """See `netlink`: a listening TCP socket, and a UDP socket."""
    return netlink.open_way_out()


HANDLERS: dict[str, Callable[[Args, list[int]], Result]] = {
    "user": op_user,
    "stat": op_stat,
    "list": op_list,
    "remove": op_remove,
    "move": op_move,
    "job": op_job,
    "drop": op_drop,
    "make_dir": op_make_dir,
    "open_read": op_open_read,
    "open_write": op_open_write,
    "watch_open": op_watch_open,
    "watch_add": op_watch_add,
    "watch_drain": op_watch_drain,
    "watch_remove": op_watch_remove,
    "watch_close": op_watch_close,
    "way_out": op_way_out,
}
