from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.limits import Caps, Go, Load, Wait, turn


def load(*, now: int = 0, own: int = 0, account: int = 0, ahead: int = 0, tat: int = 0) -> Load:
    return Load(now=now, own_slots=own, account_slots=account, ahead=ahead, tat=tat)


def test_a_free_slot_goes_to_the_oldest() -> None:
    assert turn(Caps(2), load(own=1, now=7)) == Go(7)
    assert isinstance(turn(Caps(2), load(own=1, ahead=1)), Wait)


def test_the_caps_hold() -> None:
    assert isinstance(turn(Caps(2), load(own=2)), Wait)
    assert isinstance(turn(Caps(9, account_limit=3), load(account=3)), Wait)
    assert turn(Caps(9, account_limit=3), load(account=2)) == Go(0)


def test_the_wait_for_the_rate_is_told_in_seconds() -> None:
    decision = turn(Caps(1, create_rate=1.0), load(now=1 * SECOND, tat=3 * SECOND))
    assert isinstance(decision, Wait)
    assert decision.seconds == 2.0


@given(
    rate=st.floats(min_value=0.1, max_value=100),
    gaps=st.lists(st.integers(min_value=0, max_value=2 * SECOND), min_size=2, max_size=60),
)
def test_creates_are_evenly_spaced(rate: float, gaps: list[int]) -> None:
    caps, tat, now, went = Caps(10**6, create_rate=rate), 0, 0, []
    for gap in gaps:
        now += gap
        decision = turn(caps, load(now=now, tat=tat))
        if isinstance(decision, Go):
            tat = decision.tat
            went.append(now)
    step = int(SECOND / rate)
    assert all(later - earlier >= step for earlier, later in itertools.pairwise(went))
    assert went, "the first one never waits"
