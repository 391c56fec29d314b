"""What the keeper tries again and again is told at once, then less and less often, and once more when it works."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator

import pytest

from managed_e2b import BackendError
from managed_e2b.engine import release
from managed_e2b.engine.complaints import Complaints

from .conftest import Face, until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def each_second(self, seconds: int) -> Iterator[float]:
        for _ in range(seconds):
            yield self.now
            self.now += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def complaints(clock: Clock, caplog: pytest.LogCaptureFixture) -> Complaints:
    caplog.set_level(logging.WARNING, "managed_e2b")
    return Complaints(clock)


def test_the_same_is_told_after_1_2_4_seconds_and_at_last_once_a_minute(
    complaints: Complaints, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[float] = []
    for now in clock.each_second(303):
        complaints.failed("the ledger", "beat", "it is gone")
        if len(caplog.messages) > len(told):
            told.append(now)
    assert [later - sooner for sooner, later in itertools.pairwise(told)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert caplog.messages[0] == "the ledger: it is gone; it is tried again"
    assert caplog.messages[-1] == "the ledger: it is gone; 244 failures in 243 s; it is tried again"
    caplog.clear()
    for _ in range(3):
        complaints.worked("beat")
    assert caplog.messages == ["the ledger works again, after 303 failures in 303 s"]


def test_all_that_fails_because_of_one_thing_is_one_trouble_that_ends_with_the_last(
    complaints: Complaints, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in clock.each_second(2):
        for number in range(1000):
            complaints.failed("the endpoint", f"sandbox {number}", f"cannot kill {number}")
    assert caplog.messages == [
        "the endpoint: cannot kill 0; it is tried again",
        "the endpoint: cannot kill 0 (and 999 more); 1001 failures in 1 s; it is tried again",
    ]
    caplog.clear()
    complaints.worked("another one, which never failed")
    for number in range(999):
        complaints.worked(f"sandbox {number}")
    assert caplog.messages == []
    complaints.worked("sandbox 999")
    assert caplog.messages == ["the endpoint works again, after 2000 failures in 2 s"]


def test_what_comes_and_goes_is_told_as_seldom(
    complaints: Complaints, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in clock.each_second(240):
        complaints.failed("the endpoint", "leases", "503")
        complaints.worked("leases")
    assert 2 <= len(caplog.messages) <= 20


def test_after_a_quiet_time_it_is_told_at_once(
    complaints: Complaints, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in clock.each_second(100):
        complaints.failed("the endpoint", "leases", "503")
    complaints.worked("leases")
    clock.now += 60
    caplog.clear()
    complaints.failed("the endpoint", "leases", "503")
    assert caplog.messages == ["the endpoint: 503; it is tried again"]


def test_two_troubles_are_two(complaints: Complaints, caplog: pytest.LogCaptureFixture) -> None:
    complaints.failed("the endpoint", "sweep", "503")
    complaints.failed("the ledger", "sweep", "full")
    assert len(caplog.messages) == 2
    caplog.clear()
    complaints.worked("sweep")
    assert len(caplog.messages) == 2


async def test_an_endpoint_that_is_down_is_told_seldom_and_that_it_is_back(
    face: Face, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(release, "PATIENCE", 0.0)
    caplog.set_level(logging.WARNING, "managed_e2b")
    lifecycle = face.open()
    sdk, failures = lifecycle._cleaner.driver.sdk, 0
    kill = sdk.kill

    async def failing(sandbox_id: str) -> bool:
        nonlocal failures
        failures += 1
        if failures <= 5:
            raise BackendError("503", status=503)
        return bool(await kill(sandbox_id))

    sdk.kill = failing
    async with face.entered(lifecycle.acquire()):
        pass
    until(lambda: "works again" in caplog.text, "it is back")
    first, *others, last = caplog.messages
    assert re.fullmatch(r"the endpoint: release of \w+ is not proved yet: 503; it is tried again", first)
    assert len(others) < 4
    assert re.fullmatch(r"the endpoint works again, after 5 failures in \d+ s", last)
