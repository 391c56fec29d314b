"""What the server counts: for people, for tests (`GET /me2b/stats`) and for Prometheus (`GET /me2b/metrics`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

END_REASONS = ("killed", "expired", "died", "shutdown")
"""Why a sandbox ended: asked for, its time was over, it died by itself, the server stopped."""


@dataclass
class Peaks:
    """The most at once: `live` (listed or being started), and `present` (those that are being killed as well)."""

    live: int = 0
    present: int = 0


class Counters:
    """Plain numbers, kept by the registry.

    `live` are sandboxes that are listed or being started; `ending` are those being killed, which no list shows.
    """

    def __init__(self) -> None:
        self.starting = 0
        self.listed = 0
        self.ending = 0
        self.peak_live = 0
        self.recent = Peaks()
        self.created = 0
        self.create_failed = 0
        self.paused = 0
        self.resumed = 0
        self.forked = 0
        self.kill_failed = 0
        self.ended: Counter[str] = Counter(dict.fromkeys(END_REASONS, 0))

    @property
    def live(self) -> int:
        return self.starting + self.listed

    def observe(self, *, starting: int, listed: int, ending: int) -> None:
        """Take note of how many there are now."""
        self.starting, self.listed, self.ending = starting, listed, ending
        self.peak_live = max(self.peak_live, self.live)
        self.recent.live = max(self.recent.live, self.live)
        self.recent.present = max(self.recent.present, self.live + ending)

    def begin_peaks(self) -> None:
        """Count `recent` anew, from what is now."""
        self.recent = Peaks(self.live, self.live + self.ending)

    def as_dict(self) -> dict[str, Any]:
        return {
            "live": self.live,
            "peak_live": self.peak_live,
            "starting": self.starting,
            "ending": self.ending,
            "created": self.created,
            "create_failed": self.create_failed,
            "paused": self.paused,
            "resumed": self.resumed,
            "forked": self.forked,
            "kill_failed": self.kill_failed,
            "ended": dict(self.ended),
        }


def prometheus_text(counters: Counters) -> bytes:
    """The counters in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(counters))
    return generate_latest(registry)


class _Families:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        yield GaugeMetricFamily("me2b_sandboxes_live", "Sandboxes listed or being started", counters.live)
        yield GaugeMetricFamily("me2b_sandboxes_live_peak", "Most live sandboxes at once", counters.peak_live)
        yield GaugeMetricFamily("me2b_sandboxes_ending", "Sandboxes being killed", counters.ending)
        yield CounterMetricFamily("me2b_sandboxes_created", "Sandboxes created", counters.created)
        yield CounterMetricFamily("me2b_sandboxes_create_failed", "Creates that failed", counters.create_failed)
        yield CounterMetricFamily("me2b_sandboxes_paused", "Pauses", counters.paused)
        yield CounterMetricFamily("me2b_sandboxes_resumed", "Resumes", counters.resumed)
        yield CounterMetricFamily("me2b_sandboxes_forked", "Sandboxes made as forks of others", counters.forked)
        yield CounterMetricFamily("me2b_sandboxes_kill_failed", "Kills that failed", counters.kill_failed)
        ended = CounterMetricFamily("me2b_sandboxes_ended", "Sandboxes that ended, by reason", labels=["reason"])
        for reason, count in counters.ended.items():
            ended.add_metric([reason], count)
        yield ended
