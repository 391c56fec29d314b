"""What came to the server and what became of it: the truth that tests count by."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from managed_e2b.local.chaos.director import Subject
from managed_e2b.local.counters import Counters

KEPT = 200_000
"""Requests that are kept; a soak of hours must not fill the memory."""

TICKET, OWNER = "me2b_ticket", "me2b_owner"


@dataclass
class Entry:
    """One request. `effect`: the status of what really happened; `status`: what the client was told."""

    n: int
    at: float
    op: str
    method: str
    sandbox_id: str | None
    metadata: Mapping[str, str] = field(repr=False)
    faults: list[str]
    effect: int | None = None
    status: int | None = None
    state: Literal["open", "hanging", "answered", "dropped"] = "open"

    def as_dict(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "at": self.at,
            "op": self.op,
            "method": self.method,
            "sandbox_id": self.sandbox_id,
            "ticket": self.metadata.get(TICKET),
            "owner": self.metadata.get(OWNER),
            "faults": self.faults,
            "effect": self.effect,
            "status": self.status,
            "state": self.state,
        }


class Journal:
    """All requests since it was begun, in the order they came. The server has one API key, so the peaks are its."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._n = 0
        self._known: dict[str, Mapping[str, str]] = {}

    def begin(self, subject: Subject, method: str, at: float, faults: list[str]) -> Entry:
        """Write down that a request came, at Unix seconds `at`."""
        self._n += 1
        metadata = subject.metadata or self._known.get(subject.sandbox_id or "", {})
        entry = Entry(self._n, at, subject.op, method, subject.sandbox_id, metadata, faults)
        self._entries.append(entry)
        return entry

    def created(self, sandbox_id: str, metadata: Mapping[str, str]) -> None:
        """Remember a sandbox beyond its end, so that a late request for it can be told whose it was."""
        self._known[sandbox_id] = metadata
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]

    def clear(self) -> None:
        """Begin anew; peaks count from now."""
        self._entries.clear()
        self._n = 0
        self._counters.begin_peaks()

    def as_dict(self, op: str | None = None) -> dict[str, Any]:
        """The journal; of one operation only, when one is named."""
        peaks = self._counters.recent
        return {
            "requests": [entry.as_dict() for entry in self._entries if op in (None, entry.op)],
            "live": self._counters.live,
            "peak_live": peaks.live,
            "peak_present": peaks.present,
            "forgotten": self._n - len(self._entries),
        }
