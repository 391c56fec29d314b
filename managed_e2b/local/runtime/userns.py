"""A process of the spawner enters a new user namespace that has the id map of the sandboxes.

The map must be written by a process outside, so the one that enters first forks a helper that stays behind.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass

from managed_e2b.local.runtime import children, linux
from managed_e2b.local.runtime.children import StepError
from managed_e2b.local.runtime.confine import MOST_PROCESSES

OWNERS = 65536


@dataclass(frozen=True)
class MapSpec:
    """What to write: lines of `inside outside count`, and who writes them ("write", "helpers", "single")."""

    uids: Sequence[Sequence[int]]
    gids: Sequence[Sequence[int]]
    via: str
    helpers: Sequence[str] = ()  # paths of newuidmap and newgidmap
    owners: int | None = None  # the first of OWNERS ids, of which one owns each sandbox's namespace


def enter_new(spec: MapSpec, owner: int | None = None, most: int = MOST_PROCESSES) -> None:
    """Leave the caller as root, with no supplementary groups, of a new user namespace. Raises StepError.

    With `owner`, an id of the host that nobody has, the namespace is that one's. To its owner the kernel counts what
    all ids inside have together of processes, inotify instances, queued signals and the like: else that is the host's
    root, and one sandbox could leave nothing for the host and for the others. `most`: processes of that owner.
    """
    linux.set_dumpable(True)  # the helper must be able to open our map files
    go_reader, go_writer = os.pipe2(os.O_CLOEXEC)
    done_reader, done_writer = os.pipe2(os.O_CLOEXEC)
    target = os.getpid()
    helper = children.fork(lambda: _write_when_told(spec, target, (go_reader, go_writer), (done_reader, done_writer)))
    os.close(done_writer)
    try:
        if owner is not None:
            _become_owner(owner, most)
        with children.step("unshare"):
            linux.unshare(linux.CLONE_NEWUSER)
        os.write(go_writer, b".")
        answer = os.read(done_reader, 4096)
    finally:
        for fd in (go_reader, go_writer, done_reader):
            os.close(fd)
        os.waitpid(helper, 0)
    if answer != b"ok":
        raise StepError("id map", OSError(1, answer.decode() or "the helper that writes the id map died"))
    children.become_root()


def _become_owner(owner: int, most: int) -> None:
    """Change the id and nothing else: a host may let only the privileged make user namespaces."""
    try:
        linux.keep_capabilities()
    except PermissionError:  # a container's root with little to say: it stays the owner
        return
    with children.step("owner"):
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        os.setresuid(owner, owner, owner)
    linux.set_dumpable(True)  # the change took it back


def _write_when_told(spec: MapSpec, target: int, go: tuple[int, int], done: tuple[int, int]) -> None:
    os.close(go[1])
    if os.read(go[0], 1) != b".":
        return
    try:
        _write_maps(spec, target)
    except OSError as error:
        os.write(done[1], (error.strerror or str(error)).encode()[:4000])
    else:
        os.write(done[1], b"ok")


def _write_maps(spec: MapSpec, target: int) -> None:
    if spec.via == "helpers":
        for helper, extents in zip(spec.helpers, (spec.uids, spec.gids), strict=True):
            argv = [helper, str(target), *(str(number) for extent in extents for number in extent)]
            pid = os.posix_spawn(helper, argv, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code:
                raise OSError(1, f"{os.path.basename(helper)} exited with {code}: check /etc/subuid and /etc/subgid")
        return
    if spec.via == "single":
        with contextlib.suppress(FileNotFoundError):  # kernels before 3.19 have no such file, and need none
            _put(f"/proc/{target}/setgroups", "deny")
    _put(f"/proc/{target}/uid_map", _lines(spec.uids))
    _put(f"/proc/{target}/gid_map", _lines(spec.gids))


def _lines(extents: Sequence[Sequence[int]]) -> str:
    return "\n".join(" ".join(str(number) for number in extent) for extent in extents)


def _put(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
