"""Watching directories for the file agent, through inotify. Runs inside the sandbox: stdlib only, all imports here.

One inotify instance serves all watches of a sandbox, because the kernel allows a user few (128 by default). The agent
reads it when the server drains it and after each change of its own, so that a directory which the agent has just made
in a recursively watched one is watched before anything is written into it. What it has read but not yet handed over is
told by an eventfd; the server polls both descriptors.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from managed_e2b.local.runtime.agent_entries import Accounts, Describer, resolve, to_text, weight

IN_MODIFY, IN_ATTRIB, IN_MOVED_FROM, IN_MOVED_TO = 0x2, 0x4, 0x40, 0x80
IN_CREATE, IN_DELETE, IN_DELETE_SELF, IN_MOVE_SELF = 0x100, 0x200, 0x400, 0x800
IN_UNMOUNT, IN_Q_OVERFLOW, IN_IGNORED = 0x2000, 0x4000, 0x8000
IN_ONLYDIR, IN_DONT_FOLLOW, IN_ISDIR = 0x1000000, 0x2000000, 0x40000000
MASK = IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF

KINDS = (
    (IN_CREATE | IN_MOVED_TO, "create"),
    (IN_MOVED_FROM | IN_MOVE_SELF, "rename"),
    (IN_ATTRIB, "chmod"),
    (IN_MODIFY, "write"),
    (IN_DELETE | IN_DELETE_SELF, "remove"),
)
WITH_ENTRY = ("create", "write", "chmod")  # of the others the entry is gone, or is another one

NETWORK_FILESYSTEMS = {0x6969, 0xFF534D42, 0x517B, 0xFE534D42, 0x65735546}  # nfs, cifs, smb, smb2, fuse

READ_SIZE = 1 << 16
BATCH = 1000  # events in one answer
ANSWER = 1 << 20  # bytes of JSON after which an answer takes no further event
# What may wait to be drained; beyond that the watches fail rather than lose something in silence.
BUFFER = 50_000  # events
BUFFER_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_HEADER = struct.Struct("iIII")


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def filesystem_type(path: bytes) -> int:
    """The `f_type` of statfs(2), which os.statvfs does not tell."""
    buffer = ctypes.create_string_buffer(256)
    _checked(_libc.statfs(path, buffer))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


@dataclass
class Watch:
    number: int
    root: bytes
    recursive: bool
    entries: bool
    directories: dict[int, bytes] = field(default_factory=dict)  # watch descriptor → path below the root
    announced: set[tuple[int, bytes]] = field(default_factory=set)  # told as created before their own event came


class Watches:
    """All watches of one sandbox."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._inotify = -1
        self._pending = -1
        self._numbers = count(1)
        self._watches: dict[int, Watch] = {}
        self._owners: dict[int, set[int]] = {}  # watch descriptor → numbers of the watches it serves
        self._moved: dict[tuple[int, int], bytes] = {}  # (watch, cookie) → directory that left, maybe to come back
        self._events: deque[tuple[int, list[Any]]] = deque()  # with what each weighs
        self._weight = 0
        self._ended: list[list[Any]] = []

    def open(self) -> tuple[int, int]:
        """Duplicates of the two descriptors to poll: when either is readable, `drain` has something to tell."""
        if self._inotify < 0:
            self._inotify = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            self._pending = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return os.dup(self._inotify), os.dup(self._pending)

    def add(self, path: bytes, *, recursive: bool, entries: bool, network: bool) -> int:
        """Watch a directory. OSError: as looking at it failed; EXDEV: it is on a network filesystem."""
        root = resolve(path)
        if not os.path.isdir(root):
            os.stat(root)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not network and filesystem_type(root) in NETWORK_FILESYSTEMS:
            raise OSError(errno.EXDEV, "on a network filesystem")
        self.pump()  # what happened before is not for the new watch
        watch = Watch(next(self._numbers), root, recursive, entries)
        self._watches[watch.number] = watch
        try:
            self._add_tree(watch, b"", announce=False)
        except OSError:
            self.remove(watch.number)
            raise
        return watch.number

    def remove(self, number: int) -> None:
        watch = self._watches.pop(number, None)
        if watch is not None:
            for descriptor in list(watch.directories):
                self._release(watch, descriptor)

    def close(self) -> None:
        """End all watches and give the inotify instance back to the kernel."""
        for descriptor in (self._inotify, self._pending):
            if descriptor >= 0:
                os.close(descriptor)
        self._inotify = self._pending = -1
        for state in (self._watches, self._owners, self._moved, self._events, self._ended):
            state.clear()
        self._weight = 0

    def drain(self) -> dict[str, Any]:
        """What happened since the last time: `events` as [watch, name, kind, entry or None], `ended` as [watch, why].

        With `more` there is more to get at once.
        """
        self.pump()
        events: list[list[Any]] = []
        room = ANSWER
        while self._events and len(events) < BATCH and room > 0:
            size, event = self._events.popleft()
            events.append(event)
            room -= size
            self._weight -= size
        ended: list[list[Any]] = []
        if not self._events:
            ended, self._ended = self._ended, []
            if self._pending >= 0:
                with suppress(BlockingIOError):  # there was nothing to tell
                    os.eventfd_read(self._pending)
        return {"events": events, "ended": ended, "more": bool(self._events)}

    def pump(self) -> None:
        """Take in what the kernel has to tell, and watch the directories that are new."""
        if self._inotify < 0:
            return
        for descriptor, mask, cookie, name in self._read():
            if mask & IN_Q_OVERFLOW:
                self._end_all("events were lost: more came than the kernel holds")
            elif mask & (IN_IGNORED | IN_UNMOUNT):
                self._forget(descriptor)
            else:
                for number in list(self._owners.get(descriptor, ())):
                    self._handle(self._watches[number], descriptor, mask, cookie, name)
            if len(self._events) > BUFFER or self._weight > BUFFER_BYTES:
                self._end_all("events were lost: nobody took them")
        for (number, _), directory in self._moved.items():
            if number in self._watches:
                self._drop_tree(self._watches[number], directory)
        self._moved.clear()
        for watch in self._watches.values():
            watch.announced.clear()  # the kernel had nothing more to tell: what it tells from now on is new
        if self._events or self._ended:
            os.eventfd_write(self._pending, 1)

    def _read(self) -> Iterator[tuple[int, int, int, bytes]]:
        while True:
            try:
                data = os.read(self._inotify, READ_SIZE)
            except BlockingIOError:
                return
            offset = 0
            while offset < len(data):
                descriptor, mask, cookie, length = _HEADER.unpack_from(data, offset)
                offset += _HEADER.size
                yield descriptor, mask, cookie, data[offset : offset + length].rstrip(b"\0")
                offset += length

    def _handle(self, watch: Watch, descriptor: int, mask: int, cookie: int, name: bytes) -> None:
        below = watch.directories[descriptor]
        if not name:  # of the directory itself; what is below the root is told by its parent already
            if not below:
                self._tell(watch, mask, b".")
                if mask & IN_MOVE_SELF:
                    self._drop_tree(watch, b"")
            return
        path = os.path.join(below, name)
        known = (descriptor, name) in watch.announced
        watch.announced.discard((descriptor, name))
        if not (known and mask & IN_CREATE):
            self._tell(watch, mask, path)
        if watch.recursive and mask & IN_ISDIR:
            if mask & IN_MOVED_FROM:
                self._moved[watch.number, cookie] = path
            elif mask & IN_MOVED_TO and (before := self._moved.pop((watch.number, cookie), None)) is not None:
                self._rename_tree(watch, before, path)
            elif mask & (IN_CREATE | IN_MOVED_TO) and not known:
                self._grow(watch, path, announce=bool(mask & IN_CREATE))

    def _tell(self, watch: Watch, mask: int, path: bytes) -> None:
        for bits, kind in KINDS:
            if mask & bits:
                entry = self._entry(watch, path) if watch.entries and kind in WITH_ENTRY else None
                size = 100 + 6 * len(path) + (0 if entry is None else weight(entry))
                self._events.append((size, [watch.number, to_text(path), kind, entry]))
                self._weight += size

    def _entry(self, watch: Watch, path: bytes) -> dict[str, Any] | None:
        try:
            return Describer(self._accounts).entry(os.path.normpath(os.path.join(watch.root, path)))
        except OSError:
            return None  # upstream's "best effort": it is gone again

    def _grow(self, watch: Watch, below: bytes, *, announce: bool) -> None:
        try:
            self._add_tree(watch, below, announce=announce)
        except OSError as error:
            self._end(watch, f"a new directory cannot be watched: {error.strerror}")

    def _add_tree(self, watch: Watch, below: bytes, *, announce: bool) -> None:
        """Watch a directory, and with a recursive watch all directories in it.

        With `announce`, what is found in there is told as created: it came before the kernel was asked to tell.
        """
        waiting = [below]
        while waiting:
            directory = waiting.pop()
            path = os.path.join(watch.root, directory) if directory else watch.root
            try:
                descriptor = self._watch_directory(path)
            except (FileNotFoundError, NotADirectoryError):
                if not directory:
                    raise
                continue
            watch.directories[descriptor] = directory
            self._owners.setdefault(descriptor, set()).add(watch.number)
            if not watch.recursive:
                return
            try:
                with os.scandir(path) as scan:
                    found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan)
            except OSError:
                continue  # gone again, or not for reading: nothing in it to watch
            for name, is_directory in found:
                if announce:
                    self._tell(watch, IN_CREATE, os.path.join(directory, name))
                    watch.announced.add((descriptor, name))
                if is_directory:
                    waiting.append(os.path.join(directory, name))

    def _watch_directory(self, path: bytes) -> int:
        return _checked(_libc.inotify_add_watch(self._inotify, path, MASK | IN_ONLYDIR | IN_DONT_FOLLOW))

    def _rename_tree(self, watch: Watch, before: bytes, after: bytes) -> None:
        for descriptor, below in watch.directories.items():
            if _is_within(below, before):
                watch.directories[descriptor] = after + below[len(before) :]

    def _drop_tree(self, watch: Watch, directory: bytes) -> None:
        for descriptor, below in list(watch.directories.items()):
            if _is_within(below, directory):
                self._release(watch, descriptor)

    def _release(self, watch: Watch, descriptor: int) -> None:
        watch.directories.pop(descriptor, None)
        owners = self._owners.get(descriptor, set())
        owners.discard(watch.number)
        if not owners and self._owners.pop(descriptor, None) is not None:
            _libc.inotify_rm_watch(self._inotify, descriptor)  # EINVAL: the kernel has forgotten it before us

    def _forget(self, descriptor: int) -> None:
        for number in self._owners.pop(descriptor, set()):
            self._watches[number].directories.pop(descriptor, None)

    def _end(self, watch: Watch, reason: str) -> None:
        self.remove(watch.number)
        self._ended.append([watch.number, reason])

    def _end_all(self, reason: str) -> None:
        self._events.clear()
        self._weight = 0
        for watch in list(self._watches.values()):
            self._end(watch, reason)


def _is_within(path: bytes, directory: bytes) -> bool:
    return not directory or path == directory or path.startswith(directory + b"/")
