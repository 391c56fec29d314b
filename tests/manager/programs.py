"""Programs of their own that use the manager, to be killed, and what the server still runs for them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import e2b

from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.models import SandboxRecord

PRELUDE = """
import asyncio, ctypes, multiprocessing, os, signal, sys, threading, time
from managed_e2b import AsyncSandboxLifecycle, SandboxLifecycle

FACE = os.environ["TEST_FACE"]
WHERE = dict(e2b_api_url=os.environ["TEST_URL"], e2b_key=os.environ["TEST_KEY"], max_concurrent=8)
loop = asyncio.new_event_loop()

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: others write to this pipe, too
    sys.stdout.flush()

def wait(value):
    return loop.run_until_complete(value) if FACE == "async" else value

def opened(**options):
    kind = AsyncSandboxLifecycle if FACE == "async" else SandboxLifecycle
    return kind(os.environ["TEST_DB"], **{**WHERE, **options})

def entered(lifecycle, **options):
    context = lifecycle.acquire(**options)
    kept.append(context)
    return wait(context.__aenter__() if FACE == "async" else context.__enter__())

kept = []

def watchdog():
    from managed_e2b.watchdog.companion import companion
    return companion.pid
"""


class Server(Protocol):
    url: str
    api_key: str


class Program:
    """A running program. It tells what it did line by line."""

    def __init__(self, source: str, server: Server, db: Path, face: str) -> None:
        environment = {**os.environ, "TEST_URL": server.url, "TEST_KEY": server.api_key, "TEST_DB": str(db)}
        # Newer Pythons warn of every fork in a process that has threads.
        environment["PYTHONWARNINGS"] = "ignore:This process:DeprecationWarning"
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(source)],
            env={**environment, "TEST_FACE": face},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._said = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def said(self, seconds: float = 40.0) -> list[str]:
        """The words of its next line."""
        deadline = time.monotonic() + seconds
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._said:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"it said nothing within {seconds} s"
            data = os.read(descriptor, 4096)
            assert data, f"it ended without a word: {self.ended()}"
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode().split()

    def tell(self) -> None:
        """Let it go on: a line on its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.wait(20)

    def ended(self, seconds: float = 40.0) -> tuple[int, str]:
        """Its exit status (negative: the signal) and what it wrote to stderr."""
        status = self._process.wait(seconds)
        assert self._process.stderr is not None
        return status, self._process.stderr.read().decode()

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        with contextlib.suppress(ProcessLookupError):  # what it forked, and a test that failed left
            self.signal(signal.SIGKILL, group=True)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


class Programs:
    """Starts programs on one server and one ledger, and looks at what they leave."""

    def __init__(self, server: Any, db: Path) -> None:
        self.server = server
        self.db = db
        self._started: list[Program] = []

    def start(self, source: str, face: str = "sync", db: Path | None = None) -> Program:
        program = Program(source, self.server, db or self.db, face)
        self._started.append(program)
        return program

    def running(self, *owners: str) -> list[str]:
        """Ids that the server lists for these owners."""
        found: list[str] = []
        for owner in owners:
            query = e2b.SandboxQuery(metadata={"me2b_owner": owner})
            pages = e2b.Sandbox.list(query=query, api_key=self.server.api_key, api_url=self.server.url)
            while pages.has_next:
                found += [item.sandbox_id for item in pages.next_items()]
        return found

    def rows(self, *owners: str) -> list[SandboxRecord]:
        """The ledger's rows of these owners."""
        book = Ledger(open_engine(self.db))
        try:
            return [row for owner in owners for row in book.records(owner=owner)]
        finally:
            book.close()

    def close(self) -> None:
        for program in self._started:
            program.close()


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only as a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def programs_on(server: Any, db: Path) -> Iterator[Programs]:
    programs = Programs(server, db)
    yield programs
    programs.close()
