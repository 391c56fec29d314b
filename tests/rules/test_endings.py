"""How a sandbox ended, decided from its row and the backend's answer."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_e2b.errors import (
    SandboxExpiredError,
    SandboxGoneError,
    SandboxKilledError,
    SandboxLapsedError,
    SandboxLostError,
    SandboxPausedError,
    SandboxReapedError,
    SandboxReleasedError,
)
from managed_e2b.models import RemoteSandbox, SandboxRecord, State
from managed_e2b.rules import states
from managed_e2b.rules.endings import OWNER_DEAD, Answer, answer_of, judge, recorded
from managed_e2b.rules.leases import SECOND

RECORD = SandboxRecord(
    ticket="t",
    sandbox_id="i1",
    account="a",
    owner="me",
    state=State.RUNNING,
    source_kind="template",
    source="base",
    timeout=3600,
    lease=300,
    hard_deadline=3600 * SECOND,
    remote_expiry=300 * SECOND,
    claimed_by=None,
    claimed_at=None,
    reason=None,
    last_error=None,
    metadata={},
    queued_at=0,
    creating_at=0,
    running_at=0,
    cleaning_at=None,
    ended_at=None,
)


def ended(reason: str | None, by: str | None = "me", state: State = State.CLEANED) -> SandboxRecord:
    return dataclasses.replace(RECORD, state=state, reason=reason, claimed_by=by)


@pytest.mark.parametrize(
    ("seconds", "kind"),
    [
        (28, SandboxLostError),
        (299, SandboxLostError),
        (300, SandboxLapsedError),
        (3599, SandboxLapsedError),
        (3600, SandboxExpiredError),
    ],
)
def test_an_id_that_is_not_there_ended_by_the_time_that_was_over(seconds: int, kind: type[SandboxGoneError]) -> None:
    ending = judge(RECORD, Answer.NOT_FOUND, seconds * SECOND)
    assert ending is not None
    assert ending.kind is kind
    assert ending.reason.partition(":")[0] == kind.ending


def test_what_was_lost_tells_how_long_it_lived() -> None:
    ending = judge(RECORD, Answer.NOT_FOUND, 28 * SECOND)
    assert ending is not None
    assert "after 28.0 of 3600 s" in ending.reason


@given(st.sampled_from([Answer.UNKNOWN, Answer.RUNNING]), st.integers(0, 10_000))
def test_no_answer_and_no_clock_makes_an_open_row_dead(answer: Answer, seconds: int) -> None:
    assert judge(RECORD, answer, seconds * SECOND) is None


def test_paused_is_neither_dead_nor_running() -> None:
    ending = judge(RECORD, Answer.PAUSED, 10_000 * SECOND)
    assert ending is not None
    assert ending.kind is SandboxPausedError


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (ended("released"), SandboxReleasedError),
        (ended("shutdown", by=None), SandboxReleasedError),
        (ended("raised ValueError"), SandboxReleasedError),
        (ended(None), SandboxReleasedError),
        (ended(OWNER_DEAD, by="another"), SandboxReapedError),
        (ended(OWNER_DEAD, by="another", state=State.CLEANING), SandboxReapedError),
        (ended("purged by hand", by="another"), SandboxKilledError),
        (ended("killed: by hand"), SandboxKilledError),
        (ended("lost: it was not there", by="another"), SandboxLostError),
        (ended("expired: its timeout has passed"), SandboxExpiredError),
        (ended("lapsed: late"), SandboxLapsedError),
        (ended("released", by="another"), SandboxReleasedError),
    ],
)
def test_a_row_that_was_ended_tells_by_whom_and_why(record: SandboxRecord, kind: type[SandboxGoneError]) -> None:
    told = recorded(record)
    assert told is not None
    assert told.kind is kind
    for answer in Answer:
        assert judge(record, answer, 0) == told


def test_what_its_holder_let_go_is_released_before_the_row_tells() -> None:
    for answer in Answer:
        told = judge(RECORD, answer, 0, released=True)
        assert told is not None
        assert told.kind is SandboxReleasedError


@pytest.mark.parametrize("state", sorted(set(State) - states.TERMINAL - {State.CLEANING}))
def test_the_ledger_tells_of_no_ending_while_the_row_is_open(state: State) -> None:
    assert recorded(dataclasses.replace(RECORD, state=state)) is None


def test_per_id_answers() -> None:
    found = RemoteSandbox("i1", "base", "running", {}, 0, 0)
    assert answer_of(None) is Answer.NOT_FOUND
    assert answer_of(found) is Answer.RUNNING
    assert answer_of(dataclasses.replace(found, state="paused")) is Answer.PAUSED
    assert answer_of(dataclasses.replace(found, state="migrating")) is Answer.UNKNOWN
