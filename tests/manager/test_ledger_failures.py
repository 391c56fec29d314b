"""A ledger that fails while it is in use is a LedgerError on every call, and costs no sandbox: its id is known."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from managed_e2b import LedgerError, State
from managed_e2b.watchdog.companion import companion

from .conftest import Face, assert_nothing_left, remote_of, settle, states_of, until
from .programs import Programs, programs_on


class Ledgers:
    """Takes the ledger of a test away, and puts it back."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._elsewhere = file.with_name("elsewhere.db")

    def take_away(self) -> None:
        self._file.rename(self._elsewhere)

    def put_back(self) -> None:
        if self._elsewhere.exists():
            self._elsewhere.rename(self._file)


@pytest.fixture
def ledgers(face: Face) -> Iterator[Ledgers]:
    ledgers = Ledgers(face.db)
    yield ledgers
    ledgers.put_back()


def fail_at(lifecycle: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this write of the lifecycle fails, as on a disk that is full."""

    def full(*_args: Any, **_kwargs: Any) -> Any:
        raise LedgerError("sandboxes.db: the ledger fails (database or disk is full)")

    full.__name__ = name
    monkeypatch.setattr(lifecycle._book, name, full)


async def test_a_request_that_cannot_be_written_makes_nothing(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    lifecycle = face.open()
    fail_at(lifecycle, "enqueue", monkeypatch)
    with pytest.raises(LedgerError, match="full"):
        async with face.entered(lifecycle.acquire()):
            pytest.fail("made without a row")
    assert await remote_of(lifecycle) == []
    assert await states_of(lifecycle) == []


@pytest.mark.parametrize("only", ["running", "running and claim"])
async def test_a_sandbox_whose_row_cannot_be_written_is_killed(
    face: Face, only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = face.open()
    for name in only.split(" and "):
        fail_at(lifecycle, name, monkeypatch)
    with pytest.raises(LedgerError, match="full"):
        async with face.entered(lifecycle.acquire()):
            pytest.fail("used without a row")
    assert await remote_of(lifecycle) == []
    monkeypatch.undo()
    until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "the keeper has ended the row")
    await assert_nothing_left(lifecycle)


async def test_a_sandbox_is_killed_at_the_end_of_its_block_though_the_ledger_is_gone(
    face: Face, ledgers: Ledgers
) -> None:
    lifecycle = face.open()

    async def use() -> None:
        async with face.entered(lifecycle.acquire()) as handle:
            ledgers.take_away()
            assert (await settle(handle.run("echo goes on"))).stdout == "goes on\n"

    with pytest.raises(LedgerError, match=r"sandboxes\.db: the ledger has been removed"):
        await use()
    assert await remote_of(lifecycle) == []
    ledgers.put_back()
    until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "the keeper has ended the row")
    await assert_nothing_left(lifecycle)


async def test_what_nobody_holds_is_killed_though_the_ledger_is_gone(face: Face, ledgers: Ledgers) -> None:
    lifecycle = face.open()
    context = lifecycle.acquire()
    await settle(context.__aenter__() if face.name == "async" else context.__enter__())
    assert len(await remote_of(lifecycle)) == 1
    ledgers.take_away()
    del context
    gc.collect()
    watcher = face.open(db_path=face.db.with_name("another.db"), opening_reap=False)
    async with asyncio.timeout(20):
        while any(box.metadata["me2b_owner"] == lifecycle.owner_id for box in await settle(watcher.list_remote())):
            await asyncio.to_thread(time.sleep, 0.02)  # between two looks; the loop closes the dropped generator
    ledgers.put_back()
    await asyncio.to_thread(until, lambda: lifecycle._book.records(states_=[State.CLEANED]), "the row is ended, too")


async def test_a_shutdown_kills_what_is_in_use_though_the_ledger_is_gone(face: Face, ledgers: Ledgers) -> None:
    lifecycle, watcher = face.open(), face.open(db_path=face.db.with_name("another.db"))
    contexts = [lifecycle.acquire() for _ in range(2)]
    for context in contexts:
        await settle(context.__aenter__() if face.name == "async" else context.__enter__())
    ledgers.take_away()
    with pytest.raises(LedgerError, match="removed"):
        await settle(lifecycle.shutdown())
    left = [item for item in await settle(watcher.list_remote()) if item.metadata["me2b_owner"] == lifecycle.owner_id]
    assert left == []
    assert await settle(lifecycle.shutdown()) == (), "it is shut down all the same"
    assert lifecycle.owner_id not in companion._registrations, "and its goodbye is the watchdog's to deliver"


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "records": lambda lifecycle, _: lifecycle.records(),
    "reap": lambda lifecycle, _: lifecycle.reap(),
    "reap of strangers": lambda lifecycle, _: lifecycle.reap(purge_foreign=True, dry_run=True),
    "reconcile": lambda lifecycle, _: lifecycle.reconcile(),
    "run, when the handle is released": lambda _, handle: handle.run("true"),
    "run_script": lambda _, handle: handle.run_script("x.py"),
    "stage_in": lambda _, handle: handle.stage_in({"x": b""}),
    "stage_out": lambda _, handle: handle.stage_out(["x"]),
}


@pytest.mark.parametrize("call", CALLS)
async def test_every_call_that_needs_the_ledger_tells_that_it_fails(face: Face, ledgers: Ledgers, call: str) -> None:
    lifecycle = face.open(opening_reap=False)
    async with face.entered(lifecycle.acquire()) as handle:
        pass
    ledgers.take_away()
    with pytest.raises(LedgerError, match="removed"):
        await settle(CALLS[call](lifecycle, handle))
    assert isinstance(await settle(lifecycle.list_remote()), list), "which does not need it"


@pytest.fixture
def programs(server: Any, tmp_path: Path) -> Iterator[Programs]:
    yield from programs_on(server, tmp_path / "sandboxes.db")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_program_that_exits_without_its_ledger_leaves_nothing(programs: Programs, kind: str) -> None:
    program = programs.start(
        """
        lifecycle = opened()
        say(lifecycle.owner_id, entered(lifecycle).sandbox_id)
        sys.stdin.readline()
        """,
        kind,
    )
    owner, sandbox_id = program.said()
    assert programs.running(owner) == [sandbox_id]
    programs.db.rename(programs.db.with_name("elsewhere.db"))
    program.tell()
    status, told = program.ended()
    assert status == 0
    assert "the ledger has been removed" in told
    assert programs.running(owner) == []


async def test_the_keeper_outlives_it_and_goes_on(
    face: Face, ledgers: Ledgers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "managed_e2b")
    lifecycle = face.open(lease=10, stale_timeout=2)
    heartbeat = lifecycle._book.known_owners([lifecycle.owner_id])[0].heartbeat
    ledgers.take_away()
    until(lambda: "removed" in caplog.text, "the keeper has told it")
    ledgers.put_back()
    until(
        lambda: lifecycle._book.known_owners([lifecycle.owner_id])[0].heartbeat > heartbeat + 2_000_000,
        "its heart beats again",
    )
