from __future__ import annotations

import threading
import uuid
from typing import TYPE_CHECKING

import pytest

from managed_e2b import State
from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.models import Host
from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.limits import MARGIN, PRESENT, Caps, Go, Wait

if TYPE_CHECKING:
    from .conftest import Clock

HERE = Host("machine", "boot", "pid:[1]")
ACCOUNT = "account"


def owner_of(ledger: Ledger, max_concurrent: int = 9) -> str:
    owner = uuid.uuid4().hex
    ledger.open_owner(owner, HERE, 1, 1, "test", 600 * SECOND, max_concurrent)
    return owner


def queue(ledger: Ledger, owner: str, **metadata: str) -> str:
    ticket = uuid.uuid4().hex
    ledger.enqueue(
        ticket, owner=owner, account=ACCOUNT, source=("template", "base"), timeout=600, lease=300,
        metadata=metadata, sdk_version="1",
    )  # fmt: skip
    return ticket


def started(ledger: Ledger, owner: str) -> str:
    ticket = queue(ledger, owner)
    assert isinstance(ledger.turn(ticket, owner, ACCOUNT, Caps(100)), Go)
    return ticket


def state_of(ledger: Ledger, ticket: str) -> State:
    record = ledger.record(ticket)
    assert record is not None
    return record.state


def test_the_path_of_a_sandbox_is_kept_with_its_times_and_told(ledger: Ledger, clock: Clock) -> None:
    owner = owner_of(ledger)
    ticket = queue(ledger, owner, run="7")
    clock.step(1)
    assert isinstance(ledger.turn(ticket, owner, ACCOUNT, Caps(1)), Go)
    sent = clock.now
    clock.step(1)
    running = ledger.running(ticket, owner, "isandbox", sent_at=sent, remote=300)
    assert running is not None
    assert (running.sandbox_id, running.metadata) == ("isandbox", {"run": "7"})
    assert running.remote_expiry == sent + 300 * SECOND
    assert running.hard_deadline == sent + 600 * SECOND
    clock.step(1)
    assert ledger.claim(ticket, owner, "released") is not None
    clock.step(1)
    done = ledger.cleaned(ticket, owner)
    assert done is not None
    assert (done.state, done.reason, done.ended_at) == (State.CLEANED, "released", clock.now)
    told = [(state, detail) for _, state, _, detail in ledger.history(ticket)]
    assert told == [
        (State.QUEUED, None),
        (State.CREATING, None),
        (State.RUNNING, None),
        (State.CLEANING, "released"),
        (State.CLEANED, None),
    ]


def test_a_swap_that_comes_too_late_changes_nothing(ledger: Ledger) -> None:
    owner = owner_of(ledger)
    ticket = started(ledger, owner)
    assert ledger.claim(ticket, owner, "interrupted") is not None
    assert ledger.running(ticket, owner, "ilate", sent_at=0, remote=1) is None
    assert ledger.create_failed(ticket, owner, "nothing") is not None
    for late in (
        ledger.cleaned(ticket, owner),
        ledger.claim(ticket, owner, "again"),
        ledger.give_up(ticket, owner, "again"),
        ledger.turn(ticket, owner, ACCOUNT, Caps(1)),
    ):
        assert late is None
    assert state_of(ledger, ticket) is State.CREATE_FAILED
    assert len(ledger.history(ticket)) == 4


def test_slots_go_to_the_oldest_and_only_proof_frees_them(ledger: Ledger, clock: Clock) -> None:
    owner = owner_of(ledger)
    first = started(ledger, owner)
    clock.step(1)
    second, third = queue(ledger, owner), ""
    clock.step(1)
    third = queue(ledger, owner)
    assert isinstance(ledger.turn(third, owner, ACCOUNT, Caps(2)), Wait), "the one free slot is the second's"
    assert isinstance(ledger.turn(second, owner, ACCOUNT, Caps(1)), Wait)
    ledger.claim(first, owner, "released")
    assert isinstance(ledger.turn(second, owner, ACCOUNT, Caps(1)), Wait), "cleaning may still run"
    ledger.cleaned(first, owner)
    assert isinstance(ledger.turn(second, owner, ACCOUNT, Caps(1)), Go)


def test_the_account_limit_counts_every_owner_and_max_concurrent_only_ones_own(ledger: Ledger) -> None:
    mine, other = owner_of(ledger), owner_of(ledger)
    started(ledger, other)
    ticket = queue(ledger, mine)
    assert isinstance(ledger.turn(ticket, mine, ACCOUNT, Caps(1, account_limit=1)), Wait)
    assert isinstance(ledger.turn(ticket, mine, ACCOUNT, Caps(1, account_limit=2)), Go)


def test_the_create_rate_is_kept_over_all_owners(ledger: Ledger, clock: Clock) -> None:
    caps = Caps(10, create_rate=2.0)
    a, b = owner_of(ledger), owner_of(ledger)
    first, second = queue(ledger, a), queue(ledger, b)
    assert isinstance(ledger.turn(first, a, ACCOUNT, caps), Go)
    wait = ledger.turn(second, b, ACCOUNT, caps)
    assert isinstance(wait, Wait)
    assert wait.seconds == pytest.approx(0.5, rel=MARGIN, abs=MARGIN)
    clock.step(wait.seconds)
    assert isinstance(ledger.turn(second, b, ACCOUNT, caps), Go)


def test_a_429_holds_all_of_an_account_for_the_time_that_it_names(ledger: Ledger, clock: Clock) -> None:
    mine, other = owner_of(ledger), owner_of(ledger)
    refused = started(ledger, mine)
    clock.step(1)
    ticket = queue(ledger, other)
    row = ledger.refused(refused, ACCOUNT, Caps(9), sent_at=clock.now, wait=3.0, jitter=0.0)
    assert row is not None
    assert (row.state, row.refused_at) == (State.CREATING, clock.now)
    wait = ledger.turn(ticket, other, ACCOUNT, Caps(9))
    assert isinstance(wait, Wait)
    assert wait.seconds == 3
    assert ledger.look(refused, mine, ACCOUNT, Caps(9)) == ledger.turn(refused, mine, ACCOUNT, Caps(9))
    clock.step(3)
    assert isinstance(ledger.turn(ticket, other, ACCOUNT, Caps(9)), Wait), "the refused one is older"
    assert isinstance(ledger.turn(refused, mine, ACCOUNT, Caps(9)), Go)
    assert ledger.turn(refused, mine, ACCOUNT, Caps(9)) is None, "it creates, it is in line no more"
    wait = ledger.turn(ticket, other, ACCOUNT, Caps(9))
    assert isinstance(wait, Wait)
    assert wait.seconds is not None
    clock.step(wait.seconds)
    assert isinstance(ledger.turn(ticket, other, ACCOUNT, Caps(9)), Go)
    ledger.recovered(ACCOUNT, Caps(9), sent_at=clock.now)
    for _ in range(30):
        ledger.recovered(ACCOUNT, Caps(9), sent_at=clock.now)
    assert isinstance(ledger.turn(queue(ledger, other), other, ACCOUNT, Caps(9)), Go), "as fast as before"


def test_a_refusal_of_a_row_that_has_ended_changes_no_row(ledger: Ledger, clock: Clock) -> None:
    owner = owner_of(ledger)
    ticket = started(ledger, owner)
    ledger.claim(ticket, owner, "interrupted")
    assert ledger.refused(ticket, ACCOUNT, Caps(9), sent_at=clock.now, wait=None, jitter=0.0) is None
    assert ledger.turn(ticket, owner, ACCOUNT, Caps(9)) is None


def test_the_oldest_goes_first_over_all_owners(ledger: Ledger, clock: Clock) -> None:
    caps = Caps(9, account_limit=2)
    a, b = owner_of(ledger), owner_of(ledger)
    running = [started(ledger, a), started(ledger, a)]
    tickets = []
    for owner in (a, b, a):
        clock.step(1)
        tickets.append((queue(ledger, owner), owner))
    for ticket, owner in reversed(tickets):
        assert isinstance(ledger.turn(ticket, owner, ACCOUNT, caps), Wait)
    ledger.claim(running[0], a, "released")
    ledger.cleaned(running[0], a)
    (first, second, third) = tickets
    assert isinstance(ledger.turn(second[0], b, ACCOUNT, caps), Wait)
    assert isinstance(ledger.turn(third[0], a, ACCOUNT, caps), Wait)
    assert isinstance(ledger.turn(first[0], a, ACCOUNT, caps), Go)
    ledger.claim(running[1], a, "released")
    ledger.cleaned(running[1], a)
    assert isinstance(ledger.turn(third[0], a, ACCOUNT, caps), Wait)
    assert isinstance(ledger.turn(second[0], b, ACCOUNT, caps), Go)


@pytest.mark.parametrize("why", ["its own max_concurrent", "closed", "asks no more"])
def test_an_older_row_that_cannot_go_holds_nobody_up(ledger: Ledger, clock: Clock, why: str) -> None:
    caps = Caps(9, account_limit=2)
    a, b = owner_of(ledger, max_concurrent=1 if why == "its own max_concurrent" else 9), owner_of(ledger)
    started(ledger, a)
    older, younger = queue(ledger, a), ""
    clock.step(1)
    younger = queue(ledger, b)
    ledger.turn(older, a, ACCOUNT, Caps(1, account_limit=2))  # it is in line, and asks
    if why == "closed":
        ledger.close_owner(a)
    elif why == "asks no more":
        assert isinstance(ledger.turn(younger, b, ACCOUNT, caps), Wait)
        clock.step(PRESENT / SECOND + 1)
    assert isinstance(ledger.turn(younger, b, ACCOUNT, caps), Go)


def test_a_claim_holds_until_its_holder_is_dead(ledger: Ledger) -> None:
    owner, reaper, other = owner_of(ledger), owner_of(ledger), owner_of(ledger)
    ticket = started(ledger, owner)
    assert ledger.claim(ticket, reaper, "its owner is dead") is not None
    assert ledger.claim(ticket, other, "mine") is None
    assert ledger.cleaned(ticket, other) is None
    taken = ledger.claim(ticket, other, "mine", dead={reaper})
    assert taken is not None
    assert taken.claimed_by == other
    assert taken.reason == "its owner is dead", "the first reason stays"


def test_a_closed_owner_beats_no_more(ledger: Ledger, clock: Clock) -> None:
    owner = owner_of(ledger)
    started(ledger, owner)
    clock.step(5)
    assert ledger.beat(owner)
    assert [o.heartbeat for o in ledger.owners_with_open_rows(ACCOUNT)] == [clock.now]
    ledger.close_owner(owner)
    assert not ledger.beat(owner)


def test_one_slot_and_many_threads_that_want_it(ledger: Ledger) -> None:
    owner = owner_of(ledger)
    tickets = [queue(ledger, owner) for _ in range(16)]
    barrier = threading.Barrier(len(tickets))
    went: list[str] = []

    def contend(ticket: str) -> None:
        barrier.wait()
        if isinstance(ledger.turn(ticket, owner, ACCOUNT, Caps(1)), Go):
            went.append(ticket)

    threads = [threading.Thread(target=contend, args=(ticket,)) for ticket in tickets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(went) <= 1
    running = ledger.records(states_=[State.CREATING], owner=owner)
    assert [record.ticket for record in running] == went


def test_the_databases_own_clock_is_used_where_it_has_one(url: str) -> None:
    book = Ledger(open_engine(url))
    first = book.now()
    assert 0 <= book.now() - first < 60 * SECOND
    book.close()


@pytest.mark.parametrize("text", ["plain", "quote ' and \" and ; --", "ünïcödé 🜁", ""])
def test_metadata_comes_back_as_it_was(ledger: Ledger, text: str) -> None:
    owner = owner_of(ledger)
    ticket = queue(ledger, owner, value=text)
    record = ledger.record(ticket)
    assert record is not None
    assert record.metadata == {"value": text}
