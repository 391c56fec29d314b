"""A pool of sandboxes that are used for a while, by the thousand, on a clock that is stepped: cap and rate hold."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path

import pytest

from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.limits import Caps

from .world import Held, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "sandboxes.db")
    yield world
    world.close()


def test_a_thousand_calls_on_a_pool_of_sixteen_keep_its_size_and_its_rate_and_use_it(world: World) -> None:
    """A pool that was empty created beside its limits: too many sandboxes, and too many requests a second."""
    owner = world.open_owner()
    owner._engine.caps = Caps(16, create_rate=5.0)
    pool: collections.deque[Held] = collections.deque()
    made: list[int] = []
    for _ in range(1000):
        if len(pool) == 16:
            owner.leave(pool.popleft())
        pool.append(owner.acquire(timeout=600, patience=60))
        found = world.provider.look(pool[-1].sandbox_id)
        assert found is not None
        made.append(found.started_at)
    assert len([call for call in world.provider.calls if call.op == "create"]) == 1000
    assert world.provider.peak_live == 16
    assert all(later - first >= SECOND for first, later in zip(made, made[5:], strict=False)), "5 in every second"
    assert 999 / (5.0 * (made[-1] - made[0]) / SECOND) >= 0.95, "and the rate is used"
    for held in pool:
        owner.leave(held)
    assert world.provider.live == []
