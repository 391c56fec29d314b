"""What the spawner does on the host for the sandboxes' files: a way to them, a namespace with their ids, removal.

Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from managed_e2b.local.runtime import channel, children, layers, linux
from managed_e2b.local.runtime.children import StepError
from managed_e2b.local.runtime.userns import MapSpec, enter_new

_MAX_TEXT = 4000
_VIEWPOINTS = ("/mnt", "/media", "/srv", "/tmp")


def reachable(directory: str) -> str:
    """Bind a directory where every id can reach it, in a mount namespace that only the spawner and its forks see.

    The ids of the sandboxes are nobody on the host: they could not pass a directory such as /root on the way.
    Returns the new path; the same one for ordinary users, who map themselves, and where root may not mount.
    Raises OSError.
    """
    os.stat(directory)
    viewpoint = next((place for place in _VIEWPOINTS if os.path.isdir(place)), None)
    if viewpoint is None or os.geteuid() != 0:
        return directory
    try:
        linux.unshare(linux.CLONE_NEWNS)
    except PermissionError:
        return directory
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount(directory, viewpoint, None, linux.MS_BIND)
    return viewpoint


def keep_user_namespace(spec: MapSpec) -> int:
    """A descriptor of a new user namespace with this id map: it lives as long as the descriptor. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run() -> None:
        enter_new(spec)
        namespace = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        children.tell(theirs, {}, [namespace])

    with ours, theirs:
        pid = children.fork(run, theirs)
        theirs.close()
        data, fds = channel.receive(ours)
        os.waitpid(pid, 0)
    if not fds:
        told: dict[str, Any] = channel.LOST if fds is None else json.loads(data) if data else {}
        message = told.get("message", "the helper died")
        raise StepError(told.get("step", "user namespace"), OSError(told.get("errno", errno.EIO), message))
    return fds[0]


def try_overlay(directory: str) -> dict[str, Any]:
    """Whether a new directory can hold an overlay: `{"ok", "detail", "xattrs"}`. For a fork: it leaves a mount."""
    probe = os.path.join(directory, "merged", "probe")
    try:
        os.mkdir(directory)
        os.chdir(directory)
        for name in ("lower", "upper", "upper-work", "merged"):
            os.mkdir(name)
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("overlay", "merged", "overlay", linux.MS_NODEV, layers.options(["lower"], "upper"))
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except OSError as error:
        return {"ok": False, "detail": error.strerror or str(error), "xattrs": False}
    try:
        os.setxattr(probe, "user.probe", b"1")
    except OSError as error:
        return {"ok": True, "detail": f"no user xattrs: {error.strerror}", "xattrs": False}
    return {"ok": True, "detail": "", "xattrs": True}


def keep(directories: Sequence[str], layer: str) -> None:
    """Copy directories, by their last names, into a new one, as an overlay's layer: with whatever tells of removals.

    For a fork. The copy is `cp`'s: it knows holes, links, and how to share blocks where the filesystem can.
    """
    os.mkdir(layer, 0o755)
    report, output = os.pipe2(os.O_CLOEXEC)
    pid = os.posix_spawnp(
        "cp",
        ["cp", "-a", "--reflink=auto", "--", *directories, layer],
        {"PATH": os.defpath, "LC_ALL": "C"},
        file_actions=[(os.POSIX_SPAWN_DUP2, output, 2)],
    )
    os.close(output)
    with open(report, "rb") as told:
        text = told.read(_MAX_TEXT).decode("utf-8", "replace")
        told.read()  # to the end: it must not wait for us
    _, status = os.waitpid(pid, 0)
    if status:
        number = errno.ENOSPC if "No space left" in text else errno.EIO
        raise OSError(number, next(iter(text.strip().splitlines()), "cp failed"))


def measure(directory: str) -> int:
    """Bytes on disk of all that is in a directory. For a fork. Links are not followed."""
    total = 0
    pending = [directory]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return total


def remove_tree(top: str) -> None:
    """Remove a directory and what is in it, as `empty` does; of a link, the link alone. Missing is fine."""
    if os.path.islink(top):
        os.unlink(top)
        return
    try:
        empty(top)
    except FileNotFoundError:
        return
    os.rmdir(top)


def empty(top: str) -> None:
    """Remove what is in a directory: whatever a sandbox made there, of any depth; links are not followed.

    For a fork, because it changes the working directory: so names stay short however deep it goes. Nobody else may be
    changing the tree.
    """
    os.chdir(top)
    pending = [_unlink_files()]
    names: list[str] = []
    while pending:
        if pending[-1]:
            names.append(pending[-1].pop())
            os.chdir(names[-1])
            pending.append(_unlink_files())
            continue
        pending.pop()
        if names:
            os.chdir("..")
            os.rmdir(names.pop())
    os.chdir("/")


def _unlink_files() -> list[str]:
    """Unlink what lies in the working directory but its directories, and name those."""
    os.chmod(".", 0o700)
    directories = []
    with os.scandir(".") as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name)
    return directories
