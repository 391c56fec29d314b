"""Several processes that want sandboxes at the same moment, and what ledger and server say of that afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.models import SandboxRecord
from managed_e2b.rules.leases import SECOND

PROGRAM = """
import asyncio, contextlib, json, os, sys, threading, time
from managed_e2b import AsyncSandboxLifecycle, SandboxLifecycle

face, count, hold, options = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4])
gate = sys.argv[5]
errors = []

async def one(lifecycle):
    try:
        async with lifecycle.acquire(timeout=120):
            await asyncio.sleep(hold)
            while not os.path.exists(gate):
                await asyncio.sleep(0.05)
    except Exception as error:
        errors.append(repr(error))

def one_of_threads(lifecycle):
    try:
        with lifecycle.acquire(timeout=120):
            time.sleep(hold)
            while not os.path.exists(gate):
                time.sleep(0.05)
    except Exception as error:
        errors.append(repr(error))

def begin():
    print("ready", flush=True)
    sys.stdin.readline()

async def main():
    async with AsyncSandboxLifecycle(**options) as lifecycle:
        begin()
        await asyncio.gather(*(one(lifecycle) for _ in range(count)))

def main_of_threads():
    with SandboxLifecycle(**options) as lifecycle:
        begin()
        threads = [threading.Thread(target=one_of_threads, args=(lifecycle,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

asyncio.run(main()) if face == "async" else main_of_threads()
print(json.dumps(errors))
"""


@dataclass(frozen=True)
class Crowd:
    """What came of it."""

    errors: list[str]
    rows: list[SandboxRecord]

    def sent(self) -> list[float]:
        """When each create was sent, in seconds, as its process wrote it down just before."""
        return sorted(
            (row.hard_deadline - row.timeout * SECOND) / SECOND for row in self.rows if row.hard_deadline is not None
        )

    def overtaken(self, limit: int) -> list[tuple[SandboxRecord, SandboxRecord]]:
        """Pairs of rows (younger, older): the younger one took a slot that the older one could have had.

        All decisions are transactions of one ledger, and their times are those of the transactions.
        """
        unfair = []
        for row in self.rows:
            now = row.creating_at
            if now is None:
                continue
            older = [one for one in self.rows if one.queued_at < row.queued_at and (one.creating_at or now) > now]
            used = sum((one.creating_at or now + 1) <= now < (one.ended_at or now + 1) for one in self.rows)
            if len(older) > limit - used:
                unfair.append((row, older[0]))
        return unfair


def crowd(
    server: Any,
    db: Path,
    *,
    processes: int,
    each: int,
    hold: float,
    until: Callable[[], object] = lambda: None,
    **options: Any,
) -> Crowd:
    """Let so many processes, every other one async, acquire `each` at once and hold each for `hold` seconds.

    Nobody lets go before `until` has returned.
    """
    gate = db.with_suffix(".gate")
    where = {"db_path": str(db), "e2b_api_url": server.url, "e2b_key": server.api_key, "max_concurrent": each}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, face, str(each), str(hold), json.dumps({**where, **options}), str(gate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for face, _ in zip(["async", "sync"] * processes, range(processes), strict=False)
    ]
    errors: list[str] = []
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        until()
        gate.touch()
        for process in running:
            told, _ = process.communicate(timeout=100)
            assert process.returncode == 0
            errors += json.loads(told)
    finally:
        for process in running:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
    book = Ledger(open_engine(db))
    rows = book.records()
    book.close()
    return Crowd(errors, rows)
