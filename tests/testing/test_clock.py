from __future__ import annotations

from datetime import UTC, datetime, timedelta

from managed_e2b.testing import SteppedClock


def test_it_stands_until_it_is_stepped() -> None:
    clock = SteppedClock(datetime(2026, 1, 1, tzinfo=UTC))
    first = clock()
    assert first == clock.now == 1_767_225_600_000_000
    assert clock.step(1.5) == first + 1_500_000
    assert clock.now == first + 1_500_000


def test_both_clocks_of_a_server_move_together() -> None:
    clock = SteppedClock()
    before = clock.read()
    clock.step(60)
    after = clock.read()
    assert after.monotonic - before.monotonic == 60
    assert after.wall - before.wall == timedelta(seconds=60)


def test_a_wall_clock_that_is_set_back_moves_no_deadline() -> None:
    clock = SteppedClock()
    before = clock.read()
    clock.step(-3 * 86_400)
    after = clock.read()
    assert after.monotonic == before.monotonic
    assert after.wall == before.wall - timedelta(days=3)
