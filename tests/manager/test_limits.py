"""Limits that hold over all tasks, threads and processes, and the line in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from managed_e2b import AcquireTimeoutError, State
from managed_e2b.ledger import Ledger
from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.limits import MARGIN, PRESENT
from managed_e2b.testing import Chaos

from .conftest import Face, assert_nothing_left, settle, until
from .crowd import crowd
from .programs import programs_on


@pytest.fixture
def server(me2b_server: Any, me2b_chaos: Chaos) -> Any:
    """This room's lifecycles run against the server with the journal."""
    return me2b_server


def in_parallel(face: Face, *calls: Callable[[], Any]) -> list[asyncio.Future[Any]]:
    """Begin calls that block on one face, each on a thread of its own, and are awaited on the other."""
    if face.name == "async":
        return [asyncio.ensure_future(call()) for call in calls]
    pool = ThreadPoolExecutor(len(calls))
    return [asyncio.wrap_future(pool.submit(asyncio.run, call())) for call in calls]


async def seen(condition: Callable[[], Any], what: str) -> None:
    """As `until`, without a blocked loop."""
    await asyncio.to_thread(until, condition, what)


@pytest.mark.timeout(240)
def test_two_hundred_over_four_processes_under_a_common_cap_all_come_in_order(
    server: Any, me2b_chaos: Chaos, tmp_path: Path
) -> None:
    """Two hundred workers met an account's limit of twenty as a storm of 429s."""
    full = partial(until, lambda: server.live() == 20, "every slot is used", 60)
    taken = crowd(server, tmp_path / "x.db", processes=4, each=50, hold=0.1, until=full, account_limit=20)
    journal = me2b_chaos.journal()
    assert taken.errors == []
    assert [row.state for row in taken.rows] == [State.CLEANED] * 200
    assert journal.count("create") == 200, "each was sent once"
    assert journal.peak_present == 20
    assert journal.double_kills() == []
    assert taken.overtaken(20) == []
    assert server.live() == 0


@pytest.mark.timeout(240)
def test_a_cap_of_one_lifecycle_holds_and_its_line_is_in_order(server: Any, me2b_chaos: Chaos, tmp_path: Path) -> None:
    """A limit that counted tasks and not sandboxes let those that were being made or killed come on top."""
    full = partial(until, lambda: server.live() == 8, "every slot is used", 60)
    taken = crowd(server, tmp_path / "x.db", processes=1, each=200, hold=0.0, until=full, max_concurrent=8)
    assert taken.errors == []
    assert len(taken.rows) == 200
    assert me2b_chaos.journal().peak_present == 8
    assert taken.overtaken(8) == []


@pytest.mark.timeout(240)
def test_four_processes_keep_one_rate_together_and_use_it(server: Any, me2b_chaos: Chaos, tmp_path: Path) -> None:
    rate = 5.0
    taken = crowd(server, tmp_path / "x.db", processes=4, each=13, hold=0.0, create_rate=rate)
    assert taken.errors == []
    sent = taken.sent()
    assert len(sent) == me2b_chaos.journal().count("create") == 52
    assert all(later - first >= 1.0 for first, later in zip(sent, sent[5:], strict=False)), "5 in every second"
    span = sent[-1] - sent[0]
    assert (len(sent) - 1) / (rate * span) >= 0.9
    # What the server saw: the same, but for the way there, which no client can know.
    seen = [request.at for request in me2b_chaos.journal().of("create")]
    assert len(seen) - 1 <= rate * (max(seen) - min(seen) + 1.0)
    assert 1 / (1 + MARGIN) > 0.95, "the margin leaves enough of a rate to be used"


@pytest.mark.timeout(240)
def test_cap_and_rate_hold_together(server: Any, me2b_chaos: Chaos, tmp_path: Path) -> None:
    taken = crowd(server, tmp_path / "x.db", processes=4, each=7, hold=0.5, create_rate=5.0, account_limit=4)
    assert taken.errors == []
    assert me2b_chaos.journal().peak_present <= 4
    sent = taken.sent()
    assert len(sent) == me2b_chaos.journal().count("create") == 28
    assert all(later - first >= 1.0 for first, later in zip(sent, sent[5:], strict=False))


async def test_who_waits_behind_its_own_limit_holds_up_nobody(face: Face) -> None:
    small, other = face.open(max_concurrent=1, account_limit=3), face.open(max_concurrent=3, account_limit=3)
    async with face.entered(small.acquire()):

        async def patient() -> None:
            async with face.entered(small.acquire()):
                pass

        (older,) = in_parallel(face, patient)
        await seen(lambda: small._book.records(states_=[State.QUEUED]), "it is in line")
        async with face.entered(other.acquire(acquire_timeout=20)), face.entered(other.acquire(acquire_timeout=20)):
            with pytest.raises(AcquireTimeoutError, match="account_limit=3 of this account is in use"):
                async with face.entered(other.acquire(acquire_timeout=0.2)):
                    pytest.fail("a fourth one")
            assert not older.done()
    await older
    await assert_nothing_left(small)


async def test_the_error_of_one_who_waited_in_vain_names_who_holds_the_slots(face: Face) -> None:
    eva, otto = (face.open(account_limit=2, label=label) for label in ("eval of Eva", "rollout of Otto"))
    third = face.open(account_limit=2)
    async with face.entered(eva.acquire()) as hers, face.entered(otto.acquire()) as his:
        with pytest.raises(AcquireTimeoutError, match="account_limit=2") as caught:
            async with face.entered(third.acquire(acquire_timeout=0.3)):
                pytest.fail("a third one")
    assert [(one.sandbox_id, one.owner, one.label, one.state) for one in caught.value.holders] == [
        (hers.sandbox_id, eva.owner_id, "eval of Eva", State.RUNNING),
        (his.sandbox_id, otto.owner_id, "rollout of Otto", State.RUNNING),
    ]
    assert all(0 <= one.age < 60 for one in caught.value.holders)
    for word in (hers.sandbox_id, eva.owner_id, "eval of Eva", "rollout of Otto", "running for", "me2b reap"):
        assert word in str(caught.value)


async def test_those_who_leave_the_line_pass_their_turn_on(face: Face) -> None:
    lifecycle = face.open(max_concurrent=1)
    went: list[int] = []

    def waiter(number: int, **options: Any) -> Callable[[], Any]:
        async def wait() -> None:
            async with face.entered(lifecycle.acquire(**options)):
                went.append(number)

        return wait

    tasks = []
    async with face.entered(lifecycle.acquire()):
        for number in range(4):
            # The first and the third give up while the slot is taken.
            tasks += in_parallel(face, waiter(number, acquire_timeout=0.3 if number in (0, 2) else None))
            await seen(lambda: len(lifecycle._book.records()) > len(tasks), "it is in line")  # noqa: B023
        done, _ = await asyncio.wait([tasks[0], tasks[2]])
        assert all(isinstance(task.exception(), AcquireTimeoutError) for task in done)
    await asyncio.gather(tasks[1], tasks[3])
    assert went == [1, 3]
    await assert_nothing_left(lifecycle)


async def test_waiting_asks_the_ledger_rarely_however_many_wait(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = itertools.count()
    for name in ("turn", "look"):
        original = getattr(Ledger, name)

        def counting(*args: Any, _original: Any = original) -> Any:
            next(asked)
            return _original(*args)

        monkeypatch.setattr(Ledger, name, counting)
    holder, lifecycle = face.open(account_limit=1), face.open(account_limit=1, max_concurrent=32)

    async def wait_in_vain() -> None:
        with pytest.raises(AcquireTimeoutError):
            async with face.entered(lifecycle.acquire(acquire_timeout=2)):
                pytest.fail("two at once")

    async with face.entered(holder.acquire()):
        await asyncio.gather(*in_parallel(face, *[wait_in_vain] * 32))
    # Each once when it comes to be the first; and two seconds of the first one's questions, 0.08 seconds apart or more.
    assert next(asked) <= 1 + 2 * 32 + 2 / 0.08
    await assert_nothing_left(lifecycle)


async def test_a_slot_that_comes_free_in_another_process_is_seen(face: Face) -> None:
    first, second = face.open(account_limit=1), face.open(account_limit=1)
    context = first.acquire()
    handle = await settle(context.__aenter__() if face.name == "async" else context.__enter__())

    async def wait() -> str:
        async with face.entered(second.acquire()) as mine:
            return str(mine.sandbox_id)

    (waiting,) = in_parallel(face, wait)
    await seen(lambda: second._book.records(states_=[State.QUEUED]), "it is in line")
    gone = (None, None, None)
    await settle(context.__aexit__(*gone) if face.name == "async" else context.__exit__(*gone))
    assert await waiting != handle.sandbox_id


@pytest.mark.parametrize("limits", [{"max_concurrent": 1}, {"account_limit": 1}], ids=str)
async def test_a_slot_is_free_only_when_its_sandbox_is_proved_dead(
    face: Face, me2b_chaos: Chaos, limits: dict[str, int]
) -> None:
    lifecycle = face.open(**limits)
    me2b_chaos.on("kill").first(3).pretend()
    for _ in range(3):
        async with face.entered(lifecycle.acquire()):
            pass
    assert me2b_chaos.journal().peak_present == 1
    until(lambda: all(row.state is State.CLEANED for row in lifecycle._book.records()), "all are proved dead")


async def test_a_process_that_was_killed_in_line_holds_up_nobody(face: Face, server: Any, me2b_chaos: Chaos) -> None:
    lifecycle = face.open(account_limit=1, max_concurrent=2)
    with contextlib.contextmanager(programs_on)(server, face.db) as programs:
        async with face.entered(lifecycle.acquire()):
            dead = programs.start("entered(opened(account_limit=1, watchdog=False))", face.name)
            await seen(lambda: lifecycle._book.records(states_=[State.QUEUED]), "it is in line")
            dead.kill()
        # Its row is older, and still there. Were its end not seen, it would be waited for as long as it is `PRESENT`.
        assert PRESENT / SECOND > 5
        async with face.entered(lifecycle.acquire(acquire_timeout=5)):
            pass
    assert me2b_chaos.journal().peak_present == 1
