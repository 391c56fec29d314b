"""Whose sandboxes may be ended by somebody else: example by example, and over whatever a ledger and a list may say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_e2b import ValidationError
from managed_e2b.models import RemoteSandbox, SandboxRecord, State
from managed_e2b.rules import states
from managed_e2b.rules.cleanup import EVERY, OWNER, TICKET, Due, Kind, Want, backend_now, due, judge, purgeable, wanted
from managed_e2b.rules.leases import SECOND

ME, LIVING, DEAD, GHOST = "me", "living", "dead", "ghost"
NOW = 10_000 * SECOND

ROW = SandboxRecord(
    ticket="t1", sandbox_id="s1", account="a", owner=DEAD, state=State.RUNNING, source_kind="template", source="base",
    timeout=3600, lease=300, hard_deadline=None, remote_expiry=None, claimed_by=None, claimed_at=None, reason=None,
    last_error=None, metadata={"run": "7"}, queued_at=NOW - 100 * SECOND, creating_at=NOW - 90 * SECOND,
    running_at=None, cleaning_at=None, ended_at=None,
)  # fmt: skip
LISTED = RemoteSandbox("s1", "tpl-1", "running", {"run": "7"}, NOW - 90 * SECOND, NOW + 90 * SECOND, alias="base")


def row(**changes: Any) -> SandboxRecord:
    return dataclasses.replace(ROW, **changes)


def listed(*, ticket: str | None = None, owner: str | None = None, **changes: Any) -> RemoteSandbox:
    marks = {name: value for name, value in ((TICKET, ticket), (OWNER, owner)) if value is not None}
    return dataclasses.replace(LISTED, **{"metadata": {**LISTED.metadata, **marks}, **changes})


def decide(record: SandboxRecord, want: Want = EVERY) -> Due | None:
    found = due([record], {DEAD}, ME, want, NOW)
    return found[0] if found else None


# -- rows ---------------------------------------------------------------------------------------------------

OPEN = [State.QUEUED, State.CREATING, State.RUNNING, State.CLEANING]


@pytest.mark.parametrize("state", OPEN)
def test_rows_of_a_dead_owner_are_due(state: State) -> None:
    decision = decide(row(state=state))
    assert decision is not None
    assert (decision.holder, decision.kept) == (DEAD, None)
    assert DEAD in decision.why


@pytest.mark.parametrize("owner", [LIVING, ME])
@pytest.mark.parametrize("state", list(State))
def test_rows_of_a_living_owner_are_not(state: State, owner: str) -> None:
    assert decide(row(state=state, owner=owner)) is None


def test_a_row_that_a_living_reaper_is_at_is_left_to_it() -> None:
    assert decide(row(state=State.CLEANING, claimed_by=LIVING)) is None


def test_a_claim_whose_holder_died_is_taken_over_also_when_the_owner_lives() -> None:
    decision = decide(row(state=State.CLEANING, owner=LIVING, claimed_by=DEAD))
    assert decision is not None
    assert decision.holder == DEAD


def test_what_an_earlier_pass_of_mine_took_is_gone_on_with() -> None:
    decision = decide(row(state=State.CLEANING, claimed_by=ME))
    assert decision is not None
    assert decision.holder == ME


def test_what_was_paused_on_purpose_outlives_its_owner() -> None:
    decision = decide(row(state=State.PAUSED))
    assert decision is not None
    assert decision.kept is not None


def test_a_cleanup_that_was_begun_is_finished_though_the_sandbox_was_paused() -> None:
    decision = decide(row(state=State.CLEANING, claimed_by=DEAD, running_at=NOW))
    assert decision is not None
    assert decision.kept is None


def test_what_failed_before_comes_after_what_was_never_tried() -> None:
    tried = row(ticket="t0", state=State.CLEANING, claimed_by=DEAD, claimed_at=NOW, queued_at=0)
    assert [item.record.ticket for item in due([tried, ROW], {DEAD}, ME, EVERY, NOW)] == ["t1", "t0"]


@pytest.mark.parametrize(
    ("want", "meant"),
    [
        (Want({"run": "7"}), True),
        (Want({"run": "8"}), False),
        (Want({"run": "7", "more": "x"}), False),
        (Want(template="base"), True),
        (Want(template="other"), False),
        (Want(older_than=90), True),
        (Want(older_than=91), False),
        (Want({"run": "7"}, "base", 91), False),
    ],
    ids=str,
)
def test_filters_narrow_rows_and_listed_sandboxes_alike(want: Want, meant: bool) -> None:
    assert (decide(ROW, want) is not None) == meant
    assert want.listed(LISTED, NOW) == meant


def test_a_template_is_meant_by_its_id_too() -> None:
    assert Want(template="tpl-1").listed(LISTED, NOW)


# -- a listed sandbox ---------------------------------------------------------------------------------------

OWNERS = {ME: True, LIVING: True, DEAD: False}


@pytest.mark.parametrize(
    ("sandbox", "by_id", "by_ticket", "kind"),
    [
        (listed(ticket="t1", owner=LIVING), row(owner=LIVING), row(owner=LIVING), Kind.TRACKED),
        (listed(), row(owner=LIVING), None, Kind.TRACKED),  # a list that leaves the metadata out
        (listed(ticket="t1", owner=DEAD), ROW, ROW, Kind.TRACKED),  # the reaper's, not the purge's
        (listed(ticket="t1", owner=ME), row(owner=ME, state=State.CLEANED), None, Kind.LEFT),
        (listed(ticket="t1", owner=LIVING), None, row(owner=LIVING, state=State.CLEANED), Kind.LEFT),
        (listed(ticket="t1"), None, row(state=State.CREATE_FAILED, sandbox_id=None), Kind.LEFT),
        (listed(ticket="t1"), None, row(state=State.CREATING, sandbox_id=None), Kind.TRACKED),
        (listed(ticket="t1"), None, row(sandbox_id="s2", owner=LIVING), Kind.HELD),
        (listed(ticket="t1"), None, row(sandbox_id="s2", owner=ME), Kind.LEFT),
        (listed(ticket="t1"), None, row(sandbox_id="s2", owner=DEAD), Kind.LEFT),
        (listed(ticket="t9", owner=LIVING), None, None, Kind.HELD),
        (listed(ticket="t9", owner=DEAD), None, None, Kind.LEFT),
        (listed(ticket="t9", owner=GHOST), None, None, Kind.OTHER_LEDGER),
        (listed(ticket="t9"), None, None, Kind.OTHER_LEDGER),
        (listed(owner=GHOST), None, None, Kind.OTHER_LEDGER),
        (listed(), None, None, Kind.FOREIGN),
    ],
)
def test_what_a_listed_sandbox_is(
    sandbox: RemoteSandbox, by_id: SandboxRecord | None, by_ticket: SandboxRecord | None, kind: Kind
) -> None:
    assert judge(sandbox, by_id, by_ticket, OWNERS, ME).kind is kind


@pytest.mark.parametrize("kind", list(Kind))
def test_only_what_nobody_known_can_use_is_purged(kind: Kind) -> None:
    assert purgeable(kind, include_other_ledgers=False) == (kind in (Kind.LEFT, Kind.FOREIGN))
    assert purgeable(kind, include_other_ledgers=True) == (kind in (Kind.LEFT, Kind.FOREIGN, Kind.OTHER_LEDGER))


# -- the backend's clock ------------------------------------------------------------------------------------


def test_a_clock_that_is_days_ahead_makes_no_sandbox_old() -> None:
    now = backend_now([LISTED], NOW + 3 * 86_400 * SECOND)
    assert now == LISTED.end_at
    assert not Want(older_than=3600).listed(LISTED, now)


def test_a_clock_that_is_behind_makes_no_sandbox_younger_than_the_newest() -> None:
    older = dataclasses.replace(LISTED, sandbox_id="s0", started_at=NOW - 5000 * SECOND)
    now = backend_now([older, LISTED], NOW - 3 * 86_400 * SECOND)
    assert now == LISTED.started_at
    assert Want(older_than=3600).listed(older, now)


def test_what_is_paused_says_nothing_of_the_time() -> None:
    assert backend_now([dataclasses.replace(LISTED, state="paused", end_at=0)], NOW) == NOW
    assert backend_now([], NOW) == NOW


@given(
    skew=st.integers(-(10**12), 10**12),
    lives=st.lists(st.tuples(st.integers(0, 10**11), st.integers(0, 10**11)), max_size=20),
)
def test_an_age_is_never_more_than_the_true_one_by_more_than_the_youngest_lease(
    skew: int, lives: list[tuple[int, int]]
) -> None:
    true_now = 10**13
    boxes = [
        dataclasses.replace(LISTED, sandbox_id=str(n), started_at=true_now - lived, end_at=true_now + left)
        for n, (lived, left) in enumerate(lives)
    ]
    now = backend_now(boxes, true_now + skew)
    if boxes:
        assert max(box.started_at for box in boxes) <= now <= min(box.end_at for box in boxes)
    if skew == 0:
        assert now == true_now


# -- over all that can be -----------------------------------------------------------------------------------

names = st.sampled_from([ME, LIVING, DEAD, GHOST])
known = st.sampled_from([ME, LIVING, DEAD])


@st.composite
def records(draw: st.DrawFn) -> SandboxRecord:
    state = draw(st.sampled_from(list(State)))
    claimed_by = draw(st.none() | known) if state is State.CLEANING or state in states.TERMINAL else None
    has_id = state in (State.RUNNING, State.PAUSED, State.CLEANED) or (state is State.CLEANING and draw(st.booleans()))
    return row(
        ticket=draw(st.sampled_from(["t1", "t2", "t3"])),
        sandbox_id=draw(st.sampled_from(["s1", "s2", "s3"])) if has_id else None,
        owner=draw(known), state=state, claimed_by=claimed_by, claimed_at=NOW if claimed_by else None,
        queued_at=draw(st.integers(0, NOW)),
    )  # fmt: skip


@given(st.lists(records(), max_size=8), st.sets(st.sampled_from([LIVING, DEAD])))
def test_nothing_that_a_living_owner_or_cleaner_has_is_ever_due(rows: list[SandboxRecord], dead: set[str]) -> None:
    for item in due(rows, dead, ME, EVERY, NOW):
        record = item.record
        assert record.state not in states.TERMINAL
        assert item.holder in dead or (item.holder == ME and record.owner in dead)
        if record.state is State.CLEANING:
            assert record.claimed_by in dead or record.claimed_by == ME or record.owner in dead
        else:
            assert record.owner in dead
        assert (item.kept is not None) == (record.state is State.PAUSED)


@given(st.lists(records(), max_size=8), st.sets(st.sampled_from([LIVING, DEAD])))
def test_everything_that_only_the_dead_have_is_due_once(rows: list[SandboxRecord], dead: set[str]) -> None:
    found = [item.record for item in due(rows, dead, ME, EVERY, NOW)]
    for record in rows:
        holders = {record.owner} if record.claimed_by is None else {record.claimed_by}
        if record.state not in states.TERMINAL and holders <= dead:
            assert found.count(record) == rows.count(record)


@given(
    sandbox_id=st.sampled_from(["s1", "s2", "s3"]),
    ticket=st.none() | st.sampled_from(["t1", "t2", "t3", "t9"]),
    owner=st.none() | names,
    rows=st.lists(records(), max_size=6, unique_by=(lambda r: r.ticket, lambda r: r.sandbox_id or r.ticket)),
    alive=st.fixed_dictionaries({ME: st.just(True), LIVING: st.just(True), DEAD: st.booleans()}),
)
def test_no_listed_sandbox_of_a_living_owner_of_this_ledger_is_ever_purged(
    sandbox_id: str, ticket: str | None, owner: str | None, rows: list[SandboxRecord], alive: Mapping[str, bool]
) -> None:
    by_id = next((record for record in rows if record.sandbox_id == sandbox_id), None)
    by_ticket = next((record for record in rows if record.ticket == ticket), None)
    made = judge(listed(sandbox_id=sandbox_id, ticket=ticket, owner=owner), by_id, by_ticket, alive, ME)
    if not purgeable(made.kind, include_other_ledgers=True):
        return
    in_use = [record for record in rows if record.state not in states.TERMINAL and alive[record.owner]]
    assert sandbox_id not in [record.sandbox_id for record in in_use]
    answered = [record for record in in_use if record.ticket == ticket]
    assert by_id is not None or all(record.owner == ME and record.sandbox_id for record in answered)
    if by_id is None and by_ticket is None:
        assert not alive.get(owner or "", False)
        assert made.kind is not Kind.FOREIGN or (ticket is None and owner is None)


# -- what may be asked for ----------------------------------------------------------------------------------


def asked(**changes: Any) -> Want:
    values = {
        "metadata": None, "template": None, "older_than": None, "purge_foreign": True, "include_other_ledgers": False,
        "lease": 300,
    } | changes  # fmt: skip
    return wanted(values.pop("metadata"), values.pop("template"), values.pop("older_than"), **values)


def test_no_filter_is_every_sandbox() -> None:
    assert asked() == EVERY


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": {"run": 7}},
        {"metadata": "run=7"},
        {"template": ""},
        {"template": 5},
        {"older_than": -1},
        {"older_than": math.nan},
        {"older_than": math.inf},
        {"older_than": "1h"},
        {"older_than": True},
        {"include_other_ledgers": True},
        {"include_other_ledgers": True, "older_than": 299},
        {"include_other_ledgers": True, "older_than": 300, "purge_foreign": False},
    ],
    ids=str,
)
def test_what_makes_no_sense_or_is_too_much_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"^reap\("):
        asked(**wrong)


def test_other_ledgers_are_reached_by_saying_so_twice() -> None:
    assert asked(include_other_ledgers=True, older_than=300) == Want(older_than=300)
