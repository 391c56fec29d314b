"""How fast the local server is: what one sandbox takes, what many take at once, and what one that idles costs.

    make bench        (this part alone: python bench/local.py --count 50 --alive 100 --json)

Everything goes through the E2B SDK, as a user's program would, so its time and that of this process count too: on two
cores, a client that asks for a hundred things at once takes its share of them. The first rows are what the same machine
does in the same run without a sandbox: a request that the server answers at once, bubblewrap alone, a shell alone.
Nothing is asserted; the targets are printed beside what was reached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from e2b import ApiParams, AsyncSandbox, Sandbox
from main_job import Figures
from rich.console import Console
from rich.table import Table

from managed_e2b.local.background import LocalServerProcess
from managed_e2b.local.runtime import bwrap

COMMAND = "echo ready"
WARM_UP = 3
TIMEOUT = 600
"""Seconds that a sandbox of the bench may live; each is killed when its measurement ends."""
UPPER_MEGABYTES = 100
FORKS = 20
BURST_ALIVE = 50
"""How many sandboxes are asked for at a time while many are brought up."""
MEGABYTE = 1024 * 1024
AIMS = {
    "create to a command's result": "p50 ≤ 25, p99 ≤ 60",
    "pause": "≤ 20",
    "resume": "≤ 20",
    f"fork of {FORKS}": "≤ 300",
    f"snapshot of {UPPER_MEGABYTES} MB": "≤ 1000",
    "create to result, each of 50 at once": "p99 ≤ 300",
    "all of 100 at once": "≤ 1500",
}


@dataclass(frozen=True)
class Row:
    """One measurement and what it is hoped to be."""

    name: str
    figures: Figures
    target: str = ""


@dataclass(frozen=True)
class Footprint:
    """What a process and all its descendants hold, in bytes. `shared` counts a page that several have by its share."""

    processes: int
    resident: int
    shared: int | None


class Bench:
    """The measurements, each on a server that runs already. Times in seconds."""

    def __init__(self, server: LocalServerProcess, count: int, alive: int) -> None:
        self._server = server
        self._access = ApiParams(api_key=server.api_key, api_url=server.url, sandbox_url=server.url)
        self._count = count
        self._alive = alive

    def rows(self, tell: Callable[[str], None]) -> Iterator[Row]:
        """All of them, in order; those of many at once come last. `tell` is told what begins."""
        count, few, at_once = self._count, min(self._count, 10), self._at_once
        plan: Sequence[tuple[Sequence[str], Callable[[], Sequence[Sequence[float]]]]] = (
            (["a request that is answered at once"], lambda: [self._requests(count)]),
            (["a shell that says ready, no sandbox"], lambda: [repeat(count, bare_shell)]),
            (["bubblewrap alone, all namespaces"], lambda: [repeat(count, bare_bubblewrap)]),
            (["create to a command's result"], lambda: [repeat(count, self._first_result)]),
            (["a command in a sandbox that runs"], lambda: [self._commands(count)]),
            (["kill"], lambda: [repeat(count, self._kill)]),
            (["pause", "resume"], lambda: self._pauses(count)),
            ([f"fork of {FORKS}"], lambda: [repeat(few, self._fork)]),
            ([f"snapshot of {UPPER_MEGABYTES} MB"], lambda: [self._snapshots(few)]),
            (["create to result, each of 50 at once"], lambda: [asyncio.run(at_once(min(50, self._alive)))]),
            (["all of 100 at once"], lambda: [[max(asyncio.run(at_once(min(100, self._alive)))) for _ in range(few)]]),
            (
                [f"{self._alive} created, {BURST_ALIVE} at a time", f"a command in each of {self._alive} alive"],
                lambda: asyncio.run(self._many_alive()),
            ),
        )
        for names, measure in plan:
            tell(", ".join(names))
            for name, seconds in zip(names, measure(), strict=True):
                yield Row(name, Figures.of(seconds), AIMS.get(name, ""))

    def idle(self) -> tuple[float, float, float | None]:
        """Of a sandbox that does nothing: its processes, and the MB resident for it, in full and by its share."""
        with self._sandbox() as warm:
            warm.commands.run(COMMAND)
        number = min(50, self._alive)
        assert self._server.pid is not None
        before = footprint(self._server.pid)
        with contextlib.ExitStack() as stack:
            for _ in range(number):
                stack.enter_context(self._sandbox()).commands.run(COMMAND)
            after = footprint(self._server.pid)
        shared = None if before.shared is None or after.shared is None else (after.shared - before.shared)
        return (
            (after.processes - before.processes) / number,
            (after.resident - before.resident) / number / MEGABYTE,
            None if shared is None else shared / number / MEGABYTE,
        )

    @contextlib.contextmanager
    def _sandbox(self) -> Iterator[Sandbox]:
        sandbox = Sandbox.create(timeout=TIMEOUT, **self._access)
        try:
            yield sandbox
        finally:
            sandbox.kill()

    def _requests(self, count: int) -> list[float]:
        """On one connection, as the SDK keeps one."""
        place = urlsplit(self._server.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        with contextlib.closing(connection):

            def ask() -> float:
                started = time.perf_counter()
                connection.request("GET", "/health")
                connection.getresponse().read()
                return time.perf_counter() - started

            return repeat(count, ask)

    def _first_result(self) -> float:
        started = time.perf_counter()
        with self._sandbox() as sandbox:
            expect_ready(sandbox.commands.run(COMMAND).stdout)
            return time.perf_counter() - started

    def _commands(self, count: int) -> list[float]:
        with self._sandbox() as sandbox:
            return repeat(count, lambda: timed(lambda: expect_ready(sandbox.commands.run(COMMAND).stdout)))

    def _kill(self) -> float:
        sandbox = Sandbox.create(timeout=TIMEOUT, **self._access)
        return timed(sandbox.kill)

    def _pauses(self, count: int) -> list[list[float]]:
        """The times of pauses, and of the resumes after them."""
        with self._sandbox() as sandbox:
            sandbox.commands.run("sleep 600", background=True)  # something that has to be frozen

            def both() -> tuple[float, float]:
                return timed(sandbox.pause), timed(sandbox.connect)

            taken = [both() for _ in range(WARM_UP + count)][WARM_UP:]
        return [[pause for pause, _ in taken], [resume for _, resume in taken]]

    def _fork(self) -> float:
        with self._sandbox() as sandbox:
            sandbox.commands.run("echo kept > kept")
            started = time.perf_counter()
            forks = sandbox.fork(count=FORKS, timeout=TIMEOUT)
            taken = time.perf_counter() - started
            for fork in forks:
                if isinstance(fork, Exception):
                    raise fork
                fork.kill()
        return taken

    def _snapshots(self, count: int) -> list[float]:
        with self._sandbox() as sandbox:
            sandbox.commands.run(f"head -c {UPPER_MEGABYTES}000000 /dev/urandom > upper")

            def take() -> float:
                started = time.perf_counter()
                snapshot = sandbox.create_snapshot()
                taken = time.perf_counter() - started
                Sandbox.delete_snapshot(snapshot.snapshot_id, **self._access)
                return taken

            return repeat(count, take)

    async def _at_once(self, number: int) -> list[float]:
        """From the same moment on, how long each of so many took to its first result."""
        sandboxes: list[AsyncSandbox] = []

        async def one() -> float:
            started = time.perf_counter()
            sandbox = await AsyncSandbox.create(timeout=TIMEOUT, **self._access)
            sandboxes.append(sandbox)
            expect_ready((await sandbox.commands.run(COMMAND)).stdout)
            return time.perf_counter() - started

        try:
            await asyncio.gather(*(one() for _ in range(number)))  # opens the connections, as a program has them
            return await asyncio.gather(*(one() for _ in range(number)))
        finally:
            await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))

    async def _many_alive(self) -> list[list[float]]:
        """How long it takes to have so many alive, and then to run a command in each."""
        gate = asyncio.Semaphore(BURST_ALIVE)
        sandboxes: list[AsyncSandbox] = []

        async def create() -> None:
            async with gate:
                sandboxes.append(await AsyncSandbox.create(timeout=TIMEOUT, **self._access))

        async def command(sandbox: AsyncSandbox) -> None:
            async with gate:
                expect_ready((await sandbox.commands.run(COMMAND)).stdout)

        try:
            created = await timed_async(asyncio.gather(*(create() for _ in range(self._alive))))
            answered = await timed_async(asyncio.gather(*(command(sandbox) for sandbox in sandboxes)))
            return [[created], [answered]]
        finally:
            await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))


def bare_shell() -> float:
    return timed(lambda: subprocess.run(["sh", "-c", COMMAND], stdout=subprocess.DEVNULL, check=True))


def bare_bubblewrap() -> float:
    command = [str(bwrap.find()), "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "true"]
    return timed(lambda: subprocess.run(command, check=True))


def repeat(count: int, measure: Callable[[], float]) -> list[float]:
    """Warm up, then so many times."""
    return [measure() for _ in range(WARM_UP + count)][WARM_UP:]


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


async def timed_async(act: Awaitable[object]) -> float:
    started = time.perf_counter()
    await act
    return time.perf_counter() - started


def expect_ready(output: str) -> None:
    if output != "ready\n":
        raise SystemExit(f"bench: the sandbox answered {output!r}")


def footprint(root: int) -> Footprint:
    """Of the process and its descendants. The shares can only be read by who may trace them all: root, as a rule."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    family = [root]
    for pid in family:
        family.extend(children.get(pid, []))
    held = [one for one in map(_held, family) if one is not None]
    shares = [share for _, share in held if share is not None]
    return Footprint(
        processes=len(held),
        resident=sum(resident for resident, _ in held),
        shared=sum(shares) if len(shares) == len(held) else None,
    )


def _held(pid: int) -> tuple[int, int | None] | None:
    """The bytes that are resident and the process's share of them, where that may be read. None: it has ended."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except PermissionError:
        return resident, None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return resident, sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def show(rows: Sequence[Row], idle: tuple[float, float, float | None], console: Console) -> None:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(
        title=f"Milliseconds, {os.cpu_count()} cores, Python {platform.python_version()}, load at the end {load}",
        title_justify="left",
    )
    table.add_column("measured", no_wrap=True)
    for column in ("count", "p50", "p99", "most"):
        table.add_column(column, justify="right")
    table.add_column("aim")
    for row in rows:
        one = row.figures
        values = (f"{value:.1f}" for value in (one.p50, one.p99, one.most))
        table.add_row(row.name, str(one.count), *values, row.target)
    console.print(table)
    processes, resident, shared = idle
    share = "" if shared is None else f", {shared:.1f} MB when shared pages count by their share"
    console.print(f"A sandbox that idles: {processes:.1f} processes (aim ≤ 3), {resident:.1f} MB resident{share}"
                  " (aim ≤ 5), the server's growth included", soft_wrap=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="The speed of the local server, through the E2B SDK.")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="times each is measured (default: 100)")
    parser.add_argument("--alive", type=int, default=300, metavar="N", help="sandboxes alive at once (default: 300)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    progress = Console(stderr=True)
    with LocalServerProcess() as server:
        bench = Bench(server, options.count, options.alive)
        idle = bench.idle()
        rows = list(bench.rows(lambda name: progress.print(f"measuring: {name}", style="dim")))
    if options.json:
        measured = {row.name: asdict(row.figures) | {"aim": row.target} for row in rows}
        names = ("processes", "resident MB", "share MB")
        print(json.dumps({"unit": "ms", "measured": measured, "idle": dict(zip(names, idle, strict=True))}, indent=2))
    else:
        console = Console()
        console.width = max(console.width, 100)
        show(rows, idle, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
