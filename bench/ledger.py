"""How one ledger bears many processes: writes under contention, and what it costs to wait in line.

    python bench/ledger.py                        (32 processes x 50 sandboxes, heartbeats every second, a minute)
    python bench/ledger.py --db postgresql://…    (the same on PostgreSQL)
    python bench/ledger.py --waiters 32           (queries of those who wait for a slot)

No backend is involved: sandboxes are rows here, with an id that nobody made. Every process is an owner with its own
heartbeat thread; beside that its sandboxes are released and acquired anew in turn, `--churn` of them a second. The
beginning, when all processes open their sandboxes at once, and the end, when all close them, are told apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from managed_e2b import LedgerError, SandboxLifecycle
from managed_e2b.engine import host
from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.limits import Caps, Go

ACCOUNT = "bench"
LEASE = 300
PHASES = ("opening", "everyday", "closing")
BEAT = 1.0
"""Seconds between two heartbeats of an owner; a lifecycle's own interval is 30."""


@dataclass(frozen=True)
class Figures:
    """Of one kind of write, in milliseconds. Percentiles by nearest rank."""

    count: int
    p50: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Figures:
        ordered = sorted(one * 1000 for one in seconds)

        def rank(share: float) -> float:
            return round(ordered[math.ceil(share * len(ordered)) - 1], 2)

        return cls(len(ordered), rank(0.5), rank(0.99), round(ordered[-1], 2))


class Taken:
    """Times and errors of one process."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.errors: Counter[str] = Counter()

    def write(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do a write and keep its time; an error of the database is counted and is no end."""
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        except LedgerError as error:
            self.errors[str(error)] += 1
            return None
        finally:
            self.seconds[name].append(time.perf_counter() - began)


class Program:
    """One process: an owner, its heartbeat, its sandboxes."""

    def __init__(self, db: str, sandboxes: int) -> None:
        self.taken = Taken()
        self.book = Ledger(open_engine(db))
        self.owner = uuid.uuid4().hex
        self.caps = Caps(sandboxes, account_limit=10**6)
        started = host.process_started(os.getpid()) or 0
        self.book.open_owner(self.owner, host.here(), os.getpid(), started, "bench", 600 * SECOND, sandboxes)
        self.open = [self.acquire() for _ in range(sandboxes)]

    def acquire(self) -> str:
        book, ticket, write = self.book, uuid.uuid4().hex, self.taken.write
        write(
            "enqueue",
            book.enqueue,
            ticket,
            owner=self.owner,
            account=ACCOUNT,
            source=("template", "base"),
            timeout=600,
            lease=LEASE,
            metadata={"run": "bench"},
            sdk_version="0",
        )
        while not isinstance(write("turn", book.turn, ticket, self.owner, ACCOUNT, self.caps), Go):
            time.sleep(0.05)
        write("running", book.running, ticket, self.owner, f"i{ticket}", sent_at=book.now(), remote=LEASE)
        return ticket

    def release(self, ticket: str) -> None:
        self.taken.write("claim", self.book.claim, ticket, self.owner, "released")
        self.taken.write("cleaned", self.book.cleaned, ticket, self.owner)

    def run(self, seconds: float, churn: float) -> None:
        """Beat, renew and churn for so long."""
        end = time.monotonic() + seconds
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(BEAT):
                self.taken.write("beat", self.book.beat, self.owner)

        beating = threading.Thread(target=beat)
        beating.start()
        dice = random.Random(os.getpid())
        while time.monotonic() < end:
            time.sleep(dice.uniform(0.5, 1.5) / churn)
            ticket = self.open.pop(0)
            self.release(ticket)
            self.open.append(self.acquire())
            due = dice.choice(self.open)
            self.taken.write("extended", self.book.extended, due, self.book.now() + LEASE * SECOND)
        stop.set()
        beating.join()

    def close(self) -> None:
        """Release everything, as fast as it goes."""
        for ticket in self.open:
            self.release(ticket)
        self.book.close_owner(self.owner)
        self.book.close()


def program(db: str, sandboxes: int, seconds: float, churn: float, barrier: Any, told: Connection) -> None:
    """The main function of a process."""
    one = Program(db, sandboxes)
    phases = {"opening": one.taken}
    barrier.wait()
    one.taken = phases["everyday"] = Taken()
    one.run(seconds, churn)
    barrier.wait()
    one.taken = phases["closing"] = Taken()
    one.close()
    told.send({name: (dict(taken.seconds), dict(taken.errors)) for name, taken in phases.items()})


def contention(db: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the processes and put their figures together."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(options.processes)
    pipes = []
    for _ in range(options.processes):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=program, args=(db, options.sandboxes, options.seconds, options.churn, barrier, theirs)
        )
        process.start()
        theirs.close()
        pipes.append((process, mine))
    seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in PHASES}
    errors: Counter[str] = Counter()
    for process, mine in pipes:
        for phase, (taken, failed) in mine.recv().items():
            for name, values in taken.items():
                seconds[phase][name] += values
            errors.update(failed)
        process.join()
    every = {phase: [one for values in kinds.values() for one in values] for phase, kinds in seconds.items()}
    book = Ledger(open_engine(db))
    left = sum(record.state not in ("cleaned", "create_failed") for record in book.records(account=ACCOUNT))
    book.close()
    return {
        "processes": options.processes,
        "sandboxes each": options.sandboxes,
        "seconds": options.seconds,
        "writes per second": round(len(every["everyday"]) / options.seconds, 1),
        "errors": dict(errors),
        "rows left open": left,
        **{name: asdict(Figures.of(values)) for name, values in sorted(seconds["everyday"].items())},
        "all writes": asdict(Figures.of(every["everyday"])),
        "all open at once": asdict(Figures.of(every["opening"])),
        "all close at once": asdict(Figures.of(every["closing"])),
    }


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the transactions of every ledger of this process."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(Ledger, name) for name in ("_read", "_write")}

    def counting(name: str, original: Callable[[Ledger], Any]) -> Callable[[Ledger], Any]:
        def transaction(ledger: Ledger) -> Any:
            counts[name.strip("_")] += 1
            return original(ledger)

        return transaction

    for name, original in originals.items():
        setattr(Ledger, name, counting(name, original))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(Ledger, name, original)


def waiting(db: str, options: argparse.Namespace) -> dict[str, Any]:
    """Queries per second of those who wait while every slot is taken, all in one lifecycle or each in its own."""
    result: dict[str, Any] = {}
    for name, lifecycles in (("one lifecycle", 1), ("a lifecycle each", options.waiters)):
        where = {"e2b_api_url": "http://127.0.0.1:9", "e2b_key": "e2b_" + "0" * 40, "opening_reap": False}
        each = [
            SandboxLifecycle(db, account_limit=1, watchdog=False, label="bench", **where) for _ in range(lifecycles)
        ]
        account = each[0]._engine.account
        book, holder = each[0]._book, each[0]._engine.owner
        ticket = uuid.uuid4().hex
        book.enqueue(
            ticket, owner=holder, account=account, source=("template", "base"), timeout=600, lease=LEASE, metadata={},
            sdk_version="0",
        )  # fmt: skip
        book.turn(ticket, holder, account, Caps(1, account_limit=1))

        def wait_in_line(lifecycle: SandboxLifecycle) -> None:
            with contextlib.suppress(TimeoutError), lifecycle.acquire(acquire_timeout=options.seconds + 2):
                raise SystemExit("bench: there is a slot that nobody freed")

        threads = [
            threading.Thread(target=wait_in_line, args=(each[number % lifecycles],))
            for number in range(options.waiters)
        ]
        for thread in threads:
            thread.start()
        time.sleep(1)  # the crowd at the door
        with counted() as counts:
            time.sleep(options.seconds)
            taken = dict(counts)
        for thread in threads:
            thread.join()
        book.claim(ticket, holder, "released")
        book.create_failed(ticket, holder, "nothing was created")
        for lifecycle in each:
            lifecycle.shutdown()
        result[name] = {
            "waiters": options.waiters,
            "reads per second": round(taken.get("read", 0) / options.seconds, 1),
            "writes per second": round(taken.get("write", 0) / options.seconds, 1),
        }
    return result


def show(result: dict[str, Any], console: Console) -> None:
    if "all writes" not in result:
        for name, values in result.items():
            console.print(name + ": " + ", ".join(f"{key} {value}" for key, value in values.items()))
        return
    table = Table(
        title=f"Milliseconds of a write: {result['processes']} processes x {result['sandboxes each']} sandboxes, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}",
        title_justify="left",
    )
    for column in ("write", "count", "p50", "p99", "most"):
        table.add_column(column, justify="left" if column == "write" else "right")
    for name, values in result.items():
        if isinstance(values, dict) and "p99" in values:
            table.add_row(name, str(values["count"]), *(f"{values[key]:.1f}" for key in ("p50", "p99", "most")))
    console.print(table)
    locked = sum(count for told, count in result["errors"].items() if "locked" in told)
    console.print(
        f'{result["writes per second"]} writes a second; {locked} times "database is locked", '
        f"{sum(result['errors'].values()) - locked} other errors; {result['rows left open']} rows left open"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=32, metavar="N")
    parser.add_argument("--sandboxes", type=int, default=50, metavar="N", help="of each process (default: 50)")
    parser.add_argument("--seconds", type=float, default=60, metavar="S")
    parser.add_argument("--churn", type=float, default=1.0, metavar="N", help="sandboxes a second and process")
    parser.add_argument("--db", metavar="URL", help="a database of its own (default: a new SQLite file)")
    parser.add_argument("--waiters", type=int, metavar="N", help="measure what waiting costs instead")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="me2b-bench-") as folder:
        db = options.db or str(Path(folder) / "sandboxes.db")
        result = waiting(db, options) if options.waiters else contention(db, options)
    if options.json:
        print(json.dumps({"unit": "ms", **result}, indent=2))
    else:
        show(result, Console())
    return 1 if result.get("errors") or result.get("rows left open") else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LedgerError as error:
        sys.exit(f"bench: {error}")
