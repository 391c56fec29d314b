"""How long the main job takes on the local server, and what the manager adds to the bare SDK.

    make bench        (or: python bench/main_job.py --count 100 --json)

Both pairs go through the same server in the same run and are interleaved, so that a busy machine is unkind to both:

- to the first result: `Sandbox.create` + `commands.run`, beside `acquire` + `run`
- there and back: `Sandbox.create` + `kill`, beside entering and leaving `acquire`, which also proves the kill by asking
  for the sandbox once more; the bare SDK with that question is measured too, to tell it from the manager's own cost
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from e2b import Sandbox, SandboxNotFoundException
from rich.console import Console
from rich.progress import track
from rich.table import Table

from managed_e2b import Me2bError, SandboxLifecycle
from managed_e2b.local.background import LocalServerProcess

WARM_UP = 5
COMMAND = "echo ready"

Measure = Callable[[], float]
"""Does a thing once and returns the seconds that its measured part took."""


@dataclass(frozen=True)
class Figures:
    """Of one measurement, in milliseconds. Percentiles by nearest rank."""

    count: int
    p50: float
    p90: float
    p99: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Figures:
        ordered = sorted(one * 1000 for one in seconds)

        def rank(share: float) -> float:
            return round(ordered[math.ceil(share * len(ordered)) - 1], 3)

        return cls(len(ordered), rank(0.5), rank(0.9), rank(0.99), round(ordered[0], 3), round(ordered[-1], 3))


def measures(server: LocalServerProcess, lifecycle: SandboxLifecycle) -> dict[str, Measure]:
    """What is measured, by name, in the order in which one round takes them."""

    def create() -> Sandbox:
        return Sandbox.create(api_key=server.api_key, api_url=server.url, sandbox_url=server.url, timeout=60)

    def bare_first_result() -> float:
        started = time.perf_counter()
        sandbox = create()
        try:
            _expect_ready(sandbox.commands.run(COMMAND).stdout)
            return time.perf_counter() - started
        finally:
            sandbox.kill()

    def managed_first_result() -> float:
        started = time.perf_counter()
        with lifecycle.acquire(timeout=60) as sandbox:
            _expect_ready(sandbox.run(COMMAND).stdout)
            return time.perf_counter() - started

    def bare_round_trip() -> float:
        started = time.perf_counter()
        create().kill()
        return time.perf_counter() - started

    def bare_round_trip_with_proof() -> float:
        started = time.perf_counter()
        sandbox = create()
        sandbox.kill()
        with contextlib.suppress(SandboxNotFoundException):
            sandbox.get_info()
        return time.perf_counter() - started

    def managed_round_trip() -> float:
        started = time.perf_counter()
        with lifecycle.acquire(timeout=60):
            pass
        return time.perf_counter() - started

    return {
        "first result, bare SDK": bare_first_result,
        "first result, me2b": managed_first_result,
        "there and back, bare SDK": bare_round_trip,
        "with a proof, bare SDK": bare_round_trip_with_proof,
        "there and back, me2b": managed_round_trip,
    }


def _expect_ready(output: str) -> None:
    if output != "ready\n":
        raise SystemExit(f"bench: the sandbox answered {output!r}")


def interleave(rounds: int, wanted: Mapping[str, Measure], console: Console) -> dict[str, list[float]]:
    """Every measure once a round; the first rounds only warm up."""
    taken: dict[str, list[float]] = {name: [] for name in wanted}
    for number in track(range(-WARM_UP, rounds), description="measuring", console=console, transient=True):
        for name, measure in wanted.items():
            seconds = measure()
            if number >= 0:
                taken[name].append(seconds)
    return taken


def added(taken: Mapping[str, Sequence[float]], beside: str) -> float:
    """Milliseconds that the manager's way there and back adds: the median of the differences within a round."""
    pairs = zip(taken["there and back, me2b"], taken[beside], strict=True)
    return round(statistics.median(managed - bare for managed, bare in pairs) * 1000, 3)


def show(figures: Mapping[str, Figures], costs: Mapping[str, float], console: Console) -> None:
    table = Table(
        title=f"Milliseconds, {os.cpu_count()} cores, Python {platform.python_version()}", title_justify="left"
    )
    table.add_column("measured")
    for column in ("count", "p50", "p90", "p99", "least", "most"):
        table.add_column(column, justify="right")
    for name, one in figures.items():
        table.add_row(
            name, str(one.count), *(f"{value:.1f}" for value in (one.p50, one.p90, one.p99, one.least, one.most))
        )
    console.print(table)
    for beside, cost in costs.items():
        console.print(
            f"me2b adds {cost:.1f} ms to '{beside}' (median of the differences within a round)", soft_wrap=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="The main job on the local server, beside the bare SDK.")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="rounds (default: 100)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="me2b-bench-") as folder, LocalServerProcess() as server:
        lifecycle = SandboxLifecycle(str(Path(folder) / "sandboxes.db"), e2b_api_url=server.url, e2b_key=server.api_key)
        try:
            taken = interleave(options.count, measures(server, lifecycle), Console(stderr=True))
        finally:
            lifecycle.shutdown()
    figures = {name: Figures.of(seconds) for name, seconds in taken.items()}
    costs = {beside: added(taken, beside) for beside in ("there and back, bare SDK", "with a proof, bare SDK")}
    if options.json:
        measured = {name: asdict(one) for name, one in figures.items()}
        print(json.dumps({"unit": "ms", "measured": measured, "added by me2b to": costs}, indent=2))
    else:
        show(figures, costs, Console())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Me2bError as error:
        sys.exit(f"bench: {error}")
