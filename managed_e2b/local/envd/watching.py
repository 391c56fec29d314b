"""The watched directories of one sandbox: from the agent's inotify to those who want to know."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from e2b.envd.filesystem import filesystem_pb as pb

from managed_e2b.local.envd.agent import in_background
from managed_e2b.local.envd.entries import entry_info, printable
from managed_e2b.local.runtime.base import Guest, GuestError, GuestGone

_TYPES = {
    "create": pb.EventType.CREATE,
    "write": pb.EventType.WRITE,
    "remove": pb.EventType.REMOVE,
    "rename": pb.EventType.RENAME,
    "chmod": pb.EventType.CHMOD,
}


@dataclass(frozen=True)
class Sink:
    """Where the events of one watch go. After `end`, which tells why, none comes any more."""

    put: Callable[[pb.FilesystemEvent], None]
    end: Callable[[str], None]


class WatchHub:
    """One per sandbox; it holds two descriptors while anything is watched.

    The agent has both ends of the matter: it is told to hand over when its descriptors become readable, and whenever
    somebody wants to be sure to know everything (`drain`).
    """

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._lock = asyncio.Lock()
        self._sinks: dict[int, Sink] = {}
        self._fds: list[int] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._sinks)

    async def add(self, path: str, sink: Sink, *, recursive: bool, entries: bool, network: bool) -> int:
        """Watch a directory from now on. Raises GuestError, EXDEV for a network filesystem, and GuestGone."""
        async with self._lock:
            try:
                if not self._fds:
                    self._poll((await self._guest.call("watch_open")).fds)
                reply = await self._guest.call(
                    "watch_add", path=path, recursive=recursive, entries=entries, network=network
                )
                number = int(reply.value)
                self._sinks[number] = sink
                return number
            finally:
                await self._rest_when_idle()

    def remove(self, number: int) -> None:
        """Tell that sink nothing more, from now on. Removing twice is fine."""
        if self._sinks.pop(number, None) is not None and not self._closed:
            in_background(self._unwatch(number))

    async def drain(self) -> None:
        """When this returns, all that happened before the call has been told. Raises GuestGone."""
        async with self._lock:
            await self._drain()

    def close(self) -> None:
        """Let go of the descriptors: the sandbox is dead."""
        self._closed = True
        self._sinks.clear()
        self._drop_fds()

    def _poll(self, fds: list[int]) -> None:
        self._fds = fds
        if self._closed:
            self._drop_fds()
            raise GuestGone("the sandbox is dead")
        self._listen(True)

    def _listen(self, on: bool) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._fds:
            if on:
                loop.add_reader(fd, self._readable)
            else:
                loop.remove_reader(fd)

    def _readable(self) -> None:
        self._listen(False)  # it stays readable until the agent has read
        in_background(self._hand_over())

    async def _hand_over(self) -> None:
        async with self._lock:
            try:
                await self._drain()
            except GuestGone:
                return  # `close` comes, or came
            except GuestError as error:
                self._fail(error.message)
                return
            self._listen(True)

    def _fail(self, reason: str) -> None:
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.end(reason)

    async def _drain(self) -> None:
        more = bool(self._fds)
        while more:
            answer: dict[str, Any] = (await self._guest.call("watch_drain")).value
            for number, name, kind, entry in answer["events"]:
                if number in self._sinks:
                    self._sinks[number].put(
                        pb.FilesystemEvent(
                            name=printable(name), type=_TYPES[kind], entry=None if entry is None else entry_info(entry)
                        )
                    )
            for number, reason in answer["ended"]:
                if number in self._sinks:
                    self._sinks.pop(number).end(reason)
            more = answer["more"]

    async def _unwatch(self, number: int) -> None:
        async with self._lock:
            try:
                await self._guest.call("watch_remove", watch=number)
                await self._rest_when_idle()
            except GuestGone:
                return

    async def _rest_when_idle(self) -> None:
        """Give the inotify instance back: a user has few of them."""
        if self._fds and not self._sinks:
            self._drop_fds()
            await self._guest.call("watch_close")

    def _drop_fds(self) -> None:
        self._listen(False)
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
