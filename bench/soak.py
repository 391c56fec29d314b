"""Many processes, faults of every kind, and a random SIGKILL every second: what leaks, and what the limits were.

    python bench/soak.py --seconds 600          (or: make soak ARGS="--seconds 60")

Eight processes share one ledger and one local server. Each acquires, runs a command, releases, over and over; 5 % of
the server's answers go wrong in one way or another; one process a second is killed and replaced. When the time is up,
the faults end, what is left is given the time of a reap, and the server itself is asked what still runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from rich.console import Console
from rich.table import Table

from managed_e2b import AcquireTimeoutError, BackendError, CommandError, SandboxGoneError, SandboxLifecycle, State
from managed_e2b.rules import states
from managed_e2b.testing import Chaos, TestServer, local_server

FAULTS_TOTAL = 0.05
RATE_WINDOW = 1.0
SLOWED = 2.6
"""Seconds after a 429 in which the account is not allowed its rate: a Retry-After of 1 s, and five creates until the
pace is the old one again."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to run (default 60)")
    parser.add_argument("--acquires", type=int, default=0, help="end earlier after so many acquires (default: no)")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--limit", type=int, default=16, help="account_limit: sandboxes at once, over all processes")
    parser.add_argument("--rate", type=float, default=5.0, help="creates per second, over all processes")
    parser.add_argument("--hold", type=float, default=1.5, help="seconds for which a sandbox is used, on average")
    parser.add_argument("--kill-every", type=float, default=1.0, help="seconds between two SIGKILL; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="me2b-soak-") as directory, local_server(chaos=True) as server:
        return soak(options, Path(directory), server)


# -- one worker ---------------------------------------------------------------------------------------------------


class Told(logging.Handler):
    """What a worker tells the parent: events, and warnings of the library about its ledger."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe
        self._lock = threading.Lock()

    def tell(self, **what: Any) -> None:
        with self._lock:
            self._pipe.send(what)

    def emit(self, record: logging.LogRecord) -> None:
        if "locked" in record.getMessage():
            self.tell(event="warning", locked=True)


def work(how: dict[str, Any], pipe: Connection) -> None:
    """Acquire, run, release, on a few threads, until the parent says stop."""
    told = Told(pipe)
    logging.getLogger("managed_e2b").addHandler(told)
    lifecycle = SandboxLifecycle(
        how["db"],
        e2b_api_url=how["url"],
        e2b_key=how["key"],
        max_concurrent=how["threads"],
        account_limit=how["limit"],
        create_rate=how["rate"],
        lease=60,
        label="soak",
    )
    stop = threading.Event()
    dice = random.Random(os.getpid())

    def loop() -> None:
        while not stop.is_set():
            asked = time.monotonic()
            try:
                with lifecycle.acquire(timeout=120, acquire_timeout=60) as handle:
                    told.tell(event="acquired", waited=time.monotonic() - asked)
                    handle.run(f"sleep {min(dice.expovariate(1 / how['hold']), 10):.3f}", timeout=20)
            except SandboxGoneError as error:
                told.tell(event="gone", kind=type(error).__name__, reason=str(error.reason))
            except AcquireTimeoutError:
                told.tell(event="gave up")
            except (BackendError, CommandError) as error:
                told.tell(event="fault", kind=type(error).__name__)
            except Exception as error:
                told.tell(event="error", kind=f"{type(error).__name__}: {error}", locked="locked" in str(error))
                raise

    threads = [threading.Thread(target=loop) for _ in range(how["threads"])]
    for thread in threads:
        thread.start()
    with contextlib.suppress(EOFError):
        pipe.recv()  # the parent's word, or its end: stop
    stop.set()
    for thread in threads:
        thread.join()
    lifecycle.shutdown()


# -- the whole ----------------------------------------------------------------------------------------------------


class Workers:
    """The processes, and what they told. They are forked from a small server that has everything imported."""

    def __init__(self, options: argparse.Namespace, db: Path, server: TestServer) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["managed_e2b.lifecycle", "managed_e2b.handle"])
        self._how = {
            "db": str(db),
            "url": server.url,
            "key": server.api_key,
            "limit": options.limit,
            "rate": options.rate,
            "hold": options.hold,
            "threads": max(2, options.limit // 4),
        }
        self._readers: list[threading.Thread] = []
        self._running: list[tuple[Any, Connection]] = []
        self.told: list[dict[str, Any]] = []
        for _ in range(options.processes):
            self.start()

    def start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(self._how, theirs))
        process.start()
        theirs.close()
        self._running.append((process, ours))
        reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        reader.start()
        self._readers.append(reader)

    def kill_one(self, dice: random.Random) -> None:
        victim = dice.choice(self._running)
        victim[0].kill()
        victim[0].join()
        self._running.remove(victim)
        self.start()

    def stop(self) -> None:
        for _, pipe in self._running:
            pipe.send("stop")
        for process, _ in self._running:
            process.join(120)
        for reader in self._readers:
            reader.join(10)

    def _read(self, pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError, UnpicklingError):  # a killed process ends in mid-sentence
            while True:
                self.told.append(pipe.recv())


def soak(options: argparse.Namespace, directory: Path, server: TestServer) -> int:
    console = Console(stderr=options.json)
    dice = random.Random(options.seed)
    inject(server.chaos, options.seed)
    db = directory / "soak.db"
    began = time.monotonic()
    workers = Workers(options, db, server)
    kills = 0
    for second in ticks(options.seconds, options.kill_every or 1.0):
        if options.kill_every:
            workers.kill_one(dice)
            kills += 1
        done = sum(told["event"] == "acquired" for told in workers.told)
        if console.is_terminal:
            console.print(f"\r{second:5.0f} s  {done} acquired  {kills} killed  {server.live()} live ", end="")
        if options.acquires and done >= options.acquires:
            break
    lasted = time.monotonic() - began
    told = list(workers.told)
    journal = server.chaos.journal()
    hits = server.chaos.hits()
    server.chaos.calm()
    workers.stop()
    left = settle(db, server)
    waits = sorted(item["waited"] for item in told if item["event"] == "acquired")
    creates = sorted(request.at for request in journal.of("create"))
    refused = sorted(request.at for request in journal.of("create") if request.status == 429)
    figures: dict[str, Any] = {
        "seconds": round(lasted, 1),
        "acquires": len(waits),
        "creates at the server": len(creates),
        "faults injected": hits,
        "processes killed": kills,
        "server's peak of live sandboxes": journal.peak_present,
        "limit": options.limit,
        "busiest second, creates": journal.busiest("create", RATE_WINDOW),
        "rate set": options.rate,
        "rate used, share": round(share(creates, [], options.rate), 3),
        "creates answered by 429": len(refused),
        "rate used while no 429 slowed it, share": round(share(creates, refused, options.rate), 3),
        "leaks: sandboxes left": len(left),
        "double kills": len(journal.double_kills()),
        "wrongly reaped": sum(item["event"] == "gone" and "owner is dead" in item["reason"] for item in told),
        "found gone otherwise": sum(item["event"] == "gone" and "owner is dead" not in item["reason"] for item in told),
        "requests that a fault ended": sum(item["event"] == "fault" for item in told),
        "gave up waiting": sum(item["event"] == "gave up" for item in told),
        "unexpected errors": sum(item["event"] == "error" for item in told),
        "database is locked": sum(bool(item.get("locked")) for item in told),
        "wait for a sandbox, p50 s": rank(waits, 0.5),
        "wait for a sandbox, p99 s": rank(waits, 0.99),
    }
    report(console, figures, as_json=options.json)
    bad = ("leaks: sandboxes left", "wrongly reaped", "database is locked", "unexpected errors")
    over = figures["server's peak of live sandboxes"] > options.limit
    return 1 if over or any(figures[name] for name in bad) else 0


def inject(chaos: Chaos, seed: int) -> None:
    """5 % of the control plane's answers, spread over the kinds of faults."""
    chaos.seed(seed)
    ops = ("create", "info", "kill", "timeout", "list")
    each = FAULTS_TOTAL / 8
    chaos.on(*ops).sometimes(each).before().status(503)
    chaos.on(*ops).sometimes(each).after().status(504)
    chaos.on(*ops).sometimes(each).before().status(500)
    chaos.on(*ops).sometimes(each).before().drop()
    chaos.on(*ops).sometimes(each).after().drop("close")
    chaos.on(*ops).sometimes(each).before().status(429, retry_after="1")
    chaos.on(*ops).sometimes(each).delay(1.0)
    chaos.on("kill").sometimes(each).pretend()
    chaos.on("list").sometimes(0.2).empty()
    chaos.on("create").sometimes(each).dies_at(0.5)
    chaos.on("process.start").sometimes(each).cut("reset")


def ticks(seconds: float, every: float) -> Iterator[float]:
    """The time passed, every so often, until it is over."""
    began = time.monotonic()
    number = 1
    while number * every <= seconds:
        time.sleep(max(0.0, began + number * every - time.monotonic()))
        yield number * every
        number += 1


def settle(db: Path, server: TestServer) -> list[str]:
    """What still runs when the survivors have reaped, for at most a lease."""
    deadline = time.monotonic() + 90
    with SandboxLifecycle(db, e2b_api_url=server.url, e2b_key=server.api_key, label="soak, the end") as last:
        while time.monotonic() < deadline:
            last.reap()
            left = [item.sandbox_id for item in last.list_remote()]
            open_rows = [row for row in last.records(set(State) - states.TERMINAL) if row.sandbox_id is not None]
            if not left and not open_rows and server.live() == 0:
                return []
            time.sleep(0.5)
        return left or [str(row.sandbox_id) for row in open_rows]


def share(creates: Sequence[float], refused: Sequence[float], rate: float) -> float:
    """How much of the rate was used from the first create to the last, without the time after each 429."""
    counted, span = 0, 0.0
    for before, at in itertools.pairwise(creates):
        if not any(at > when and before < when + SLOWED for when in refused):
            counted += 1
            span += at - before
    return counted / span / rate if span else 0.0


def rank(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[math.ceil(share * len(ordered)) - 1], 3) if ordered else None


def report(console: Console, figures: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
        return
    table = Table("soak", "", title=None)
    for name, value in figures.items():
        table.add_row(name, str(value))
    console.print()
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
