"""429: with any Retry-After, on any call; it slows all down who share the account, and is nobody's problem."""

from __future__ import annotations

import asyncio
import itertools
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import e2b
import pytest

from managed_e2b import AcquireTimeoutError, AuthenticationError, BackendError, RateLimitedError, State
from managed_e2b.rules.leases import SECOND
from managed_e2b.testing import Chaos

from .conftest import Face, assert_nothing_left, remote_of, settle, states_of, until
from .crowd import crowd
from .test_limits import in_parallel


@pytest.fixture
def server(me2b_server: Any, me2b_chaos: Chaos) -> Any:
    """This room's lifecycles run against the server that refuses."""
    return me2b_server


@pytest.mark.parametrize("told", ["2", "date", "-1", "abc", "", None])
async def test_a_refused_create_is_tried_again_when_the_endpoint_says(
    face: Face, me2b_chaos: Chaos, told: str | None
) -> None:
    until_then = time.time() + 2
    me2b_chaos.on("create").first().status(
        429, retry_after=formatdate(until_then, usegmt=True) if told == "date" else told
    )
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        assert await remote_of(lifecycle) == [handle.sandbox_id]
    first, second = me2b_chaos.journal().of("create")
    assert (first.ticket, first.status, second.status) == (second.ticket, 429, 201)
    if told == "2":
        assert second.at - first.at >= 2
    elif told == "date":
        assert second.at >= int(until_then)
    await assert_nothing_left(lifecycle)


async def test_what_one_is_told_all_of_the_account_heed(face: Face, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("create").first().status(429, retry_after=2)
    refused, other = face.open(), face.open()

    async def acquire(lifecycle: Any) -> None:
        async with face.entered(lifecycle.acquire()):
            pass

    (first,) = in_parallel(face, lambda: acquire(refused))
    await asyncio.to_thread(me2b_chaos.wait_for, "create", state="answered")
    until(lambda: [row for row in refused._book.records() if row.refused_at], "the refusal is in the ledger")
    await acquire(other)
    await first
    no, again, others = me2b_chaos.journal().of("create")
    assert again.at - no.at >= 2
    assert others.at - no.at >= 2
    assert (again.owner, others.owner) == (refused.owner_id, other.owner_id), "the older one first"


async def test_refusals_that_go_on_come_ever_more_rarely_and_the_pace_recovers(face: Face, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("create").first(4).status(429)
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()):
        pass
    times = [request.at for request in me2b_chaos.journal().of("create")]
    gaps = [later - first for first, later in itertools.pairwise(times)]
    assert all(gap >= least for gap, least in zip(gaps, [0.5, 0.5, 0.8, 1.6], strict=True))
    for _ in range(4):
        async with face.entered(lifecycle.acquire()):
            pass
    assert me2b_chaos.journal().count("create") == 5 + 4


@pytest.mark.timeout(240)
def test_an_endpoint_that_takes_five_a_second_is_not_stormed(server: Any, me2b_chaos: Chaos, tmp_path: Path) -> None:
    me2b_chaos.on("create").rate(5)
    taken = crowd(server, tmp_path / "x.db", processes=3, each=12, hold=0.0)
    assert taken.errors == []
    requests = me2b_chaos.journal().of("create")
    refused = [request for request in requests if request.status == 429]
    # All go at once before anybody knows; after that a refusal now and then is how the pace is found.
    assert len(refused) <= 36 + 36
    assert server.live() == 0


@pytest.mark.timeout(240)
def test_a_cap_of_the_endpoint_that_nobody_knew_of_costs_no_errors(
    server: Any, me2b_chaos: Chaos, tmp_path: Path
) -> None:
    me2b_chaos.on("create").cap(3)
    taken = crowd(server, tmp_path / "x.db", processes=2, each=6, hold=0.2)
    assert taken.errors == []
    assert me2b_chaos.journal().peak_present <= 3
    assert [row.state for row in taken.rows] == [State.CLEANED] * 12
    assert len([one for one in me2b_chaos.journal().of("create") if one.status == 429]) <= 12 + 24


async def test_strangers_that_fill_the_account_are_counted_and_told(
    face: Face, me2b_chaos: Chaos, me2b_server: Any
) -> None:
    where = {"api_key": me2b_server.api_key, "api_url": me2b_server.url, "sandbox_url": me2b_server.url}
    strangers = [await asyncio.to_thread(e2b.Sandbox.create, timeout=60, **where) for _ in range(3)]
    me2b_chaos.on("create").cap(3)
    lifecycle = face.open(account_limit=3)
    try:
        with pytest.raises(AcquireTimeoutError, match=r"3 of them are unknown to this ledger.*me2b reap") as caught:
            async with face.entered(lifecycle.acquire(acquire_timeout=2)):
                pytest.fail("a fourth one")
        assert isinstance(caught.value.__cause__, RateLimitedError)
        assert me2b_chaos.journal().count("create") - 3 <= 4, "it backs off"
        assert await states_of(lifecycle) == [State.CREATE_FAILED], "it was refused: nothing to wait for"
    finally:
        for stranger in strangers:
            await asyncio.to_thread(stranger.kill)


async def test_sandboxes_of_ours_that_the_ledger_has_lost_are_counted_and_creates_wait_until_they_are_ended(
    face: Face, me2b_chaos: Chaos, me2b_server: Any
) -> None:
    """A pool counted less than ran, and went on creating into an account that was full."""
    where = {"api_key": me2b_server.api_key, "api_url": me2b_server.url, "sandbox_url": me2b_server.url}
    marks = {"me2b_owner": "an owner of a ledger that is gone"}
    lost = [
        await asyncio.to_thread(
            e2b.Sandbox.create, timeout=300, metadata={**marks, "me2b_ticket": f"ticket {number}"}, **where
        )
        for number in range(30)
    ]
    me2b_chaos.on("create").cap(30)
    lifecycle = face.open(account_limit=30)
    with pytest.raises(AcquireTimeoutError, match=r"lists 30 sandboxes of this key; 30 of them are unknown"):
        async with face.entered(lifecycle.acquire(acquire_timeout=3)):
            pytest.fail("the account is full")
    assert me2b_chaos.journal().count("create") - 30 <= 5, "it backs off"

    async def wait() -> None:
        async with face.entered(lifecycle.acquire(acquire_timeout=60)):
            pass

    (waiting,) = in_parallel(face, wait)

    def is_refused() -> bool:
        return any(row.refused_at for row in lifecycle._book.records(states_=[State.CREATING]))

    await asyncio.to_thread(until, is_refused, "its create is refused")
    await asyncio.to_thread(lost[0].kill)
    await waiting
    assert me2b_chaos.journal().peak_present <= 30


@pytest.mark.parametrize(("status", "kind"), [(400, BackendError), (401, AuthenticationError), (403, BackendError)])
async def test_what_is_wrong_for_good_is_tried_once(
    face: Face, me2b_chaos: Chaos, status: int, kind: type[BackendError]
) -> None:
    me2b_chaos.on("create").status(status)
    lifecycle = face.open()
    with pytest.raises(kind) as caught:
        async with face.entered(lifecycle.acquire()):
            pytest.fail("refused")
    assert caught.value.status == status
    assert me2b_chaos.journal().count("create") == 1
    await assert_nothing_left(lifecycle)


async def test_one_who_leaves_while_it_is_refused_leaves_nothing(face: Face, me2b_chaos: Chaos) -> None:
    # The answer is 429, and the sandbox is made all the same.
    me2b_chaos.on("create").after().status(429, retry_after=30)
    lifecycle = face.open()
    with pytest.raises(AcquireTimeoutError):
        async with face.entered(lifecycle.acquire(acquire_timeout=1)):
            pytest.fail("refused")
    assert me2b_chaos.journal().count("create") == 1
    await assert_nothing_left(lifecycle)
    assert await states_of(lifecycle) == [State.CLEANED]


@pytest.mark.parametrize("told", ["1", None])
async def test_kills_and_looks_that_are_refused_are_done_when_the_endpoint_says(
    face: Face, me2b_chaos: Chaos, told: str | None
) -> None:
    lifecycle = face.open()
    me2b_chaos.on("kill").first(2).status(429, retry_after=told)
    me2b_chaos.on("info").first(2).status(429, retry_after=told)
    async with face.entered(lifecycle.acquire()):
        pass
    assert await states_of(lifecycle) == [State.CLEANED]
    times = [request.at for request in me2b_chaos.journal().of("kill")]
    assert len(times) == 3
    if told is not None:
        assert all(later - first >= 1 for first, later in itertools.pairwise(times))


async def test_a_kill_that_must_wait_longer_than_a_release_is_the_keepers_and_nobody_hurries(
    face: Face, me2b_chaos: Chaos
) -> None:
    lifecycle = face.open()
    me2b_chaos.on("kill").first().status(429, retry_after=12)
    async with face.entered(lifecycle.acquire()):
        pass
    (row,) = await settle(lifecycle.records())
    assert row.state is State.CLEANING
    assert "RateLimitedError" in (row.last_error or "")
    until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "the keeper has cleaned it", seconds=40)
    first, second = me2b_chaos.journal().of("kill")
    assert second.at - first.at >= 12


async def test_lists_that_are_refused_are_read_again(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        me2b_chaos.on("list").first(2).status(429, retry_after=1)
        assert await remote_of(lifecycle) == [handle.sandbox_id]


async def test_a_list_that_is_refused_for_long_says_so(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open(opening_reap=False)
    me2b_chaos.on("list").status(429, retry_after=3600)
    for _ in range(2):
        with pytest.raises(RateLimitedError) as caught:
            await settle(lifecycle.list_remote())
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 800
    refused = [request for request in me2b_chaos.journal().of("list") if request.status == 429]
    assert len(refused) == 1, "the second one knew"


async def test_renewals_that_are_refused_cost_no_lease(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open(lease=10)
    me2b_chaos.on("timeout").first(2).status(429, retry_after=1)
    async with face.entered(lifecycle.acquire(timeout=600)) as handle:
        (first,) = await settle(lifecycle.records())
        until(
            lambda: [row for row in lifecycle._book.records() if row.remote_expiry > first.remote_expiry + 5 * SECOND],
            "the lease is renewed",
        )
        assert await remote_of(lifecycle) == [handle.sandbox_id]
    assert me2b_chaos.journal().count("timeout") >= 3


async def test_files_that_are_refused_are_sent_again_and_a_command_is_told(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        for op in ("files.write", "files.read"):
            me2b_chaos.on(op).first().status(429, retry_after=1)
        await settle(handle.stage_in({"a.txt": "words"}))
        assert await settle(handle.stage_out(["a.txt"])) == {"a.txt": b"words"}
        assert me2b_chaos.hits() == 2
        me2b_chaos.on("process.start").first().status(429, retry_after=7)
        with pytest.raises(RateLimitedError) as caught:
            await settle(handle.run("true"))
        assert caught.value.retry_after == 7
        assert (await settle(handle.run("echo later"))).stdout == "later\n"


async def test_a_command_that_is_picked_up_waits_for_an_agent_that_refuses_for_a_while(
    face: Face, me2b_chaos: Chaos
) -> None:
    async with face.entered(face.open().acquire()) as handle:
        me2b_chaos.on("process.start").first().cut("reset")
        refusals = me2b_chaos.on("process.connect").first(2).status(429, retry_after=1)
        result = await settle(handle.run("echo out; exit 3"))
        assert (result.stdout, result.exit_code, result.output_lost) == ("out\n", 3, True)
        assert me2b_chaos.hits(refusals) == 2
