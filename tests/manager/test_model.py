"""Whatever happens to the owners of an account, in whatever order: nothing leaks, and nothing in use is taken away.

Hypothesis makes up the stories: see `world` for what is real in them.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from managed_e2b.errors import Me2bError, SandboxGoneError, SandboxReapedError
from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.models import Host, SandboxRecord, State
from managed_e2b.rules import states
from managed_e2b.testing import Fault
from managed_e2b.testing.provider import Op

from .world import ACCOUNT, ELSEWHERE, HERE, LEASE, LIMIT, STALE, Died, Held, Interrupted, Owner, World

DAYS = 3 * 24 * 3600

LIES = [Fault.LIE, Fault.EMPTY]
CREATE = st.sampled_from([fault for fault in Fault if fault not in LIES])
KILL = st.sampled_from([fault for fault in Fault if fault is not Fault.EMPTY])
LOOK = [fault for fault in Fault if fault not in (*LIES, Fault.ERROR_AFTER, Fault.LOST_AFTER)]
EVENTS = ["dies", "is interrupted", "stands still", "others reap"]
HOSTS = st.sampled_from([HERE, ELSEWHERE])

picks = st.integers(0, 5)
boundaries = st.integers(0, 11)
AFTER_CREATE = 7
"""The boundary of an acquire at which a sandbox has just been made."""


class Story(RuleBasedStateMachine):
    """Owners of one account, their sandboxes, their misfortunes."""

    empty_ledger: Path

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=self.empty_ledger.parent))
        self.world = World(Path(shutil.copy(self.empty_ledger, self.directory / "ledger.db")))
        self.ends: dict[str, SandboxRecord] = {}
        self.seen = 0
        self.lists_lie = False

    @initialize(lists_lie=st.booleans(), where=HOSTS)
    def begin(self, lists_lie: bool, where: Host) -> None:
        # Not both in one story: a list that hides what a lost create has made, together with a clock that jumps past
        # the end of its lease, is more than a ledger can see through.
        self.lists_lie = lists_lie
        for host in (HERE, where):
            self.world.open_owner(host).acquire(500, 20.0)

    # -- what programs do -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.living) < 3)
    @rule(where=HOSTS)
    def somebody_opens_a_lifecycle(self, where: Host) -> None:
        self.world.open_owner(where)

    @rule(
        pick=picks,
        timeout=st.sampled_from([20, LEASE, 500]),
        patience=st.sampled_from([0.5, 20.0, 200.0]),
        fault=st.none() | CREATE,
    )
    def acquires(self, pick: int, timeout: int, patience: float, fault: Fault | None) -> None:
        owner = self.owner(pick)
        self.fail("create", fault)
        self.attempt(owner, lambda: owner.acquire(timeout, patience))

    @rule(
        pick=picks,
        at=boundaries,
        event=st.sampled_from([*EVENTS, "it is killed", "it is paused"]),
        fault=st.none() | CREATE,
    )
    def acquires_and_something_comes_in_between(self, pick: int, at: int, event: str, fault: Fault | None) -> None:
        owner = self.owner(pick)
        self.fail("create", fault)
        owner.after(at, lambda: self.happen(event, owner))
        self.attempt(owner, lambda: owner.acquire(500, 20.0))

    @precondition(lambda self: self.held())
    @rule(pick=picks, fault=st.none() | KILL)
    def leaves(self, pick: int, fault: Fault | None) -> None:
        held = self.pick(self.held(), pick)
        self.fail("kill", fault)
        self.attempt(held.owner, lambda: held.owner.leave(held))

    @precondition(lambda self: self.held())
    @rule(pick=picks, at=boundaries, event=st.sampled_from(EVENTS))
    def leaves_and_something_comes_in_between(self, pick: int, at: int, event: str) -> None:
        held = self.pick(self.held(), pick)
        held.owner.after(at, lambda: self.happen(event, held.owner))
        self.attempt(held.owner, lambda: held.owner.leave(held))

    @precondition(lambda self: self.held())
    @rule(pick=picks)
    def forgets_a_handle(self, pick: int) -> None:
        held = self.pick(self.held(), pick)
        held.owner.drop(held)

    @rule(pick=picks, at=st.none() | boundaries, event=st.sampled_from(EVENTS), fault=st.none() | KILL)
    def reaps(self, pick: int, at: int | None, event: str, fault: Fault | None) -> None:
        owner = self.owner(pick)
        self.fail("kill", fault)
        if at is not None:
            owner.after(at, lambda: self.happen(event, owner))
        self.attempt(owner, owner.reap)

    @rule(pick=picks)
    def reconciles(self, pick: int) -> None:
        owner = self.owner(pick)
        self.attempt(owner, owner.reconcile)

    # -- what happens to them -------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 20, LEASE, STALE + 20, 600]))
    def time_passes(self, seconds: int) -> None:
        self.world.sleep(seconds)

    @rule(pick=picks, where=HOSTS)
    def dies_and_another_one_comes(self, pick: int, where: Host) -> None:
        self.owner(pick).die()
        self.world.open_owner(where)

    @rule(pick=picks, seconds=st.sampled_from([10, LEASE, STALE + 20]))
    def stands_still(self, pick: int, seconds: int) -> None:
        self.owner(pick).stop(seconds)

    @precondition(lambda self: self.world.provider.live)
    @rule(pick=picks, how=st.sampled_from(["kill", "pause"]))
    def somebody_else_ends_or_pauses_one(self, pick: int, how: str) -> None:
        self.harm(self.pick(self.world.provider.live, pick), how)

    @rule(op=st.sampled_from(["info", "set_timeout", "adopt", "list"]), fault=st.sampled_from(LOOK))
    def a_call_will_fail(self, op: Op, fault: Fault) -> None:
        self.world.provider.fail(op, fault)

    @precondition(lambda self: self.lists_lie)
    @rule(fault=st.sampled_from(LIES), times=st.sampled_from([1, 15]))
    def lists_will_lie(self, fault: Fault, times: int) -> None:
        self.world.provider.fail("list", *[fault] * times)

    @precondition(lambda self: not self.lists_lie)
    @rule(by=st.sampled_from([DAYS, -DAYS]))
    def somebody_sets_the_clock(self, by: int) -> None:
        self.world.set_by = by
        # Their keepers beat before anybody looks: on a ledger without a clock of its own a host that has not beaten
        # since the clock was set ahead cannot be told from a dead one.
        for owner in self.world.living:
            owner.round()

    # -- what must hold at all times ------------------------------------------------------------------------

    @invariant()
    def no_more_run_than_the_limit_allows(self) -> None:
        assert self.world.provider.peak_counted <= LIMIT

    @invariant()
    def everything_that_runs_has_an_open_row(self) -> None:
        provider = self.world.provider
        for sandbox_id in {*provider.live, *provider.paused} - provider.late:
            row = self.row_of(sandbox_id)
            assert row is not None
            assert row.state not in states.TERMINAL, f"{sandbox_id} runs and its row is {row}"
            assert row.state is not State.QUEUED

    @invariant()
    def terminal_is_final(self) -> None:
        for row in self.world.book.records(states_=states.TERMINAL, account=ACCOUNT):
            first = self.ends.setdefault(row.ticket, row)
            assert (row.state, row.ended_at, row.reason) == (first.state, first.ended_at, first.reason)

    @invariant()
    def nothing_in_use_is_taken_away(self) -> None:
        """What a living owner holds lives until its own time is over, whatever clocks and other owners say."""
        self.note_calls()
        for held in self.held():
            if held.harmed or self.world.now >= held.until:
                continue
            assert held.sandbox_id in self.world.provider.live, f"{held.sandbox_id} of {held.owner.name} is gone"
            row = self.world.book.record(held.ticket)
            assert row is not None
            assert (row.state, row.claimed_by) == (State.RUNNING, None)

    def teardown(self) -> None:
        """At last everybody dies, one in the middle of a create, and one process that comes later ends it all."""
        try:
            if self.world.owners:
                self.everything_is_repaired()
        finally:
            self.world.close()
            shutil.rmtree(self.directory)

    def everything_is_repaired(self) -> None:
        world = self.world
        world.provider.calm()
        last = world.open_owner(HERE)
        last.after(AFTER_CREATE, last.die)
        self.attempt(last, lambda: last.acquire(500, 0.5))
        for owner in world.living:
            owner.die()
        reaper = world.open_owner(HERE)
        reaper.reap(max_iter=3)
        hosts = {owner.name: owner.host for owner in world.owners}
        rows = [self.row_of(sandbox_id) for sandbox_id in set(world.provider.live) - world.provider.late]
        assert {hosts[row.claimed_by or row.owner] for row in rows} <= {ELSEWHERE}, "what died on this host, at once"
        world.clock.step(STALE + 1)
        world.set_by = 2 * DAYS  # what a clock that was set back has put off
        reaper.reap(max_iter=3)
        left = world.book.records(states_=set(State) - states.TERMINAL, account=ACCOUNT)
        assert [row for row in left if row.state is not State.PAUSED and row.sandbox_id is not None] == []
        world.sleep(LEASE + 60)
        reaper.reconcile()
        left = world.book.records(states_=set(State) - states.TERMINAL, account=ACCOUNT)
        assert [row for row in left if row.state is not State.PAUSED] == []
        assert world.provider.live == []
        assert {self.row_of(sandbox_id).state for sandbox_id in world.provider.paused} <= {State.PAUSED}
        self.terminal_is_final()

    # -- inside ---------------------------------------------------------------------------------------------

    def pick(self, some: Any, number: int) -> Any:
        return some[number % len(some)]

    def owner(self, number: int) -> Owner:
        found: Owner = self.pick(self.world.living, number)
        return found

    def held(self) -> list[Held]:
        return [held for owner in self.world.living for held in owner.held]

    def row_of(self, sandbox_id: str) -> Any:
        found = self.world.provider.look(sandbox_id)
        assert found is not None
        return self.world.book.record(found.metadata["me2b_ticket"])

    def attempt(self, owner: Owner, act: Callable[[], object]) -> None:
        """What a program tries: it may fail, in the ways that are documented, and it may not get to its end."""
        try:
            act()
        except Died:
            assert owner.dead
        except Interrupted:
            pass
        except SandboxGoneError:
            assert owner.stood_still, "somebody ended the row of an owner that has always shown life"
        except Me2bError:
            pass
        finally:
            owner.undisturbed()
            gc.collect()

    def happen(self, event: str, owner: Owner) -> None:
        match event:
            case "dies":
                owner.die()
                self.world.open_owner(owner.host)
            case "is interrupted":
                owner.interrupt()
            case "stands still":
                owner.stop(STALE + 20)
            case "others reap":
                for other in self.world.living:
                    if other is not owner:
                        self.attempt(other, other.reap)
            case "it is killed" | "it is paused":
                live = self.world.provider.live
                if live:
                    self.harm(live[-1], "kill" if event == "it is killed" else "pause")

    def fail(self, op: Op, fault: Fault | None) -> None:
        if fault is not None:
            self.world.provider.fail(op, fault)

    def harm(self, sandbox_id: str, how: str) -> None:
        if how == "pause" and self.lists_lie and self.row_of(sandbox_id).sandbox_id is None:
            return  # it would have no end, and nobody could find it: only `reconcile` with a better list
        getattr(self.world.provider, how)(sandbox_id)
        self.world.harmed.add(sandbox_id)

    def note_calls(self) -> None:
        """Renewals that failed, or that wait because the endpoint said 429: such a lease may lapse."""
        world = self.world
        calls = world.provider.calls[self.seen :]
        self.seen += len(calls)
        for call in calls:
            if call.op == "set_timeout" and call.sandbox_id is not None and call.fault is not None:
                world.harmed.add(call.sandbox_id)
            if call.fault is Fault.RATE_LIMITED:
                for owner in world.owners:
                    world.harmed |= world.running_of(owner) if owner.name == call.by else set()


@pytest.mark.timeout(300)
def test_nothing_leaks_and_nothing_in_use_is_taken_away(tmp_path: Path) -> None:
    Story.empty_ledger = tmp_path / "empty.db"
    Ledger(open_engine(Story.empty_ledger)).close()
    run_state_machine_as_test(
        Story,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "ledger.db")
    yield world
    world.close()


@pytest.mark.parametrize("seconds", [STALE + 20, STALE + LEASE + 120], ids=["it is looked for", "its row has ended"])
def test_a_create_that_is_sent_after_its_owner_was_taken_for_dead_is_ended_at_once(world: World, seconds: int) -> None:
    reaper, sleeper = world.open_owner(HERE), world.open_owner(ELSEWHERE)
    sleeper.leave(sleeper.acquire(500, 20.0))
    boundary = sleeper.steps.seen.index("before create")
    assert sleeper.steps.seen[AFTER_CREATE] == "after create"

    def stand_still() -> None:
        sleeper.suspended = sleeper.stood_still = True
        world.sleep(STALE + 20)
        assert [item.action for item in reaper.reap().items] == ["pending"]
        world.sleep(seconds - STALE)
        sleeper.suspended = False

    sleeper.after(boundary, stand_still)
    with pytest.raises(SandboxReapedError):
        sleeper.acquire(500, 20.0)
    assert [call.op for call in world.provider.calls].count("create") == 2
    assert world.provider.live == []
    world.sleep(LEASE)
    assert {row.state for row in world.book.records()} <= states.TERMINAL


def test_an_owner_that_wakes_and_acquires_before_its_next_beat_keeps_what_it_gets(world: World) -> None:
    reaper, sleeper = world.open_owner(HERE), world.open_owner(ELSEWHERE)
    sleeper.suspended = True
    world.sleep(STALE + 20)
    sleeper.suspended = False
    held = sleeper.acquire(500, 20.0)
    assert reaper.reap().items == ()
    assert world.provider.live == [held.sandbox_id]
    sleeper.leave(held)
