"""The control groups of sandboxes: made at their start, joined by every process of theirs, removed at their end.

A *tree* is this server's directory in one hierarchy: of version 2, or one for each controller of version 1. Each
sandbox has a directory of its name in each tree. What version 2 offers without any controller (freeze, kill, cpu time)
is used where it is mounted beside version 1 as well; version 1's own freezer is not, as what it has frozen cannot be
killed. Nothing inside sees any of it: no sandbox has a control group filesystem.

Standard library only; runs in the spawner and its forks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from managed_e2b.local.runtime.limits import Limits

PERIOD = 100_000  # µs in which a sandbox may use its share of cpu time
_SMALLEST_QUOTA = 1_000  # µs; the kernel takes no less
_FREEZE_SECONDS = 10.0
_REMOVE_SECONDS = 10.0
_PAUSE = 0.001


@dataclass(frozen=True)
class Tree:
    """`directory` exists; `controllers` are those that work in it, of version 2 perhaps none."""

    directory: str
    version: int
    controllers: frozenset[str]

    @classmethod
    def parse(cls, value: Sequence[Any]) -> Tree:
        """From `as_list`. Raises ValueError or TypeError."""
        directory, version, controllers = value
        if not (isinstance(directory, str) and directory.startswith("/") and version in (1, 2)):
            raise ValueError("not a tree of control groups")
        return cls(directory, version, frozenset(controllers))

    def as_list(self) -> list[Any]:
        return [self.directory, self.version, sorted(self.controllers)]


def settings(tree: Tree, limits: Limits) -> list[tuple[str, str, bool]]:
    """Files of a sandbox's directory and what to write, in order; the third tells whether the file may be missing."""
    found: list[tuple[str, str, bool]] = []
    old = tree.version == 1
    if limits.memory is not None and "memory" in tree.controllers:
        # Swap is no memory more: it would only make the end slow, for the host too. Not every kernel counts it.
        found.append(("memory.limit_in_bytes" if old else "memory.max", str(limits.memory), False))
        swap = ("memory.memsw.limit_in_bytes", str(limits.memory)) if old else ("memory.swap.max", "0")
        found.append((*swap, True))
    if limits.pids is not None and "pids" in tree.controllers:
        found.append(("pids.max", str(limits.pids), False))
    if limits.cpus is not None and "cpu" in tree.controllers:
        quota = max(_SMALLEST_QUOTA, round(limits.cpus * PERIOD))
        if old:
            found += [("cpu.cfs_period_us", str(PERIOD), True), ("cpu.cfs_quota_us", str(quota), True)]
        else:
            found.append(("cpu.max", f"{quota} {PERIOD}", True))
    return found


def make(trees: Sequence[Tree], group: str) -> None:
    """The directories of a new group, with this process in it. Raises OSError; what was made stays for `remove`."""
    for tree in trees:
        os.mkdir(f"{tree.directory}/{group}", 0o755)
    join(trees, group)


def limit(trees: Sequence[Tree], group: str, limits: Limits) -> None:
    """Raises OSError."""
    for tree in trees:
        for name, text, optional in settings(tree, limits):
            with contextlib.suppress(FileNotFoundError) if optional else contextlib.nullcontext():
                write(f"{tree.directory}/{group}/{name}", text)


def join(trees: Sequence[Tree], group: str) -> None:
    """Put this process, which has one thread, and all that it will fork, into a group. Raises OSError."""
    for tree in trees:
        write(f"{tree.directory}/{group}/cgroup.procs", "0")


def freezer(trees: Sequence[Tree]) -> Tree | None:
    """The one to freeze, and to kill, in."""
    return next((tree for tree in trees if tree.version == 2), None)


def freeze(directory: str, *, frozen: bool) -> None:
    """Return when every process of a group stands still, or goes on. Raises OSError, ETIMEDOUT included."""
    write(f"{directory}/cgroup.freeze", "1" if frozen else "0")
    wanted = f"frozen {int(frozen)}"
    deadline = time.monotonic() + _FREEZE_SECONDS
    with open(f"{directory}/cgroup.events", "rb", buffering=0) as events:
        changes = select.poll()
        changes.register(events, select.POLLPRI | select.POLLERR)
        while wanted not in os.pread(events.fileno(), 4096, 0).decode().splitlines():
            left = deadline - time.monotonic()
            if left <= 0:
                raise OSError(errno.ETIMEDOUT, f"its processes do not {'stop' if frozen else 'go on'}")
            changes.poll(left * 1000)


def end(directory: str) -> None:
    """Kill what is in a group of version 2, frozen or not. Missing is fine. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        try:
            write(f"{directory}/cgroup.kill", "1")
        except FileNotFoundError:  # a kernel before 5.14: what is killed in other ways hears of it when it goes on
            write(f"{directory}/cgroup.freeze", "0")


def remove(trees: Sequence[Tree], group: str) -> None:
    """End what is left in a sandbox's group, and remove it. Missing is fine. Raises OSError."""
    for tree in sorted(trees, key=lambda tree: -tree.version):  # version 2 kills, and so frees the others
        directory = f"{tree.directory}/{group}"
        if tree.version == 2:
            end(directory)
        remove_group(directory)


def remove_tree(directory: str, seconds: float = _REMOVE_SECONDS) -> int:
    """A whole tree with all groups in it; how many there were. Missing is fine. Raises OSError."""
    found = empty_tree(directory, seconds)
    remove_group(directory, seconds)
    return found


def empty_tree(directory: str, seconds: float = _REMOVE_SECONDS) -> int:
    """End what is in a tree, and remove all groups in it; how many there were. Missing is fine. Raises OSError."""
    found = 0
    with contextlib.suppress(FileNotFoundError):
        end(directory)
        for entry in list(os.scandir(directory)):
            if entry.is_dir(follow_symlinks=False):
                remove_group(entry.path, seconds)
                found += 1
    return found


def remove_group(directory: str, seconds: float = _REMOVE_SECONDS) -> None:
    """One without groups below it. Missing is fine. Raises OSError.

    A process that has just ended may be counted for a moment more, so EBUSY is final only after these `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.rmdir(directory)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE)


def usage(trees: Sequence[Tree], group: str) -> dict[str, int]:
    """What a sandbox's groups have counted, as far as there are any: `cpu_ns`, and bytes of `memory` and `cache`.

    Memory is without the cache of files, which the kernel takes back when it needs it.
    """
    seen: dict[str, int] = {}
    for tree in trees:
        directory = f"{tree.directory}/{group}"
        if "memory" in tree.controllers:
            name, cached = ("usage_in_bytes", "total_cache") if tree.version == 1 else ("current", "file")
            held, stat = int(_read(f"{directory}/memory.{name}")), _table(f"{directory}/memory.stat")
            # Files of a tmpfs are counted as cache, and are memory all the same.
            shared = stat.get("total_shmem" if tree.version == 1 else "shmem", 0)
            cache = max(0, stat.get(cached, 0) - shared)
            seen |= {"memory": max(0, held - cache), "cache": cache}
        if "cpuacct" in tree.controllers:
            seen["cpu_ns"] = int(_read(f"{directory}/cpuacct.usage"))
        elif tree.version == 2 and "cpu_ns" not in seen:
            seen["cpu_ns"] = _table(f"{directory}/cpu.stat")["usage_usec"] * 1000
    return seen


def write(path: str, text: str) -> None:
    """To a file that is there; one write, as the kernel's files take it."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read().decode()


def _table(path: str) -> dict[str, int]:
    return {key: int(value) for key, _, value in (line.partition(" ") for line in _read(path).splitlines())}
