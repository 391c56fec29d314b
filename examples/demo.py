"""The main job on both faces, with no account and no network: acquire, stage in, run, get the result, leave nothing.

    make demo        (or: python examples/demo.py)

Exits non-zero when a result is wrong or anything is left running.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from managed_e2b import AsyncSandboxLifecycle, Me2bError, SandboxLifecycle, SandboxRecord, State

SCRIPT = """\
import json, platform, sys

numbers = json.load(open("numbers.json"))
json.dump({"mean": sum(numbers) / len(numbers), "python": platform.python_version()}, open("result.json", "w"))
print("read", len(numbers), "numbers; arguments:", *sys.argv[1:])
"""
FILES: dict[str, str | bytes] = {"solve.py": SCRIPT, "numbers.json": json.dumps([3, 1, 4, 1, 5, 9, 2, 6])}
EXPECTED_MEAN = 3.875

console = Console(highlight=False)


@dataclass(frozen=True)
class Outcome:
    """What one face got, and what was left when its sandbox was released."""

    printed: str
    ran_as: str
    result: Any
    rows: Sequence[SandboxRecord]
    still_listed: Sequence[str]

    @property
    def good(self) -> bool:
        closed = len(self.rows) > 0 and all(row.state is State.CLEANED for row in self.rows)
        return self.result["mean"] == EXPECTED_MEAN and closed and not self.still_listed


def main_job(db: str) -> Outcome:
    """The sync face."""
    lifecycle = SandboxLifecycle(db_path=db, backend="local")
    try:
        with lifecycle.acquire(timeout=120, metadata={"demo": "sync"}) as sandbox:
            sandbox.stage_in(FILES)
            script = sandbox.run_script("solve.py", args=["--fast"])
            who = sandbox.run("whoami")
            result = json.loads(sandbox.stage_out(["result.json"])["result.json"])
        left = [remote.sandbox_id for remote in lifecycle.list_remote()]
        return Outcome(script.stdout.strip(), who.stdout.strip(), result, lifecycle.records(), left)
    finally:
        lifecycle.shutdown()


async def main_job_async(db: str) -> Outcome:
    """The async face: the same names, with await."""
    lifecycle = AsyncSandboxLifecycle(db_path=db, backend="local")
    try:
        async with lifecycle.acquire(timeout=120, metadata={"demo": "async"}) as sandbox:
            await sandbox.stage_in(FILES)
            script = await sandbox.run_script("solve.py", args=["--fast"])
            who = await sandbox.run("whoami")
            result = json.loads((await sandbox.stage_out(["result.json"]))["result.json"])
        left = [remote.sandbox_id for remote in await lifecycle.list_remote()]
        return Outcome(script.stdout.strip(), who.stdout.strip(), result, await lifecycle.records(), left)
    finally:
        await lifecycle.shutdown()


def show(face: str, outcome: Outcome) -> None:
    console.print(f"[bold]{face}[/bold]")
    console.print(f"  solve.py printed    {outcome.printed}")
    console.print(f"  ran as              {outcome.ran_as}")
    console.print(f"  result.json         {json.dumps(outcome.result)}")
    console.print(f"  server's own list   {', '.join(outcome.still_listed) or 'empty'}")


def show_ledger(rows: Sequence[SandboxRecord]) -> None:
    table = Table(title="The ledger", title_justify="left", box=None, pad_edge=False)
    for column in ("sandbox", "state", "why", "metadata", "lived"):
        table.add_column(column)
    for row in rows:
        lived = f"{(row.ended_at - row.creating_at) / 1000:.0f} ms" if row.ended_at and row.creating_at else "-"
        table.add_row(row.sandbox_id or "-", row.state, row.reason or "-", json.dumps(dict(row.metadata)), lived)
    console.print(table)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="me2b-demo-") as folder:
        db = str(Path(folder) / "sandboxes.db")
        try:
            outcomes = {"sync": main_job(db), "async": asyncio.run(main_job_async(db))}
        except Me2bError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 2
    for face, outcome in outcomes.items():
        show(face, outcome)
    show_ledger(list({row.ticket: row for outcome in outcomes.values() for row in outcome.rows}.values()))
    good = all(outcome.good for outcome in outcomes.values())
    console.print("\nRight on both faces, nothing left running." if good else "\nFAILED: see above.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
