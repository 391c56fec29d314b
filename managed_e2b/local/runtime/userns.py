"""A process of the spawner enters a new user namespace that has the id map of the sandboxes.

The map must be written by a process outside, so the one that enters first forks a helper that stays behind.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from managed_e2b.local.runtime import children, linux
from managed_e2b.local.runtime.children import StepError


@dataclass(frozen=True)
class MapSpec:
    """What to write: lines of `inside outside count`, and who writes them ("write", "helpers", "single")."""

    uids: Sequence[Sequence[int]]
    gids: Sequence[Sequence[int]]
    via: str
    helpers: Sequence[str] = ()  # paths of newuidmap and newgidmap


def enter_new(spec: MapSpec) -> None:
    """Leave the caller as root, with no supplementary groups, of a new user namespace. Raises StepError."""
    linux.set_dumpable(True)  # the helper must be able to open our map files
    go_reader, go_writer = os.pipe2(os.O_CLOEXEC)
    done_reader, done_writer = os.pipe2(os.O_CLOEXEC)
    target = os.getpid()
    helper = children.fork(lambda: _write_when_told(spec, target, (go_reader, go_writer), (done_reader, done_writer)))
    os.close(done_writer)
    try:
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
