"""Who may go, and when: the line of an account, its rate, and its pace after a 429."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_e2b.rules import limits
from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.limits import PRESENT, Caps, Go, Load, Pace, Part, Wait, pause, recovered, slowed, turn


def part(
    owner: str = "me",
    slots: int = 0,
    queued: int = 0,
    refused: int = 0,
    room: int | None = 100,
    asked_at: int | None = 0,
) -> Part:
    return Part(owner, slots, queued, refused, room, asked_at)


def load(
    *others: Part, now: int = 0, mine: Part | None = None, pace: Pace | None = None, refused: bool = False
) -> Load:
    mine = mine or part()
    return Load(now, mine, others, mine.slots + sum(one.slots for one in others), pace or Pace(), refused)


def other(slots: int = 0, queued: int = 0, refused: int = 0, room: int | None = 100, asked_at: int | None = 0) -> Part:
    return part("other", slots, queued, refused, room, asked_at)


def went(decision: Go | Wait) -> bool:
    return isinstance(decision, Go)


def test_a_free_slot_goes_to_the_oldest() -> None:
    assert went(turn(Caps(2), load(mine=part(slots=1))))
    assert not went(turn(Caps(2), load(mine=part(slots=1, queued=1)))), "an older one of this lifecycle gets it"
    assert went(turn(Caps(3), load(mine=part(slots=1, queued=1)))), "there is one for each"
    assert not went(turn(Caps(9, account_limit=2), load(other(slots=1, queued=1)))), "an older one of another"
    assert went(turn(Caps(9, account_limit=3), load(other(slots=1, queued=1))))


def test_the_caps_hold() -> None:
    assert not went(turn(Caps(2), load(mine=part(slots=2))))
    assert not went(turn(Caps(9, account_limit=3), load(other(slots=3))))
    assert not went(turn(Caps(9, account_limit=3), load(other(slots=2), mine=part(slots=1))))
    assert went(turn(Caps(9, account_limit=3), load(other(slots=2))))
    assert went(turn(Caps(2), load(other(slots=50, queued=50)))), "others matter to nobody who sets no common limit"


def test_a_row_that_its_own_lifecycle_holds_back_holds_up_nobody() -> None:
    caps = Caps(9, account_limit=10)
    assert not went(turn(caps, load(other(slots=4, queued=9, room=None))))
    assert not went(turn(caps, load(other(slots=4, queued=9, room=10))))
    assert went(turn(caps, load(other(slots=4, queued=9, room=4))))
    assert went(turn(caps, load(other(slots=4, queued=9, room=6)))), "two of them may go, and there is a slot more"
    assert went(turn(caps, load(other(slots=6, queued=9, room=4)))), "a limit that was lowered since"


@pytest.mark.parametrize("asked_at", [None, -PRESENT - 1, 3 * 86_400 * SECOND])
def test_who_does_not_ask_holds_up_nobody(asked_at: int | None) -> None:
    caps = Caps(9, account_limit=1)
    assert not went(turn(caps, load(other(queued=1))))
    assert went(turn(caps, load(other(queued=1, asked_at=asked_at))))
    assert not went(turn(caps, load(other(slots=1, asked_at=asked_at)))), "but what it holds it holds"


@given(
    limit=st.integers(1, 12),
    owners=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), min_size=1, max_size=5),
    seed=st.integers(),
)
def test_no_line_stands_still_nor_overfills_and_none_is_overtaken_for_a_slot_it_could_have(
    limit: int, owners: list[tuple[int, int]], seed: int
) -> None:
    """Rows of several owners in one line, asked in any order until nobody goes any more."""
    dice = random.Random(seed)
    rows = [owner for owner, (_, queued) in enumerate(owners) for _ in range(queued)]
    dice.shuffle(rows)
    queued, slots = list(enumerate(rows)), [0] * len(owners)
    moved = True
    while moved:
        moved = False
        for row in dice.sample(queued, len(queued)):
            place, owner = row
            older = [sum(o == other and p < place for p, o in queued) for other in range(len(owners))]
            parts = [Part(str(o), slots[o], older[o], 0, owners[o][0], 0) for o in range(len(owners))]
            mine = parts.pop(owner)
            if went(turn(Caps(owners[owner][0], account_limit=limit), Load(0, mine, parts, sum(slots)))):
                queued.remove(row)
                slots[owner] += 1
                moved = True
    assert sum(slots) <= limit
    assert all(held <= room for held, (room, _) in zip(slots, owners, strict=True))
    started = [row for row in enumerate(rows) if row not in queued]
    # Served one by one in the order of the line, each when there is room: exactly these go.
    fair, count = [], [0] * len(owners)
    for place, owner in enumerate(rows):
        if len(fair) < limit and count[owner] < owners[owner][0]:
            fair.append((place, owner))
            count[owner] += 1
    assert started == fair


def test_the_wait_for_the_rate_is_told_in_seconds_behind_those_who_are_before() -> None:
    caps = Caps(9, create_rate=1.0)
    decision = turn(caps, load(now=1 * SECOND, pace=Pace(tat=3 * SECOND)))
    assert isinstance(decision, Wait)
    assert decision.seconds == 2.0
    assert pause(decision, 7, 0.5) == 2.0, "an appointment is kept exactly"
    behind = turn(caps, load(other(queued=2), now=3 * SECOND, pace=Pace(tat=3 * SECOND)))
    assert isinstance(behind, Wait)
    assert behind.seconds == pytest.approx(2 * caps.step / SECOND)
    assert pause(behind, 7, 0.5) < behind.seconds, "those before it may leave the line"


@given(
    rate=st.sampled_from([0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 100.0]),
    lateness=st.lists(st.floats(0, 0.3), min_size=30, max_size=120),
)
def test_the_rate_holds_in_every_window_and_lateness_costs_little_of_it(rate: float, lateness: list[float]) -> None:
    """One who asks as told, and comes a little late each time."""
    caps, pace, now, times = Caps(10**6, create_rate=rate), Pace(), SECOND, []
    for late in lateness:
        decision = turn(caps, load(now=now, pace=pace))
        if isinstance(decision, Wait):
            assert decision.seconds is not None
            now += int(decision.seconds * SECOND) + 1 + int(late * SECOND / rate)
            decision = turn(caps, load(now=now, pace=pace))
        assert isinstance(decision, Go)
        times.append(now)
        pace = decision.pace
    window = max(1.0, 1 / rate)
    most = round(rate * window)
    assert all(later - first >= window * SECOND for first, later in zip(times, times[most:], strict=False))
    used = (len(times) - 1) * SECOND / (times[-1] - times[0]) / rate
    allowed = caps.tolerance / SECOND
    excess = sum(max(0.0, late / rate - allowed) for late in lateness) / len(lateness)
    assert used >= 1 / (1 + limits.MARGIN + excess * rate) - 0.01


def test_a_clock_that_was_set_back_stops_nobody() -> None:
    days = 3 * 86_400 * SECOND
    future = Pace(tat=days, gap=SECOND, held_until=days, slowed_at=days)
    assert went(turn(Caps(1, create_rate=1.0), load(now=SECOND, pace=future)))
    assert slowed(future, Caps(1), 0, 0, None, 0.0).gap == 2 * SECOND


def test_a_refused_row_needs_no_slot_but_its_place_in_the_rate() -> None:
    pace = Pace(tat=5 * SECOND, gap=SECOND)
    full = part(slots=3)
    assert went(turn(Caps(3, account_limit=3), load(now=5 * SECOND, mine=full, pace=pace, refused=True)))
    behind = turn(Caps(3), load(other(refused=2), now=5 * SECOND, mine=full, pace=pace, refused=True))
    assert isinstance(behind, Wait)
    assert behind.seconds == 2.0
    assert behind.why == "the endpoint answered 429"
    assert not went(turn(Caps(3), load(other(refused=1), now=5 * SECOND, pace=pace))), "older, and refused before"


@pytest.mark.parametrize("wait", [0.0, 3.0, 120.0])
def test_a_named_time_holds_everybody_for_so_long(wait: float) -> None:
    now = 100 * SECOND
    pace = slowed(Pace(), Caps(9), now, now, wait, 0.0)
    before = turn(Caps(9), load(now=now + int(wait * SECOND) - 1, pace=pace))
    assert isinstance(before, Wait)
    assert went(turn(Caps(9), load(now=now + int(wait * SECOND), pace=pace)))


def test_refusals_in_a_row_back_off_exponentially_and_bounded() -> None:
    pace, now, holds = Pace(), SECOND, []
    for _ in range(12):
        pace = slowed(pace, Caps(9), now, now, None, 0.0)
        holds.append((pace.held_until - now) / SECOND)
        now = pace.held_until
    assert holds[:5] == [0.5, 0.5, 0.8, 1.6, 3.2]
    assert holds == sorted(holds)
    assert holds[-1] == limits.LONGEST_GAP / SECOND


def test_a_burst_of_refusals_counts_once() -> None:
    now = 10 * SECOND
    once = slowed(Pace(), Caps(9), now, now - 5, None, 0.0)
    burst = once
    for sent in range(20):
        burst = slowed(burst, Caps(9), now + sent, now - sent - 1, None, 0.9)
    assert (burst.gap, burst.held_until) == (once.gap, once.held_until)
    assert slowed(burst, Caps(9), now + 50, now - 1, 7.0, 0.0).held_until == now + 50 + 7 * SECOND, (
        "a named time counts"
    )


@pytest.mark.parametrize("create_rate", [None, 1.0, 5.0])
def test_the_pace_recovers_step_by_step_to_what_it_was(create_rate: float | None) -> None:
    caps = Caps(9, create_rate=create_rate)
    now = 0
    pace = Pace()
    for _ in range(5):
        now += SECOND
        pace = slowed(pace, caps, now, now, None, 0.0)
    assert recovered(pace, caps, now + 1, now - 1) == pace, "sent before: it tells nothing"
    gaps = []
    for _ in range(200):
        now += SECOND
        pace = recovered(pace, caps, now, now)
        gaps.append(pace.gap)
        if not pace.gap:
            break
    assert gaps[-1] == 0
    assert all(later < earlier for earlier, later in itertools.pairwise(gaps))


@given(
    seconds=st.one_of(st.none(), st.floats(0, 1000)),
    ahead=st.integers(0, 1000),
    own=st.booleans(),
    asked=st.integers(0, 10**6),
    jitter=st.floats(0, 0.999),
)
def test_nobody_asks_in_a_busy_loop_nor_so_rarely_that_it_is_passed_over(
    seconds: float | None, ahead: int, own: bool, asked: int, jitter: float
) -> None:
    wait = pause(Wait(seconds, "", ahead, own), asked, jitter)
    assert 0.001 <= wait <= limits.ASK
    assert limits.ASK * 2 * SECOND < PRESENT
