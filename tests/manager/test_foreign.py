"""Purging what no living owner of this ledger has: one id at a time, and never somebody's who may be alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import e2b
import pytest

from managed_e2b import AuthenticationError, BackendError, ReapReport, State, ValidationError
from managed_e2b.engine import foreign, listing
from managed_e2b.engine.base import OWNER, TICKET
from managed_e2b.rules.leases import SECOND
from managed_e2b.testing import Chaos
from managed_e2b.testing.server import TestServer

from .conftest import Face, remote_of, settle
from .orphans import creating_row, estate, owner_row, queued_row, running_row

Make = Callable[..., str]


@pytest.fixture
def server(me2b_server: TestServer, me2b_chaos: Chaos) -> TestServer:
    return me2b_server


@pytest.fixture
def make(server: TestServer) -> Iterator[Make]:
    """Makes sandboxes with the SDK alone, and removes what is left of them."""
    where = {"api_key": server.api_key, "api_url": server.url}
    made: list[str] = []

    def one(**metadata: str) -> str:
        made.append(e2b.Sandbox.create("base", timeout=600, metadata=metadata, **where).sandbox_id)
        return made[-1]

    yield one
    server.chaos.calm()
    for sandbox_id in made:
        e2b.Sandbox.kill(sandbox_id, **where)


@pytest.fixture
def alive(server: TestServer) -> Callable[[str], bool]:
    def ask(sandbox_id: str) -> bool:
        try:
            e2b.Sandbox.get_info(sandbox_id, api_key=server.api_key, api_url=server.url)
        except e2b.NotFoundException:
            return False
        return True

    return ask


async def purge(lifecycle: Any, **options: Any) -> dict[str, str]:
    """What became of each sandbox."""
    report: ReapReport = await settle(lifecycle.reap(purge_foreign=True, **options))
    return {item.sandbox_id or str(item.ticket): item.action for item in report.items}


def reaper(face: Face, **options: Any) -> Any:
    return face.open(opening_reap=False, watchdog=False, **options)


async def test_what_other_programs_made_is_ended_only_when_that_is_asked_for(
    face: Face, make: Make, alive: Callable[[str], bool], me2b_chaos: Chaos
) -> None:
    stranger = make(mine="yes")
    lifecycle = reaper(face)
    assert (await settle(lifecycle.reap())).items == ()
    assert alive(stranger)
    report = await settle(lifecycle.reap(purge_foreign=True))
    (item,) = [item for item in report.items if item.sandbox_id == stranger]
    assert (item.action, item.ticket, item.owner, item.listed) == ("cleaned", None, None, True)
    assert item.age is not None
    assert item.age >= 0
    assert not alive(stranger)
    assert me2b_chaos.journal().count("kill", sandbox_id=stranger) == 1
    assert me2b_chaos.journal().count("connect") == 0


async def test_living_owners_keep_theirs_and_dead_ones_are_reaped_in_the_same_call(face: Face, make: Make) -> None:
    stranger = make()
    living, lifecycle = reaper(face), reaper(face)
    dead = await estate(face)
    async with face.entered(living.acquire()) as theirs, face.entered(lifecycle.acquire()) as mine:
        told = await purge(lifecycle)
        assert (told[stranger], told[dead.ids[0]]) == ("cleaned", "cleaned")
        assert {theirs.sandbox_id, mine.sandbox_id}.isdisjoint(told)
        for handle in (theirs, mine):
            assert (await settle(handle.run("echo here"))).stdout == "here\n"


async def test_another_ledgers_sandboxes_are_kept_unless_that_is_said_twice(face: Face, tmp_path: Any) -> None:
    other = reaper(face, db_path=tmp_path / "other.db")
    lifecycle = reaper(face, lease=10)
    async with face.entered(other.acquire(timeout=600)) as handle:
        assert (await purge(lifecycle))[handle.sandbox_id] == "kept"
        assert (await purge(lifecycle, dry_run=True))[handle.sandbox_id] == "kept"
        for too_much in ({}, {"older_than": 9}):
            with pytest.raises(ValidationError, match="older_than"):
                await purge(lifecycle, include_other_ledgers=True, **too_much)
        with pytest.raises(ValidationError, match="purge_foreign"):
            await settle(lifecycle.reap(include_other_ledgers=True, older_than=10))
        young = await purge(lifecycle, include_other_ledgers=True, older_than=3600)
        assert handle.sandbox_id not in young
        assert (await settle(handle.run("echo here"))).stdout == "here\n"
        later(lifecycle, 20)
        old = await purge(lifecycle, include_other_ledgers=True, older_than=10, dry_run=True)
        assert old[handle.sandbox_id] == "due"
        assert (await purge(lifecycle, include_other_ledgers=True, older_than=10))[handle.sandbox_id] == "cleaned"
        assert await remote_of(other) == []


def later(lifecycle: Any, seconds: float) -> None:
    clock = lifecycle._book._clock
    lifecycle._book._clock = lambda: clock() + int(seconds * SECOND)


async def test_filters_and_a_dry_run(face: Face, make: Make, alive: Callable[[str], bool]) -> None:
    one, two = make(run="1"), make(run="2")
    lifecycle = reaper(face)
    assert await purge(lifecycle, metadata={"run": "3"}) == {}
    assert await purge(lifecycle, metadata={"run": "1"}, template="other") == {}
    assert await purge(lifecycle, metadata={"run": "1"}, older_than=3600) == {}
    assert await purge(lifecycle, metadata={"run": "1"}, template="base", dry_run=True) == {one: "due"}
    assert alive(one)
    assert await purge(lifecycle, metadata={"run": "1"}, template="base") == {one: "cleaned"}
    assert (alive(one), alive(two)) == (False, True)


async def test_a_clock_that_is_three_days_ahead_makes_nobody_old(
    face: Face, make: Make, alive: Callable[[str], bool]
) -> None:
    fresh = make(run="fresh")
    lifecycle = reaper(face)
    later(lifecycle, 3 * 86_400)
    assert fresh not in await purge(lifecycle, metadata={"run": "fresh"}, older_than=86_400)
    assert alive(fresh)


async def test_what_carries_our_marks_is_judged_by_the_ledger(
    face: Face, make: Make, alive: Callable[[str], bool]
) -> None:
    lifecycle = reaper(face)
    book, account = lifecycle._book, lifecycle._engine.account
    living, dead = owner_row(book), owner_row(book, dead=True)
    in_the_making = creating_row(book, living, account)
    in_use = running_row(book, living, account, "iinuse00000000000000")
    ended = queued_row(book, living, account)
    book.give_up(ended, living, "gave up waiting")
    expected = {
        make(**{TICKET: in_the_making, OWNER: living}): None,
        make(**{TICKET: in_use, OWNER: living}): None,  # a second one: its owner's to end
        make(**{TICKET: "unknown", OWNER: living}): None,
        make(**{TICKET: ended, OWNER: living}): "cleaned",
        make(**{TICKET: "unknown", OWNER: dead}): "cleaned",
        make(**{TICKET: "unknown", OWNER: "unknown"}): "kept",
        make(**{OWNER: "unknown"}): "kept",
    }
    told = await purge(lifecycle)
    assert {sandbox_id: told.get(sandbox_id) for sandbox_id in expected} == expected
    assert {sandbox_id: alive(sandbox_id) for sandbox_id in expected} == {
        sandbox_id: action != "cleaned" for sandbox_id, action in expected.items()
    }


async def test_a_list_that_leaves_the_metadata_out_costs_nobody_a_sandbox(face: Face, tmp_path: Any) -> None:
    other = reaper(face, db_path=tmp_path / "other.db")
    lifecycle = reaper(face)
    sdk = lifecycle._engine.driver.sdk
    pages = sdk.pages

    async def bare(metadata: Any = None) -> Any:
        async for page in pages(metadata):
            yield [type(item)(**{**vars(item), "metadata": {}}) for item in page]

    sdk.pages = bare
    async with face.entered(other.acquire()) as handle:
        assert (await purge(lifecycle))[handle.sandbox_id] == "kept", "asked for its id, it says whose it is"
        assert (await settle(handle.run("echo here"))).stdout == "here\n"


async def test_an_owner_that_registers_after_the_list_is_respected(face: Face, make: Make) -> None:
    lifecycle = reaper(face)
    book = lifecycle._book
    sandbox_id = make(**{TICKET: "t", OWNER: "late"})
    sdk = lifecycle._engine.driver.sdk
    info = sdk.info

    async def meanwhile(asked: str) -> Any:
        sdk.info = info
        found = await info(asked)
        with book._write() as (connection, now):
            connection.exec_driver_sql(f"UPDATE owners SET closed_at = NULL, heartbeat = {now} WHERE id = 'late'")
        return found

    owner = owner_row(book, dead=True)
    with book._write() as (connection, _now):
        connection.exec_driver_sql(f"UPDATE owners SET id = 'late', boot_id = 'x', heartbeat = 0 WHERE id = '{owner}'")
    sdk.info = meanwhile
    assert (await purge(lifecycle))[sandbox_id] == "kept"


@pytest.mark.parametrize("lie", ["empty", "truncated"])
async def test_a_list_that_hides_sandboxes_ends_nothing_and_closes_no_row(
    face: Face, me2b_chaos: Chaos, lie: str
) -> None:
    lifecycle = reaper(face)
    async with face.entered(lifecycle.acquire()) as handle:
        rule = me2b_chaos.on("list")
        if lie == "empty":
            rule.empty()
        else:
            rule.truncated(0)
        assert await purge(lifecycle) == {}
        (row,) = lifecycle._book.records(states_=[State.RUNNING])
        assert row.sandbox_id == handle.sandbox_id


async def test_a_list_that_repeats_itself_is_read_once_and_told(face: Face, make: Make, me2b_chaos: Chaos) -> None:
    stranger = make()
    lifecycle = reaper(face)
    me2b_chaos.on("list").repeating()
    report = await settle(lifecycle.reap(purge_foreign=True))
    assert report.cut == "the list repeats itself"
    assert [item.action for item in report.items if item.sandbox_id == stranger] == ["cleaned"]
    assert me2b_chaos.journal().count("kill", sandbox_id=stranger) == 1


async def test_a_list_that_breaks_off_is_told_and_what_it_showed_is_done(
    face: Face, make: Make, alive: Callable[[str], bool]
) -> None:
    shown = make()
    lifecycle = reaper(face)
    sdk = lifecycle._engine.driver.sdk
    pages = sdk.pages

    async def broken(metadata: Any = None) -> Any:
        async for page in pages(metadata):
            yield page
        raise BackendError("502", status=502)

    sdk.pages = broken
    report = await settle(lifecycle.reap(purge_foreign=True))
    assert report.cut == "the list broke off: 502"
    assert not alive(shown)


async def test_the_pages_that_are_read_are_bounded(
    face: Face, make: Make, monkeypatch: pytest.MonkeyPatch, alive: Callable[[str], bool]
) -> None:
    unseen = make()
    monkeypatch.setattr(listing.read, "__kwdefaults__", {**listing.read.__kwdefaults__, "pages": 1})
    lifecycle = reaper(face)
    sdk = lifecycle._engine.driver.sdk

    async def endless(metadata: Any = None) -> Any:
        while True:
            yield []

    sdk.pages = endless
    report = await settle(lifecycle.reap(purge_foreign=True))
    assert (report.items, report.cut) == ((), "1 pages of the list were read")
    assert alive(unseen)


async def test_what_the_list_shows_and_is_gone_is_told_so(face: Face, make: Make, server: TestServer) -> None:
    gone = make(run="gone")
    lifecycle = reaper(face)
    await settle(lifecycle.list_remote())  # the snapshot that the next list shows again
    e2b.Sandbox.kill(gone, api_key=server.api_key, api_url=server.url)
    server.chaos.on("list").stale(1)
    assert await purge(lifecycle, metadata={"run": "gone"}) == {gone: "gone"}


async def test_a_kill_that_does_nothing_is_pending_and_tried_by_the_next_call(
    face: Face, make: Make, me2b_chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "PATIENCE", 0.0)
    stranger = make()
    lifecycle = reaper(face)
    me2b_chaos.on("kill").first().pretend()
    report = await settle(lifecycle.reap(purge_foreign=True, metadata={}))
    assert [item.sandbox_id for item in report.pending] == [stranger]
    assert (await purge(lifecycle))[stranger] == "cleaned"


async def test_paused_ones_are_purged_too(face: Face, make: Make, server: TestServer) -> None:
    paused = make()
    e2b.Sandbox.pause(paused, api_key=server.api_key, api_url=server.url)
    assert (await purge(reaper(face)))[paused] == "cleaned"


async def test_a_refused_key_is_an_error(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = reaper(face)
    me2b_chaos.on("list").status(401)
    with pytest.raises(AuthenticationError):
        await purge(lifecycle)
