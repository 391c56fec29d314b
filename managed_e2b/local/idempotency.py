"""`Idempotency-Key`: the same request, however often it is sent, has its effect once and the same answer always.

Only answers of effects that happened are kept: an attempt that failed made nothing, so the next may try again. A
request that comes while its twin is under way waits and shares that outcome, good or bad.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from managed_e2b.local.clock import Clock
from managed_e2b.local.errors import ApiError, bad_request

T = TypeVar("T")

KEPT_SECONDS = 24 * 3600
KEPT_ANSWERS = 10_000

_KEY = re.compile(r"[a-z0-9-]{1,255}")


def check_key(key: str) -> str:
    """The key as sent. Raises ApiError(400) for one that is malformed."""
    if not _KEY.fullmatch(key):
        raise bad_request("Invalid Idempotency-Key, expected 1 to 255 characters of a-z, 0-9 and -")
    return key


@dataclass
class _Entry(Generic[T]):
    request: Hashable
    outcome: asyncio.Future[T]
    since: float


class IdempotencyStore(Generic[T]):
    """Answers by key, for a day, the newest 10,000. Those under way are never dropped."""

    def __init__(self, clock: Clock, *, limit: int = KEPT_ANSWERS, seconds: float = KEPT_SECONDS) -> None:
        self._clock = clock
        self._limit = limit
        self._seconds = seconds
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def run(self, key: Hashable, request: Hashable, effect: Callable[[], Awaitable[T]]) -> T:
        """The answer of `effect`, made by this call or by an earlier one with the same key.

        `key` includes the caller it belongs to; `request` is what makes requests the same.
        Raises ApiError(422) when the key was used for another request, and whatever `effect` raises.
        """
        self._forget()
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(request, asyncio.ensure_future(effect()), self._clock.read().monotonic)
            self._entries[key] = entry
            entry.outcome.add_done_callback(lambda _: self._settle(key, entry))
        elif entry.request != request:
            raise ApiError(
                422,
                "This Idempotency-Key was used for a different request",
                error_code="idempotency_request_mismatch",
                headers={"Should-Retry": "false"},
            )
        return await asyncio.shield(entry.outcome)

    def _settle(self, key: Hashable, entry: _Entry[T]) -> None:
        if (entry.outcome.cancelled() or entry.outcome.exception() is not None) and self._entries.get(key) is entry:
            del self._entries[key]

    def _forget(self) -> None:
        oldest = self._clock.read().monotonic - self._seconds
        surplus = len(self._entries) - self._limit + 1
        old: list[Hashable] = []
        for key, entry in self._entries.items():
            if entry.since > oldest and len(old) >= surplus:
                break
            if entry.outcome.done():
                old.append(key)
        for key in old:
            del self._entries[key]
