"""`LedgerConformance`: what every ledger must do, whatever database it is in."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ..ledger import Ledger
from ..models import Host, State
from ..rules import states
from ..rules.leases import SECOND
from ..rules.limits import MARGIN, PRESENT, Caps, Go, Wait
from .clock import SteppedClock

HERE = Host("machine", "boot", "pid:[1]")
ACCOUNT = "account"


class LedgerConformance:
    """Tests that a ledger passes or is none. Subclass it in a test module and say how to open the ledger::

        pytest_plugins = ["managed_e2b.testing.fixtures"]      # in conftest.py

        class TestMyDatabase(LedgerConformance):
            @pytest.fixture
            def open_ledger(self, my_url, stepped_clock):
                return lambda: Ledger(open_engine(my_url), stepped_clock)

    `open_ledger` opens the same ledger, empty at the start of each test, as often as it is called, on `stepped_clock`.
    """

    @pytest.fixture
    def clock(self, stepped_clock: SteppedClock) -> SteppedClock:
        """The clock of the ledger under test."""
        return stepped_clock

    @pytest.fixture
    def open_ledger(self) -> Callable[[], Ledger]:
        """Override this one."""
        raise NotImplementedError("a subclass of LedgerConformance has a fixture open_ledger")

    @pytest.fixture
    def ledger(self, open_ledger: Callable[[], Ledger]) -> Iterator[Ledger]:
        """The ledger under test."""
        opened = open_ledger()
        yield opened
        opened.close()

    @pytest.fixture
    def another(self, open_ledger: Callable[[], Ledger]) -> Iterator[Ledger]:
        """The same ledger, as another process has it open."""
        opened = open_ledger()
        yield opened
        opened.close()

    def test_the_path_of_a_sandbox_is_kept_with_its_times_and_told(self, ledger: Ledger, clock: SteppedClock) -> None:
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
        ledger.identified(ticket, "the template's id", "0.6.13")
        clock.step(1)
        assert ledger.claim(ticket, owner, "released") is not None
        clock.step(1)
        done = ledger.cleaned(ticket, owner)
        assert done is not None
        assert (done.source, done.template_id, done.envd_version) == ("base", "the template's id", "0.6.13")
        assert done.sdk_version == "1"
        assert (done.state, done.reason, done.ended_at) == (State.CLEANED, "released", clock.now)
        told = [(state, detail) for _, state, _, detail in ledger.history(ticket)]
        assert told == [
            (State.QUEUED, None),
            (State.CREATING, None),
            (State.RUNNING, None),
            (State.CLEANING, "released"),
            (State.CLEANED, None),
        ]

    def test_a_swap_that_comes_too_late_changes_nothing(self, ledger: Ledger) -> None:
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

    def test_slots_go_to_the_oldest_and_only_proof_frees_them(self, ledger: Ledger, clock: SteppedClock) -> None:
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

    def test_the_account_limit_counts_every_owner_and_max_concurrent_only_ones_own(self, ledger: Ledger) -> None:
        mine, other = owner_of(ledger), owner_of(ledger)
        started(ledger, other)
        ticket = queue(ledger, mine)
        assert isinstance(ledger.turn(ticket, mine, ACCOUNT, Caps(1, account_limit=1)), Wait)
        assert isinstance(ledger.turn(ticket, mine, ACCOUNT, Caps(1, account_limit=2)), Go)

    def test_the_create_rate_is_kept_over_all_owners(self, ledger: Ledger, clock: SteppedClock) -> None:
        caps = Caps(10, create_rate=2.0)
        a, b = owner_of(ledger), owner_of(ledger)
        first, second = queue(ledger, a), queue(ledger, b)
        assert isinstance(ledger.turn(first, a, ACCOUNT, caps), Go)
        wait = ledger.turn(second, b, ACCOUNT, caps)
        assert isinstance(wait, Wait)
        assert wait.seconds == pytest.approx(0.5, rel=MARGIN, abs=MARGIN)
        assert wait.seconds is not None
        clock.step(wait.seconds)
        assert isinstance(ledger.turn(second, b, ACCOUNT, caps), Go)

    def test_a_429_holds_all_of_an_account_for_the_time_it_names(self, ledger: Ledger, clock: SteppedClock) -> None:
        mine, other = owner_of(ledger), owner_of(ledger)
        refused = started(ledger, mine)
        clock.step(1)
        ticket = queue(ledger, other)
        row = ledger.refused(refused, ACCOUNT, Caps(9), sent_at=clock.now, wait=3.0, jitter=0.0)
        assert row is not None
        assert (row.state, row.refused_at) == (State.CREATING, clock.now)
        wait = ledger.turn(ticket, other, ACCOUNT, Caps(9))
        assert isinstance(wait, Wait)
        assert wait.seconds is not None
        assert wait.seconds >= 3, "the one that was refused goes before it"
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

    def test_a_refusal_of_a_row_that_has_ended_changes_no_row(self, ledger: Ledger, clock: SteppedClock) -> None:
        owner = owner_of(ledger)
        ticket = started(ledger, owner)
        ledger.claim(ticket, owner, "interrupted")
        assert ledger.refused(ticket, ACCOUNT, Caps(9), sent_at=clock.now, wait=None, jitter=0.0) is None
        assert ledger.turn(ticket, owner, ACCOUNT, Caps(9)) is None

    def test_the_oldest_goes_first_over_all_owners(self, ledger: Ledger, clock: SteppedClock) -> None:
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
    def test_an_older_row_that_cannot_go_holds_nobody_up(self, ledger: Ledger, clock: SteppedClock, why: str) -> None:
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

    def test_a_claim_holds_until_its_holder_is_dead(self, ledger: Ledger) -> None:
        owner, reaper, other = owner_of(ledger), owner_of(ledger), owner_of(ledger)
        ticket = started(ledger, owner)
        assert ledger.claim(ticket, reaper, "its owner is dead") is not None
        assert ledger.claim(ticket, other, "mine") is None
        assert ledger.cleaned(ticket, other) is None
        taken = ledger.claim(ticket, other, "mine", dead={reaper})
        assert taken is not None
        assert taken.claimed_by == other
        assert taken.reason == "its owner is dead", "the first reason stays"

    def test_a_row_is_taken_over_only_while_the_owner_that_was_judged_is_silent(
        self, ledger: Ledger, clock: SteppedClock
    ) -> None:
        owner, reaper = owner_of(ledger), owner_of(ledger)
        waiting, making = queue(ledger, owner), started(ledger, owner)
        (judged,) = ledger.known_owners([owner])
        clock.step(1)
        assert ledger.beat(owner)
        for ticket in (waiting, making):
            before = ledger.record(ticket)
            assert ledger.take_over(ticket, reaper, "its owner is dead", judged) is None
            assert ledger.record(ticket) == before
        (judged,) = ledger.known_owners([owner])
        taken = ledger.take_over(making, reaper, "its owner is dead", judged)
        assert taken is not None
        assert (taken.state, taken.claimed_by, taken.reason) == (State.CLEANING, reaper, "its owner is dead")
        dropped = ledger.take_over(waiting, reaper, "its owner is dead", judged)
        assert dropped is not None
        assert (dropped.state, dropped.ended_at) == (State.CLEANED, clock.now)

    def test_a_claim_is_taken_over_from_the_cleaner_not_from_the_owner(self, ledger: Ledger) -> None:
        owner, cleaner, reaper = owner_of(ledger), owner_of(ledger), owner_of(ledger)
        ticket = started(ledger, owner)
        by_id = {found.id: found for found in ledger.known_owners([owner, cleaner])}
        assert ledger.take_over(ticket, reaper, "dead", by_id[cleaner]) is None, "it has nothing to do with the row"
        assert ledger.claim(ticket, cleaner, "released") is not None
        assert ledger.take_over(ticket, reaper, "dead", by_id[owner]) is None, "the cleaner lives, and is at it"
        taken = ledger.take_over(ticket, reaper, "dead", by_id[cleaner])
        assert taken is not None
        assert (taken.claimed_by, taken.reason) == (reaper, "released"), "the first reason stays"

    def test_a_closed_owner_beats_no_more(self, ledger: Ledger, clock: SteppedClock) -> None:
        owner = owner_of(ledger)
        started(ledger, owner)
        clock.step(5)
        assert ledger.beat(owner)
        assert [o.heartbeat for o in ledger.owners_with_open_rows(ACCOUNT)] == [clock.now]
        ledger.close_owner(owner)
        assert not ledger.beat(owner)

    def test_one_slot_and_many_threads_that_want_it(self, ledger: Ledger) -> None:
        owner = owner_of(ledger)
        tickets = [queue(ledger, owner) for _ in range(16)]
        went: list[str] = []

        def contend(ticket: str) -> None:
            if isinstance(ledger.turn(ticket, owner, ACCOUNT, Caps(1)), Go):
                went.append(ticket)

        at_once([partial(contend, ticket) for ticket in tickets])
        assert len(went) <= 1
        running = ledger.records(states_=[State.CREATING], owner=owner)
        assert [record.ticket for record in running] == went

    @pytest.mark.parametrize("text", ["plain", "quote ' and \" and ; --", "ünïcödé 🜁", ""])
    def test_metadata_comes_back_as_it_was(self, ledger: Ledger, text: str) -> None:
        owner = owner_of(ledger)
        ticket = queue(ledger, owner, value=text)
        record = ledger.record(ticket)
        assert record is not None
        assert record.metadata == {"value": text}

    def test_what_one_process_has_written_another_reads(self, ledger: Ledger, another: Ledger) -> None:
        owner = owner_of(ledger)
        ticket = started(ledger, owner)
        assert another.record(ticket) == ledger.record(ticket)
        assert [found.id for found in another.known_owners([owner, "nobody"])] == [owner]
        assert another.running(ticket, owner, "isandbox", sent_at=0, remote=300) is not None
        assert [record.sandbox_id for record in ledger.records(owner=owner)] == ["isandbox"]
        assert [record.ticket for record in ledger.known([], ["isandbox", "inone"])] == [ticket]
        assert ledger.history(ticket) == another.history(ticket)

    def test_one_row_and_many_reapers_that_want_it(self, ledger: Ledger, another: Ledger) -> None:
        owner = owner_of(ledger)
        reapers = [owner_of(ledger) for _ in range(8)]
        for _ in range(4):
            ticket = started(ledger, owner)
            got: list[str] = []

            def contend(number: int, ticket: str = ticket, got: list[str] = got) -> None:
                book = (ledger, another)[number % 2]
                if book.claim(ticket, reapers[number], "its owner is dead") is not None:
                    got.append(reapers[number])

            at_once([partial(contend, number) for number in range(len(reapers))])
            assert len(got) == 1
            record = ledger.record(ticket)
            assert record is not None
            assert record.claimed_by == got[0]

    @pytest.mark.parametrize("end", ["cleaned", "create_failed", "given up"])
    def test_an_end_is_final(self, ledger: Ledger, end: str) -> None:
        owner = owner_of(ledger)
        ticket = queue(ledger, owner) if end == "given up" else started(ledger, owner)
        if end == "given up":
            assert ledger.give_up(ticket, owner, "gave up") is not None
        else:
            assert ledger.claim(ticket, owner, "released") is not None
            proved = ledger.cleaned(ticket, owner) if end == "cleaned" else ledger.create_failed(ticket, owner, "no")
            assert proved is not None
        ended = ledger.record(ticket)
        assert ended is not None
        assert ended.state in states.TERMINAL
        for late in (
            ledger.turn(ticket, owner, ACCOUNT, Caps(9)),
            ledger.running(ticket, owner, "ilate", sent_at=0, remote=300),
            ledger.claim(ticket, owner, "again", dead={owner}),
            ledger.cleaned(ticket, owner),
            ledger.create_failed(ticket, owner, "again"),
            ledger.give_up(ticket, owner, "again"),
            ledger.take_over(ticket, owner, "again", ledger.known_owners([owner])[0]),
        ):
            assert late is None
        assert state_of(ledger, ticket) is ended.state


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


def at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls, each in a thread of its own, started together. Raises what one of them raised."""
    barrier = threading.Barrier(len(calls))

    def start(call: Callable[[], None]) -> None:
        barrier.wait()
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(start, call) for call in calls]:
            future.result()
