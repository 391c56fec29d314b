"""The fork that becomes a sandbox: a new user namespace, its mounts, then bubblewrap in its place.

Standard library only; runs in a fork of the spawner.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from managed_e2b.local.runtime import children, layers, linux
from managed_e2b.local.runtime.confine import Confinement
from managed_e2b.local.runtime.layers import Layout
from managed_e2b.local.runtime.userns import MapSpec, enter_new

# Descriptors of the first process inside; `bwrap.py` writes its script with these numbers.
LIFE_FD = 10
READY_FD = 11
INFO_FD = 12
BOOT_ID_FD = 13
READY = b"ready\n"

_MAX_TEXT = 4000
FIRST_OOM_SCORE = children.OOM_SCORE // 2  # the end of the first process is the end of all in there


@dataclass(frozen=True)
class LaunchPipes:
    life_reader: int
    status_writer: int
    info_writer: int


def become_sandbox(
    spec: MapSpec,
    owner: int | None,
    layout: Layout,
    argv: Sequence[str],
    pipes: LaunchPipes,
    parent: int,
    confinement: Confinement,
    volumes: Sequence[int] = (),
    *,
    grouped: bool = False,
) -> None:
    """Never returns on success. A failure is told on the status pipe, as bubblewrap tells its own.

    `volumes`: see `layers.mount`. `grouped`: the groups are made, and this process is in them.
    """
    children.detach_signals()
    os.setsid()
    os.umask(0o022)
    status = pipes.status_writer
    try:
        volumes = _arrange(pipes, volumes)
        status = READY_FD
        with children.step("limits"):
            if not grouped:
                confinement.make()
            confinement.apply()
        enter_new(spec, owner, confinement.most_processes)
        _exec_bubblewrap(layout, argv, parent, volumes)
    except OSError as error:
        where = getattr(error, "step", "launch")
        os.write(status, f"{where}: {error.strerror or error}"[:_MAX_TEXT].encode())


def _exec_bubblewrap(layout: Layout, argv: Sequence[str], parent: int, volumes: Sequence[int]) -> NoReturn:
    with contextlib.suppress(OSError):  # a host may forbid it; it only orders who dies first when memory ends
        children.write_text("/proc/self/oom_score_adj", str(FIRST_OOM_SCORE))
    layers.mount(layout, volumes)
    linux.die_with_parent(signal.SIGKILL)  # after the change of ids, which clears it
    if os.getppid() != parent:
        os._exit(1)
    with children.step("boot id"):
        _offer(BOOT_ID_FD, _boot_id())
    with children.step("exec bwrap"):
        os.execve(argv[0], list(argv), {})


def _arrange(pipes: LaunchPipes, volumes: Sequence[int]) -> list[int]:
    """Give the pipes their numbers, make the status pipe stderr too, and close everything else but the volumes."""
    null = os.open("/dev/null", os.O_RDWR)
    wanted = {0: null, 1: null, 2: pipes.status_writer, LIFE_FD: pipes.life_reader, READY_FD: pipes.status_writer}
    wanted[INFO_FD] = pipes.info_writer
    high = {target: _duplicate_above(fd, 64) for target, fd in wanted.items()}
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in volumes]
    for target, fd in high.items():
        os.dup2(fd, target, inheritable=True)
    children.keep_only([LIFE_FD, READY_FD, INFO_FD, *kept])
    return kept


def _offer(number: int, text: bytes) -> None:
    """A descriptor of that number from which a text, shorter than a pipe, can be read."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.write(writer, text)
    os.close(writer)
    if reader != number:
        os.dup2(reader, number, inheritable=True)
        os.close(reader)
    os.set_inheritable(number, True)


def _boot_id() -> bytes:
    """A random UUID, as the kernel makes one for each boot."""
    digits = bytearray(os.urandom(16))
    digits[6], digits[8] = digits[6] & 0x0F | 0x40, digits[8] & 0x3F | 0x80
    text = digits.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}\n".encode()


def _duplicate_above(fd: int, lowest: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD, lowest)


def child_pid(info: bytes) -> int:
    """The host's pid of the sandbox's first process, from bubblewrap's --info-fd. Raises ValueError."""
    value: Any = json.loads(info)
    pid = value.get("child-pid") if isinstance(value, dict) else None
    if not isinstance(pid, int):
        raise ValueError("bubblewrap did not tell the sandbox's process")
    return pid
