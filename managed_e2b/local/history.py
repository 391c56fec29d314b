"""What sandboxes used over time: a sample every few seconds, the newest of them kept.

A sample costs some milliseconds of the host and more where there are many files, so the sampler spends a bounded share
of one core: with many sandboxes the samples come less often, and nothing else gets slower.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from managed_e2b.local.clock import Clock
from managed_e2b.local.runtime.base import Guest, GuestError, GuestGone, Usage

log = logging.getLogger(__name__)

INTERVAL = 5.0
"""Seconds between two samples of a sandbox, as upstream has it; more when there are many."""
SHARE = 0.1
"""How much of its time the sampler may spend on taking samples, at most."""
KEPT_SAMPLES = 720
"""For each sandbox: an hour's."""


@dataclass(frozen=True)
class Sample:
    """`at` is a whole second, UTC, as upstream's are."""

    at: datetime
    usage: Usage

    @property
    def second(self) -> int:
        return int(self.at.timestamp())


class History:
    """The samples of one sandbox, oldest first."""

    def __init__(self, size: int = KEPT_SAMPLES) -> None:
        self._samples: deque[Sample] = deque(maxlen=size)

    def add(self, now: datetime, usage: Usage) -> None:
        """Keep a sample; a second has one at most, the first."""
        sample = Sample(now.astimezone(UTC).replace(microsecond=0), usage)
        if not self._samples or self._samples[-1].at < sample.at:
            self._samples.append(sample)

    def between(self, start: int | None, end: int | None) -> list[Sample]:
        """Those of a time, in Unix seconds, both included; None: without a bound."""
        return [
            sample
            for sample in self._samples
            if (start is None or start <= sample.second) and (end is None or sample.second <= end)
        ]

    @property
    def last(self) -> Sample | None:
        return self._samples[-1] if self._samples else None


@dataclass(frozen=True)
class Subject:
    """What the sampler looks at."""

    guest: Guest
    history: History


async def sample(subject: Subject, clock: Clock) -> None:
    """Take a sample now. A sandbox that is gone, or does not tell, gets none."""
    try:
        usage = await subject.guest.usage()
    except GuestGone:
        return
    except GuestError as error:
        log.warning("no sample of sandbox %s: %s", subject.guest.sandbox_id, error.message)
        return
    subject.history.add(clock.read().wall, usage)


class Sampler:
    """Takes the samples. `subjects`: those to look at, now. While there are none it sleeps; `wake` says there are."""

    def __init__(
        self,
        subjects: Callable[[], Iterable[Subject]],
        clock: Clock,
        *,
        interval: float = INTERVAL,
        share: float = SHARE,
    ) -> None:
        self._subjects = subjects
        self._clock = clock
        self._interval = interval
        self._rest = 1 / share - 1
        self._wanted = asyncio.Event()

    def wake(self) -> None:
        self._wanted.set()

    async def run(self) -> None:
        """Take samples until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            began = loop.time()
            subjects = list(self._subjects())
            if not subjects:
                self._wanted.clear()
                continue
            for subject in subjects:
                before = loop.time()
                await sample(subject, self._clock)
                await asyncio.sleep((loop.time() - before) * self._rest)
            await asyncio.sleep(began + self._interval - loop.time())
