"""What is asked of a sandbox's processes and directories: a fork of the spawner looks from within and acts at once.

Processes are found in the sandbox's own /proc, which lists its processes and no other. An open /proc/PID directory
names one process for good, so a signal sent through it never hits a recycled number. Standard library only.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from typing import Any

from managed_e2b.local.runtime import children, linux

_GONE = (errno.ENOENT, errno.ESRCH, errno.EACCES)
_CONNECT_SECONDS = 10.0
_MAX_PASSES = 50
_MAX_DEPTH = 512  # directories open at once
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Answer = tuple[Any, list[int]]


def kill_marked(namespace_fd: int) -> Answer:
    """SIGKILL every process that belongs to one command: those in the namespace it was started in.

    They are stopped first, until a pass finds nobody new: what is stopped cannot fork away from the kill.
    """
    wanted = os.fstat(namespace_fd)
    same = (wanted.st_dev, wanted.st_ino)

    def belongs(directory: int) -> bool:
        status = os.stat("ns/cgroup", dir_fd=directory)
        return (status.st_dev, status.st_ino) == same

    return {"killed": _stop_and_then(belongs, signal.SIGKILL)}, []


def kill_command(pidfd: int, command: int, report: socket.socket) -> None:
    """SIGKILL a command with all its descendants, by its pid outside. The fork itself, as `visit`."""
    children.keep_only([pidfd, report.fileno()])
    children.detach_signals()
    marker = os.open(f"/proc/{command}/ns/cgroup", os.O_RDONLY | os.O_CLOEXEC)
    children.enter(pidfd, linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
    value, fds = kill_marked(marker)
    children.tell(report, {"value": value}, fds)


def signal_all(number: int) -> Answer:
    """Send a signal to every process but the sandbox's first. SIGSTOP reaches those forked meanwhile too."""
    if number != signal.SIGSTOP:
        return {"signalled": sum(_send(directory, number) for directory in _processes(lambda _: True))}, []
    return {"signalled": _stop_and_then(lambda _: True, None)}, []


def _stop_and_then(belongs: Callable[[int], bool], number: int | None) -> int:
    found: dict[tuple[str, str], int] = {}  # pid and start time → the open directory
    try:
        for _ in range(_MAX_PASSES):
            news = 0
            for directory in _processes(belongs, keep=True):
                identity = _identity(directory)
                if identity is None or identity in found:
                    os.close(directory)
                    continue
                found[identity] = directory
                news += 1
                _send(directory, signal.SIGSTOP)
            if not news:
                break
        if number is not None:
            for directory in found.values():
                _send(directory, number)
        return len(found)
    finally:
        for directory in found.values():
            os.close(directory)


def _processes(belongs: Callable[[int], bool], *, keep: bool = False) -> Iterator[int]:
    """Open /proc/PID directories; closed again when the caller goes on, unless `keep`."""
    for name in os.listdir("/proc"):
        if not name.isdecimal() or name == "1":
            continue
        try:
            directory = os.open(f"/proc/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        wanted = False
        try:
            wanted = belongs(directory)
            if wanted:
                yield directory
        except OSError as error:
            if error.errno not in _GONE:
                raise
        finally:
            if not (wanted and keep):
                os.close(directory)


def _identity(directory: int) -> tuple[str, str] | None:
    fields = _stat_fields(directory)
    return (fields[0], fields[21]) if fields else None


def _stat_fields(directory: int) -> list[str] | None:
    """/proc/PID/stat with the command's name as one field; None when the process is gone."""
    text = _read_at(directory, "stat")
    if text is None:
        return None
    head, _, tail = text.rpartition(") ")
    pid, _, name = head.partition(" (")
    return [pid, name, *tail.split()]


def _read_at(directory: int, name: str) -> str | None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
        try:
            return os.read(fd, 65536).decode("utf-8", "replace")
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def _send(directory: int, number: int) -> bool:
    try:
        signal.pidfd_send_signal(directory, number)
    except ProcessLookupError:
        return False
    return True


def dial(port: int) -> Answer:
    """A connected TCP socket to a port on the loopback of the network namespace that we are in."""
    refused: OSError | None = None
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as error:  # a host without IPv6
            refused = refused or error
            continue
        connection.settimeout(_CONNECT_SECONDS)
        try:
            connection.connect((address, port))
        except OSError as error:
            refused = refused or error
            connection.close()
            continue
        connection.setblocking(False)
        return None, [connection.detach()]
    raise refused or OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def usage(pidfd: int, directories: list[str], counted: dict[str, int]) -> Answer:
    """What a sandbox uses: `cpu_ns`, and bytes of `memory`, `cache` and `disk`.

    Called with the sandbox's user namespace joined, while its private directories on the host can still be seen.
    `counted`: what control groups tell; without, its processes are added up, and pages that they share count for each.
    """
    disk = sum(_tree_size(directory) for directory in directories)
    linux.setns(pidfd, linux.CLONE_NEWNS)
    room = os.statvfs("/")
    if not directories:  # changes live in a filesystem of their own, in memory
        disk = (room.f_blocks - room.f_bfree) * room.f_frsize
    ticks = memory = count = 0
    page = os.sysconf("SC_PAGE_SIZE")
    for directory in _processes(lambda _: True):
        fields = _stat_fields(directory)
        if fields:
            ticks += sum(int(fields[index]) for index in (13, 14, 15, 16))
            memory += int(fields[23]) * page
            count += 1
    return {
        "cpu_ns": ticks * (10**9 // os.sysconf("SC_CLK_TCK")),
        "memory": memory,
        "cache": 0,
        **counted,
        "processes": count,
        "disk": disk,
        "disk_free": room.f_bavail * room.f_frsize,
    }, []


def _tree_size(top: str) -> int:
    """Bytes of disk used by regular files and directories below `top`, hard links once.

    What lies there changes while we look: each directory is opened from its parent's descriptor, never through a link,
    so a directory that becomes a link leads nowhere. What is removed meanwhile, or too deep, is not counted.
    """
    seen: set[int] = set()
    try:
        opened = [os.open(top, _DIRECTORY)]
    except OSError:
        return 0
    total = 0
    try:
        pending = [_measure(opened[0], seen)]
        while pending:
            size, names = pending[-1]
            total += size
            pending[-1] = (0, names)
            if not names:
                pending.pop()
                os.close(opened.pop())
            elif len(opened) < _MAX_DEPTH:
                try:
                    opened.append(os.open(names.pop(), _DIRECTORY, dir_fd=opened[-1]))
                except OSError:
                    continue
                pending.append(_measure(opened[-1], seen))
            else:
                names.clear()
    finally:
        for fd in opened:
            os.close(fd)
    return total


def _measure(directory: int, seen: set[int]) -> tuple[int, list[str]]:
    """Bytes of what an open directory holds, but for inodes that were `seen`, and the names of its directories."""
    size, names = 0, []
    for name in os.listdir(directory):
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode):
            names.append(name)
        if status.st_ino not in seen:
            seen.add(status.st_ino)
            size += status.st_blocks * 512
    return size, names


def visit(pidfd: int, namespaces: int, look: Callable[[], Answer], report: socket.socket, keep: int = -1) -> None:
    """The fork itself: enter, look, tell. `keep`: one more descriptor that `look` needs."""
    children.keep_only([fd for fd in (pidfd, report.fileno(), keep) if fd >= 0])
    children.detach_signals()
    children.enter(pidfd, namespaces)
    value, fds = look()
    children.tell(report, {"value": value}, fds)
