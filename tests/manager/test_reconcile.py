"""Ledger and backend compared: what each says of every sandbox, and what that proves."""

from __future__ import annotations

from typing import Any

import e2b
import pytest

from managed_e2b import AuthenticationError, Me2bError, ReconcileReport, State
from managed_e2b.engine.base import OWNER, TICKET
from managed_e2b.testing import Chaos
from managed_e2b.testing.server import TestServer

from .conftest import Face, remote_of, settle
from .orphans import creating_row, estate, owner_row, running_row


@pytest.fixture
def server(me2b_server: TestServer, me2b_chaos: Chaos) -> TestServer:
    return me2b_server


def open_(face: Face, **options: Any) -> Any:
    return face.open(opening_reap=False, watchdog=False, **options)


async def reconcile(lifecycle: Any) -> ReconcileReport:
    report: ReconcileReport = await settle(lifecycle.reconcile())
    return report


def kinds(report: ReconcileReport) -> list[tuple[str | None, str, bool]]:
    return [(item.sandbox_id, item.kind, item.ended) for item in report.items]


async def test_what_runs_by_both_agrees(face: Face) -> None:
    lifecycle = open_(face)
    async with face.entered(lifecycle.acquire()) as handle:
        report = await reconcile(lifecycle)
        assert kinds(report) == [(handle.sandbox_id, "running", False)]
        assert report.agrees
    report = await reconcile(lifecycle)
    assert (report.items, report.agrees) == ((), True)


async def test_a_row_whose_sandbox_vanished_ends_as_lost_with_the_time(face: Face, server: TestServer) -> None:
    lifecycle = open_(face)
    async with face.entered(lifecycle.acquire()) as handle:
        e2b.Sandbox.kill(handle.sandbox_id, api_key=server.api_key, api_url=server.url)
        before = lifecycle._book.now()
        report = await reconcile(lifecycle)
        assert kinds(report) == [(handle.sandbox_id, "vanished", True)]
        assert not report.agrees
        (row,) = await settle(lifecycle.records())
        assert row.state is State.CLEANED
        assert row.reason.startswith("lost: ")
        assert before <= row.cleaning_at <= lifecycle._book.now()
    (row,) = await settle(lifecycle.records())
    assert row.reason.startswith("lost: "), "leaving the block changes nothing"


async def test_another_living_owners_row_is_told_of_and_left_to_it(face: Face, server: TestServer) -> None:
    living, lifecycle = open_(face), open_(face)
    async with face.entered(living.acquire()) as handle:
        assert kinds(await reconcile(lifecycle)) == [(handle.sandbox_id, "running", False)]
        e2b.Sandbox.kill(handle.sandbox_id, api_key=server.api_key, api_url=server.url)
        assert kinds(await reconcile(lifecycle)) == [(handle.sandbox_id, "vanished", False)]
        (row,) = await settle(lifecycle.records())
        assert (row.state, row.claimed_by) == (State.RUNNING, None)


async def test_what_a_dead_owner_left_is_told_of_and_left_to_the_reaper(face: Face) -> None:
    dead = await estate(face)
    lifecycle = open_(face)
    assert kinds(await reconcile(lifecycle)) == [(dead.ids[0], "orphaned", False)]
    assert await remote_of(dead.lifecycle) == dead.ids
    assert [item.action for item in (await settle(lifecycle.reap())).items] == ["cleaned"]


async def test_a_dead_owners_row_whose_sandbox_vanished_ends(face: Face) -> None:
    lifecycle = open_(face)
    book = lifecycle._book
    ticket = running_row(book, owner_row(book, dead=True), lifecycle._engine.account, "igone000000000000000")
    assert kinds(await reconcile(lifecycle)) == [("igone000000000000000", "vanished", True)]
    assert book.record(ticket).state is State.CLEANED


@pytest.mark.parametrize("lie", ["empty", "truncated", "repeating", "lossy"])
async def test_no_row_is_closed_because_of_a_list(face: Face, me2b_chaos: Chaos, lie: str) -> None:
    lifecycle = open_(face)
    async with face.entered(lifecycle.acquire()) as handle:
        rule = me2b_chaos.on("list")
        {
            "empty": rule.empty,
            "truncated": lambda: rule.truncated(0),
            "repeating": rule.repeating,
            "lossy": lambda: rule.lossy(1.0),
        }[lie]()
        report = await reconcile(lifecycle)
        assert kinds(report) == [(handle.sandbox_id, "running", False)]
        assert report.cut == ("the list repeats itself" if lie == "repeating" else None)
        assert (await settle(handle.run("echo here"))).stdout == "here\n"


async def test_a_paused_sandbox_is_told_as_paused_though_a_list_may_leave_it_out(
    face: Face, server: TestServer, me2b_chaos: Chaos
) -> None:
    lifecycle = open_(face)
    async with face.entered(lifecycle.acquire()) as handle:
        e2b.Sandbox.pause(handle.sandbox_id, api_key=server.api_key, api_url=server.url)
        assert handle.sandbox_id in [item.sandbox_id for item in await settle(lifecycle.list_remote())]
        me2b_chaos.on("list").empty()
        assert kinds(await reconcile(lifecycle)) == [(handle.sandbox_id, "paused", False)]
        assert [row.state for row in await settle(lifecycle.records())] == [State.RUNNING]


async def test_a_sandbox_whose_row_has_ended_is_killed(face: Face, server: TestServer) -> None:
    lifecycle = open_(face)
    async with face.entered(lifecycle.acquire()) as handle:
        ticket = handle.ticket
    where = {"api_key": server.api_key, "api_url": server.url}
    late = e2b.Sandbox.create("base", metadata={TICKET: ticket, OWNER: lifecycle.owner_id}, **where)
    stranger = e2b.Sandbox.create("base", **where)
    other = e2b.Sandbox.create("base", metadata={TICKET: "unknown", OWNER: "unknown"}, **where)
    report = await reconcile(lifecycle)
    assert kinds(report) == [(late.sandbox_id, "untracked", True)]
    assert report.items[0].ticket == ticket
    with pytest.raises(e2b.NotFoundException):
        e2b.Sandbox.get_info(late.sandbox_id, **where)
    assert stranger.kill(), "what is not of this ledger is none of its business"
    assert other.kill()


async def test_an_endpoint_that_fails_makes_nothing_vanish(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = open_(face)
    async with face.entered(lifecycle.acquire()) as handle:
        me2b_chaos.on("info").status(503, retry=False)
        (item,) = (await reconcile(lifecycle)).items
        assert (item.sandbox_id, item.kind, item.ended) == (handle.sandbox_id, "unknown", False)
        assert "503" in item.why
        me2b_chaos.calm()
        assert (await reconcile(lifecycle)).agrees


async def test_what_is_on_its_way_in_or_out_is_told_as_such(face: Face) -> None:
    lifecycle = open_(face)
    book, account = lifecycle._book, lifecycle._engine.account
    owner = owner_row(book)
    creating_row(book, owner, account)
    ending = running_row(book, owner, account, "iending0000000000000")
    assert book.claim(ending, owner, "released") is not None
    assert kinds(await reconcile(lifecycle)) == [(None, "unknown", False), ("iending0000000000000", "ending", False)]


async def test_a_row_that_ends_while_it_is_compared_is_left_out(face: Face) -> None:
    lifecycle = open_(face)
    sdk = lifecycle._engine.driver.sdk
    info = sdk.info
    context = lifecycle.acquire()
    async with face.entered(context):

        async def late(sandbox_id: str) -> Any:
            sdk.info = info
            lifecycle._cleaner.clean((await settle(lifecycle.records()))[0].ticket, "released")
            return await info(sandbox_id)

        sdk.info = late
        assert (await reconcile(lifecycle)).items == ()
        assert [row.reason for row in await settle(lifecycle.records())] == ["released"]


async def test_on_the_local_backend_other_owners_cannot_be_asked_for(face: Face) -> None:
    mine, theirs = open_(face, backend="local"), open_(face, backend="local")
    async with face.entered(mine.acquire()) as handle, face.entered(theirs.acquire()) as other:
        told = {item.sandbox_id: (item.kind, item.ended) for item in (await reconcile(mine)).items}
        assert told[handle.sandbox_id] == ("running", False)
        assert told[other.sandbox_id] == ("unknown", False), "another process would have a server of its own"


async def test_a_refused_key_is_an_error_and_a_closed_lifecycle_compares_nothing(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = open_(face)
    me2b_chaos.on("list").status(401)
    with pytest.raises(AuthenticationError):
        await reconcile(lifecycle)
    me2b_chaos.calm()
    await settle(lifecycle.shutdown())
    with pytest.raises(Me2bError, match="shut down"):
        await reconcile(lifecycle)
