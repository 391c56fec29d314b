"""A server process of its own, seen from outside: what it holds, and what it leaves."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from managed_e2b.local.background import LocalServerProcess

DEADLINE = 60.0


@dataclass(frozen=True)
class Held:
    """What a server and its spawner have: descriptors of each, and live children of the spawner.

    Connections of clients are not counted: the SDK keeps them.
    """

    server: int
    spawner: int
    children: int


class Seen:
    """A server process under test."""

    def __init__(self, process: LocalServerProcess) -> None:
        assert process.pid is not None
        self.process = process
        self.pid = process.pid
        self.options = {"api_key": process.api_key, "api_url": process.url, "sandbox_url": process.url}

    @property
    def spawner(self) -> int:
        (pid,) = (pid for pid in children(self.pid) if command(pid).startswith("me2b-spawner"))
        return pid

    def held(self) -> Held:
        live = [pid for pid in children(self.spawner) if state(pid) != "Z"]
        return Held(descriptors(self.pid), descriptors(self.spawner), len(live))

    def resident(self) -> int:
        """Bytes of memory that the server itself has, files aside."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    async def settled(self, wanted: Held) -> None:
        """Wait until it holds no more than that."""

        def no_more() -> bool:
            held = self.held()
            return held.server <= wanted.server and held.spawner <= wanted.spawner and held.children <= wanted.children

        await eventually(no_more, lambda: f"{self.held()}, and it was {wanted}")


async def eventually(condition: Callable[[], bool], told: Callable[[], str] = lambda: "it did not come true") -> None:
    """Wait until a condition of the world outside holds; fail when it does not."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, told()
        await asyncio.sleep(0.05)


def descriptors(pid: int) -> int:
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    connections = {f"socket:[{line.split()[9]}]" for line in lines}
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            count += os.readlink(f"/proc/{pid}/fd/{name}") not in connections
        except FileNotFoundError:
            continue
    return count


def children(pid: int) -> list[int]:
    try:
        return [
            int(child)
            for task in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except FileNotFoundError:
        return ""


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except FileNotFoundError:
        return "Z"


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """`size(usual, whole)`: the second with --exhaustive."""
    whole = request.config.getoption("--exhaustive")
    return lambda usual, exhaustive: exhaustive if whole else usual


@pytest.fixture
def seen(server: LocalServerProcess) -> Seen:
    """The server of the session."""
    return Seen(server)
