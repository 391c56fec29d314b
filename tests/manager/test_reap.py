"""Reaping: what dead owners left is ended and proved dead, and nothing that a living one has is touched."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import e2b
import pytest

from managed_e2b import BackendError, Me2bError, State, ValidationError
from managed_e2b.engine import keeper
from managed_e2b.engine import reap as engine_reap
from managed_e2b.engine.base import OWNER, TICKET
from managed_e2b.rules.leases import SECOND
from managed_e2b.testing import Chaos
from managed_e2b.testing.server import TestServer

from .conftest import Face, remote_of, settle, until
from .orphans import ELSEWHERE, creating_row, die, entered, estate, owner_row, queued_row, running_row
from .programs import programs_on


@pytest.fixture
def server(me2b_server: TestServer, me2b_chaos: Chaos) -> TestServer:
    return me2b_server


def reaper(face: Face, **options: Any) -> Any:
    """A lifecycle that reaps when it is told to."""
    return face.open(opening_reap=False, watchdog=False, **options)


async def actions(lifecycle: Any, **options: Any) -> list[tuple[str, str]]:
    report = await settle(lifecycle.reap(**options))
    return [(item.sandbox_id or item.ticket, item.action) for item in report.items]


def info(server: TestServer, sandbox_id: str) -> Any:
    return e2b.Sandbox.get_info(sandbox_id, api_key=server.api_key, api_url=server.url)


async def test_a_dead_owners_sandboxes_are_ended_and_a_living_ones_never(face: Face, me2b_chaos: Chaos) -> None:
    living = face.open(opening_reap=False)
    async with face.entered(living.acquire()) as handle:
        dead = await estate(face, 2)
        lifecycle = reaper(face)
        first = await settle(lifecycle.reap())
        assert sorted((item.sandbox_id, item.action) for item in first.items) == sorted(
            (sandbox_id, "cleaned") for sandbox_id in dead.ids
        )
        assert {item.owner for item in first.items} == {dead.owner}
        assert all(dead.owner in item.why and item.age >= 0 for item in first.items)
        for _ in range(10):
            assert (await settle(lifecycle.reap())).items == ()
        assert (await settle(handle.run("echo untouched"))).stdout == "untouched\n"
        journal = me2b_chaos.journal()
        assert sorted(request.sandbox_id or "" for request in journal.of("kill")) == sorted(dead.ids)
        assert journal.count("connect") == 0, "it would resume and extend"
    assert await remote_of(dead.lifecycle) == []


OWNER_OF_TWO = """
lifecycle = opened(opening_reap=False, watchdog=False)
say(lifecycle.owner_id, *[entered(lifecycle).sandbox_id for _ in range(2)])
for _ in sys.stdin:
    report = wait(lifecycle.reap())
    say("reaped", *[item.sandbox_id for item in report.cleaned], "of", len(report.items))
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_of_three_programs_the_killed_ones_sandboxes_are_ended_by_another_one_and_the_living_ones_by_nobody(
    kind: str, server: TestServer, me2b_chaos: Chaos, tmp_path: Path
) -> None:
    """A reaper saw its own process only; one that swept by age or by absence would have killed a living sibling's."""
    for programs in programs_on(server, tmp_path / "sandboxes.db"):
        a, b, c = [programs.start(OWNER_OF_TWO, kind) for _ in range(3)]
        (owner_a, *of_a), (owner_b, *of_b), (owner_c, *of_c) = a.said(), b.said(), c.said()
        a.kill()
        b.tell()
        told = b.said()
        assert (told[0], sorted(told[1:3]), told[3:]) == ("reaped", sorted(of_a), ["of", "2"])
        assert programs.running(owner_a) == []
        for _ in range(10):
            b.tell()
            assert b.said() == ["reaped", "of", "0"]
        assert sorted(programs.running(owner_b, owner_c)) == sorted(of_b + of_c)
        killed = {request.sandbox_id for request in me2b_chaos.journal().of("kill")}
        assert killed & {*of_a, *of_b, *of_c} == set(of_a)


async def test_a_dry_run_tells_and_ends_nothing(face: Face, me2b_chaos: Chaos) -> None:
    dead = await estate(face)
    lifecycle = reaper(face)
    report = await settle(lifecycle.reap(dry_run=True))
    assert [(item.sandbox_id, item.action) for item in report.due] == [(dead.ids[0], "due")]
    assert me2b_chaos.journal().count("kill") == 0
    (row,) = await settle(lifecycle.records())
    assert (row.state, row.owner) == (State.RUNNING, dead.owner)
    assert await actions(lifecycle) == [(dead.ids[0], "cleaned")]


async def test_filters_narrow_what_is_reaped(face: Face) -> None:
    one = await estate(face, metadata={"run": "1"})
    two = await estate(face, metadata={"run": "2"})
    lifecycle = reaper(face)
    assert await actions(lifecycle, older_than=3600) == []
    assert await actions(lifecycle, template="other") == []
    assert await actions(lifecycle, metadata={"run": "2"}, template="base") == [(two.ids[0], "cleaned")]
    assert await actions(lifecycle) == [(one.ids[0], "cleaned")]


async def test_arguments_that_make_no_sense_are_refused_and_so_is_a_closed_lifecycle(face: Face) -> None:
    lifecycle = reaper(face)
    with pytest.raises(ValidationError, match="older_than"):
        await settle(lifecycle.reap(older_than=-1))
    await settle(lifecycle.shutdown())
    with pytest.raises(Me2bError, match="shut down"):
        await settle(lifecycle.reap())


async def test_hundreds_of_stale_rows_are_cleared_by_the_opening_reap(face: Face) -> None:
    living = reaper(face)
    account = living._engine.account
    dead = owner_row(living._book, dead=True)
    for number in range(387):
        running_row(living._book, dead, account, f"igone{number:015d}")
    async with face.entered(living.acquire()) as handle:
        due = (await settle(living.reap(dry_run=True))).due
        assert len(due) == 387
        assert all(item.age is not None and item.age >= 0 for item in due)
        face.open()  # its keeper reaps at once, and nobody waits for it
        until(lambda: len(living._book.records(states_=[State.CLEANED])) == 387, "all are cleared", seconds=60)
        (row,) = living._book.records(states_=[State.RUNNING])
        assert row.sandbox_id == handle.sandbox_id


async def test_owners_that_die_later_are_found_by_the_keeper(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "REAP_INTERVAL", 0.05)
    watcher = face.open(watchdog=False)
    dead = await estate(face)
    until(lambda: watcher._book.records(states_=[State.CLEANED]), "the keeper has reaped it")
    assert await remote_of(dead.lifecycle) == []


@pytest.mark.parametrize("failures", [2, None])
async def test_a_delete_that_fails_is_told_as_pending_and_tried_again(
    face: Face, me2b_chaos: Chaos, failures: int | None
) -> None:
    dead = await estate(face)
    lifecycle = reaper(face, reaper_max_iter=3)
    lifecycle._keeper.stop(10)  # it would go on with what is pending
    rule = me2b_chaos.on("kill") if failures is None else me2b_chaos.on("kill").first(failures)
    rule.status(503, retry=False)
    report = await settle(lifecycle.reap())
    assert me2b_chaos.journal().count("kill") == 3, "once a pass"
    if failures is not None:
        assert [item.action for item in report.items] == ["cleaned"]
        return
    assert [item.action for item in report.pending] == ["pending"]
    assert "503" in report.pending[0].why
    (row,) = await settle(lifecycle.records())
    assert (row.state, row.claimed_by) == (State.CLEANING, lifecycle.owner_id)
    me2b_chaos.calm()
    assert await actions(lifecycle) == [(dead.ids[0], "cleaned")]


async def test_a_delete_that_answers_204_and_does_nothing_proves_nothing(face: Face, me2b_chaos: Chaos) -> None:
    dead = await estate(face)
    lifecycle = reaper(face, reaper_max_iter=1)
    lifecycle._keeper.stop(10)
    me2b_chaos.on("kill").first().pretend()
    assert await actions(lifecycle) == [(dead.ids[0], "pending")]
    assert await actions(lifecycle) == [(dead.ids[0], "cleaned")]
    assert me2b_chaos.journal().double_kills() == []


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
async def test_a_reaper_that_died_between_its_claim_and_its_delete_is_followed(
    face: Face, server: TestServer, paused: bool
) -> None:
    dead = await estate(face)
    first = reaper(face)
    (row,) = await settle(first.records())
    if paused:
        e2b.Sandbox.pause(dead.ids[0], api_key=server.api_key, api_url=server.url)
    assert first._book.claim(row.ticket, first.owner_id, "its owner is dead", dead=[]) is not None
    second = reaper(face)
    assert await actions(second) == [], "the first one lives"
    await die(first)
    assert await actions(second) == [(dead.ids[0], "cleaned")]
    with pytest.raises(e2b.NotFoundException):
        info(server, dead.ids[0])


async def test_a_claim_of_a_dead_cleaner_is_taken_over_from_it_though_the_owner_lives(face: Face) -> None:
    living = reaper(face)
    context = living.acquire()
    handle = await entered(face, context)
    book = living._book
    cleaner = owner_row(book, dead=True)
    assert book.claim(handle.ticket, cleaner, "released") is not None
    (item,) = (await settle(living.reap())).items
    assert (item.sandbox_id, item.action) == (handle.sandbox_id, "cleaned")
    assert cleaner in item.why
    await settle(context.__aexit__(None, None, None) if face.name == "async" else context.__exit__(None, None, None))


async def test_a_sandbox_that_somebody_paused_is_ended_when_its_owner_is_dead(face: Face, server: TestServer) -> None:
    dead = await estate(face)
    e2b.Sandbox.pause(dead.ids[0], api_key=server.api_key, api_url=server.url)
    assert await actions(reaper(face)) == [(dead.ids[0], "cleaned")]


async def test_an_owner_that_shows_life_between_the_look_and_the_claim_keeps_its_row(face: Face) -> None:
    lifecycle = reaper(face)
    book, account = lifecycle._book, lifecycle._engine.account
    suspended = owner_row(book, on=ELSEWHERE)
    tickets = [
        running_row(book, suspended, account, "isuspended0000000000"),
        queued_row(book, suspended, account),
    ]
    clock, owners = book._clock, book.owners_with_open_rows
    book._clock = lambda: clock() + 601 * SECOND

    def woken(account_: str) -> Any:
        found = owners(account_)
        assert book.beat(suspended)
        book.owners_with_open_rows = owners
        return found

    book.owners_with_open_rows = woken
    report = await settle(lifecycle.reap())
    assert [(item.ticket, item.action) for item in report.items] == [(ticket, "taken") for ticket in tickets]
    assert all("shown life" in item.why for item in report.items)
    assert [book.record(ticket).state for ticket in tickets] == [State.RUNNING, State.QUEUED]


async def test_a_row_in_line_just_ends(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = reaper(face)
    book = lifecycle._book
    ticket = queued_row(book, owner_row(book, dead=True), lifecycle._engine.account)
    asked = me2b_chaos.journal().count()
    assert await actions(lifecycle) == [(ticket, "never_existed")]
    assert book.record(ticket).state is State.CLEANED
    assert me2b_chaos.journal().count() == asked, "nothing was sent for it, so nothing is asked"


async def test_a_create_that_was_never_answered_is_found_by_its_ticket_and_all_it_made_is_killed(
    face: Face, server: TestServer
) -> None:
    lifecycle = reaper(face)
    book = lifecycle._book
    owner = owner_row(book, dead=True)
    ticket = creating_row(book, owner, lifecycle._engine.account)
    where = {"api_key": server.api_key, "api_url": server.url}
    made = [e2b.Sandbox.create("base", metadata={TICKET: ticket, OWNER: owner}, **where) for _ in range(5)]
    stranger = e2b.Sandbox.create("base", metadata={"mine": "yes"}, **where)
    made[0].kill()  # the first one has died meanwhile
    (item,) = (await settle(lifecycle.reap())).items
    assert (item.ticket, item.action) == (ticket, "cleaned")
    for sandbox in made:
        with pytest.raises(e2b.NotFoundException):
            info(server, sandbox.sandbox_id)
    assert info(server, stranger.sandbox_id).sandbox_id == stranger.sandbox_id
    stranger.kill()


async def test_a_create_that_was_never_answered_and_made_nothing_is_proved_by_time(face: Face) -> None:
    lifecycle = reaper(face, reaper_max_iter=1)
    lifecycle._keeper.stop(10)
    book = lifecycle._book
    ticket = creating_row(book, owner_row(book, dead=True), lifecycle._engine.account)
    assert await actions(lifecycle) == [(ticket, "pending")]
    clock = book._clock
    book._clock = lambda: clock() + 300 * SECOND
    assert await actions(lifecycle) == [(ticket, "pending")], "a lease alone is no proof: clocks differ"
    book._clock = lambda: clock() + 400 * SECOND
    assert await actions(lifecycle) == [(ticket, "never_existed")]
    assert book.record(ticket).state is State.CREATE_FAILED


@pytest.mark.parametrize("lie", ["empty", "truncated", "repeating", "lossy"])
async def test_a_list_that_lies_closes_no_row(face: Face, me2b_chaos: Chaos, server: TestServer, lie: str) -> None:
    lifecycle = reaper(face, reaper_max_iter=1)
    lifecycle._keeper.stop(10)
    book = lifecycle._book
    owner = owner_row(book, dead=True)
    ticket = creating_row(book, owner, lifecycle._engine.account)
    where = {"api_key": server.api_key, "api_url": server.url}
    made = e2b.Sandbox.create("base", metadata={TICKET: ticket, OWNER: owner}, **where)
    rule = me2b_chaos.on("list")
    faults: dict[str, Callable[[], int]] = {
        "empty": rule.empty,
        "truncated": lambda: rule.truncated(0),
        "repeating": rule.repeating,
        "lossy": lambda: rule.lossy(1.0),
    }
    faults[lie]()
    (item,) = (await settle(lifecycle.reap())).items
    if lie == "repeating":  # it shows the same page for ever, and that page holds it
        assert (item.ticket, item.sandbox_id, item.action) == (ticket, made.sandbox_id, "cleaned")
        assert me2b_chaos.journal().count("kill", sandbox_id=made.sandbox_id) == 1
        return
    assert (item.ticket, item.action) == (ticket, "pending")
    assert book.record(ticket).state is State.CLEANING
    me2b_chaos.calm()
    assert await actions(lifecycle) == [(made.sandbox_id, "cleaned")]


async def test_one_reap_is_bounded_in_sandboxes_and_seconds_and_the_next_goes_on(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = reaper(face)
    book = lifecycle._book
    dead = owner_row(book, dead=True)
    for number in range(5):
        running_row(book, dead, lifecycle._engine.account, f"igone{number:015d}")
    bounds = engine_reap.Bounds

    def bounded(**values: Any) -> None:
        monkeypatch.setattr("managed_e2b.base.Bounds", lambda: bounds(**values))

    bounded(seconds=0.0)
    report = await settle(lifecycle.reap())
    assert (report.items, report.cut) == ((), "0 seconds were over")
    bounded(stopped=lambda: True)
    assert (await settle(lifecycle.reap())).cut == "it was asked to stop"
    bounded(items=3)
    report = await settle(lifecycle.reap())
    assert (len(report.cleaned), report.cut) == (3, "3 sandboxes were done")
    report = await settle(lifecycle.reap())
    assert (len(report.cleaned), report.cut) == (2, None)


async def test_an_endpoint_that_is_down_keeps_every_row_and_is_told(face: Face) -> None:
    dead = await estate(face)
    lifecycle = reaper(face, reaper_max_iter=1)
    lifecycle._keeper.stop(10)
    kill = lifecycle._cleaner.driver.sdk.kill

    async def down(sandbox_id: str) -> bool:
        raise BackendError("no route to host")

    lifecycle._cleaner.driver.sdk.kill = down
    (item,) = (await settle(lifecycle.reap())).pending
    assert "no route to host" in item.why
    lifecycle._cleaner.driver.sdk.kill = kill
    assert await actions(lifecycle) == [(dead.ids[0], "cleaned")]


async def test_a_reap_that_is_cancelled_returns_at_once_and_what_it_began_goes_on(
    server: TestServer, tmp_path: Any
) -> None:
    face = Face("async", server, tmp_path / "sandboxes.db")  # type: ignore[arg-type]
    dead = await estate(face)
    lifecycle = reaper(face)
    hanging, go = asyncio.Event(), threading.Event()
    loop, kill = asyncio.get_running_loop(), lifecycle._cleaner.driver.sdk.kill

    async def slow(sandbox_id: str) -> bool:
        loop.call_soon_threadsafe(hanging.set)
        assert go.wait(30)
        return bool(await kill(sandbox_id))

    lifecycle._cleaner.driver.sdk.kill = slow
    task = asyncio.create_task(lifecycle.reap())
    await hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    await asyncio.to_thread(lambda: until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "it went on"))
    assert await remote_of(dead.lifecycle) == []
    await face.close()
