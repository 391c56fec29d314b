from __future__ import annotations

import dataclasses
import random
import uuid
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from managed_e2b import SandboxRecord, State
from managed_e2b.rules import leases
from managed_e2b.rules.leases import SECOND

RECORD = SandboxRecord(
    ticket="t", sandbox_id="i", account="a", owner="o", state=State.RUNNING, source_kind="template", source="base",
    timeout=3600, lease=300, hard_deadline=3600 * SECOND, remote_expiry=300 * SECOND, claimed_by=None, claimed_at=None,
    reason=None, last_error=None, metadata={}, queued_at=0,
    creating_at=0, running_at=0, cleaning_at=None, ended_at=None,
)  # fmt: skip


def test_the_backend_gets_the_lease_and_never_more_than_the_hard_limit() -> None:
    assert leases.first_timeout(3600, 300) == 300
    assert leases.first_timeout(60, 300) == 60


def test_a_renewal_is_due_at_half_the_lease() -> None:
    assert leases.renewal(RECORD, 149 * SECOND) is None
    assert leases.renewal(RECORD, 150 * SECOND) == 300


def test_a_clock_that_was_set_back_does_not_put_a_renewal_off() -> None:
    assert leases.renewal(RECORD, -3600 * SECOND) == 300


def test_the_last_renewal_ends_at_the_hard_deadline() -> None:
    record = dataclasses.replace(RECORD, remote_expiry=3500 * SECOND)
    assert leases.renewal(record, 3400 * SECOND) == 200
    assert leases.renewal(dataclasses.replace(RECORD, remote_expiry=3600 * SECOND), 3590 * SECOND) is None


@given(timeout=st.integers(1, 86_400), lease=st.integers(10, 3600), step=st.integers(1, 100))
def test_a_live_owner_never_loses_a_sandbox_early_and_never_keeps_it_late(timeout: int, lease: int, step: int) -> None:
    deadline = timeout * SECOND
    record = dataclasses.replace(
        RECORD, timeout=timeout, lease=lease, hard_deadline=deadline,
        remote_expiry=leases.first_timeout(timeout, lease) * SECOND,
    )  # fmt: skip
    beat = int(min(leases.beat_interval(lease, 600), step) * SECOND)
    now = 0
    while now < min(deadline, 50 * lease * SECOND):
        assert record.remote_expiry is not None
        assert record.remote_expiry > now, "alive at every beat before its deadline"
        if (seconds := leases.renewal(record, now)) is not None:
            record = dataclasses.replace(record, remote_expiry=now + seconds * SECOND)
        assert record.remote_expiry is not None
        assert record.remote_expiry <= deadline + SECOND, "whole seconds: at most one more than the hard limit"
        now += beat


def test_an_unanswered_create_is_believed_dead_only_after_its_timeout_and_a_margin() -> None:
    unanswered = dataclasses.replace(RECORD, creating_at=0, cleaning_at=60 * SECOND)
    end = 60 * SECOND + 300 * SECOND + leases.CLOCK_MARGIN
    assert not leases.must_have_expired(unanswered, end)
    assert leases.must_have_expired(unanswered, end + 1)


def test_the_first_beats_of_many_owners_are_spread_over_the_interval() -> None:
    owners = [uuid.UUID(int=random.Random(number).getrandbits(128)).hex for number in range(1000)]
    first = [leases.first_beat(owner, 30.0) for owner in owners]
    assert all(0 < seconds <= 30.0 for seconds in first)
    counts = Counter(int(seconds // 3) for seconds in first)
    assert all(60 <= counts[tenth] <= 140 for tenth in range(10)), counts
    assert first == [leases.first_beat(owner, 30.0) for owner in owners], "an owner's is always the same"


@given(st.text())
def test_any_name_of_an_owner_has_a_phase(owner: str) -> None:
    assert 0 < leases.first_beat(owner, 0.2) <= 0.2
