"""Threads of every open lifecycle, on both faces: a blocked event loop must not look like a crash.

They run the engine's own code on the blocking driver: the owner's heartbeat; the leases; what nobody holds any more
and what is still `cleaning`; what dead owners left. Each has a thread of its own: a DELETE that hangs must not cost the
living their lease, nor an endpoint that hangs the owner its heartbeat.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from ..errors import BackendError, LedgerError
from ..models import SandboxRecord, State
from ..rules import leases
from .base import Engine
from .complaints import ENDPOINT, KEEPER, LEDGER
from .endings import notice
from .identity import identify_new
from .patience import patiently
from .reap import Bounds, reap

TICK = 1.0
"""Seconds between two looks at what was abandoned; heartbeats and leases have their own, longer interval."""

REAP_INTERVAL = 60.0
"""Seconds between two looks for owners that died."""

_RENEWAL_PATIENCE = 5.0
"""Seconds for which one renewal waits when it is answered by 429; the next round goes on."""

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Keeper:
    """See the module. `run` drives a coroutine of the engine over the blocking driver; `watch` is called every TICK."""

    def __init__(
        self,
        engine: Engine,
        run: Run,
        *,
        stale_after: float,
        reaps: bool,
        watch: Callable[[], object] | None = None,
    ) -> None:
        self._engine = engine
        self._run = run
        self._stop = threading.Event()
        interval = leases.beat_interval(engine.lease, int(stale_after))
        first = leases.first_beat(engine.owner, interval)
        self._threads = [
            self._thread("beat", interval, self._beat, first=first),
            self._thread("leases", interval, self._renew, first=first),
            self._thread("sweep", TICK, self._sweep),
            self._thread("identity", TICK, self._identify),
        ]
        if watch is not None:
            self._threads.append(self._thread("watch", TICK, watch))
        if reaps:
            self._threads.append(self._thread("reap", REAP_INTERVAL, self._reap, first=0.0))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float) -> None:
        """Ask it to end and wait up to `timeout` seconds."""
        self._stop.set()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _thread(
        self, name: str, interval: float, step: Callable[[], object], *, first: float | None = None
    ) -> threading.Thread:
        def main() -> None:
            due = time.monotonic() + (interval if first is None else first)
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                self._guarded(name, step)
                # On its own beat, so that owners do not fall into step with those who wait for the same.
                due += interval * max(1, math.ceil((time.monotonic() - due) / interval))

        return threading.Thread(target=main, name=f"me2b-keeper-{name}", daemon=True)

    def _guarded(self, item: str, step: Callable[[], object]) -> None:
        """The keeper outlives whatever fails, for a while or once: without it every lease would lapse.

        A step that returns False has not failed, and is not done either.
        """
        complaints = self._engine.complaints
        try:
            if step() is not False:
                complaints.worked(item)
        except LedgerError as error:
            complaints.failed(LEDGER, item, str(error))
        except BackendError as error:
            complaints.failed(ENDPOINT, item, str(error))
        except OSError as error:
            complaints.failed(KEEPER, item, f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - it is told, with its traceback
            complaints.failed(KEEPER, item, f"an error that nobody expected: {type(error).__name__}", error)

    def _beat(self) -> None:
        self._engine.book.beat(self._engine.owner)

    def _renew(self) -> None:
        engine = self._engine
        for record in engine.book.records(states_=[State.RUNNING], owner=engine.owner):
            # Each on its own: one that fails must not cost the others their lease.
            self._guarded(record.ticket, functools.partial(self._renew_one, record))

    def _renew_one(self, record: SandboxRecord) -> bool:
        engine = self._engine
        sent_at = engine.now_of(record.ticket)
        if record.hard_deadline is not None and sent_at >= record.hard_deadline:
            return engine.clean(record.ticket, f"expired: its timeout of {record.timeout} s has passed", patience=0.0)
        seconds = leases.renewal(record, sent_at)
        if seconds is None or record.sandbox_id is None:
            return True
        extend = patiently(
            engine, engine.driver.sdk.set_timeout, record.sandbox_id, seconds, patience=_RENEWAL_PATIENCE
        )
        if self._run(extend):
            engine.book.extended(record.ticket, sent_at + seconds * leases.SECOND)
        else:
            self._run(notice(engine, record))  # it is gone, or only paused
        return True

    def _identify(self) -> None:
        self._run(identify_new(self._engine))

    def _reap(self) -> None:
        self._run(reap(self._engine, bounds=Bounds(stopped=self._stop.is_set)))

    def _sweep(self) -> None:
        engine = self._engine
        if engine.calls.left():
            return  # the endpoint wants to be left alone: what is due stays due
        due: dict[str, str] = {}
        # Though the ledger fails: what nobody holds any more is ended by its id.
        self._guarded("claims", lambda: due.update(self._claimed()))
        for _ in range(len(engine.abandoned)):
            due.setdefault(engine.abandoned.popleft(), "abandoned: nobody holds its handle")
        for ticket, reason in due.items():
            self._guarded(ticket, functools.partial(self._end, ticket, reason))

    def _claimed(self) -> dict[str, str]:
        """Ours, and what a reap of ours has claimed of dead owners: nobody else goes on with those while we live."""
        rows = self._engine.book.records(states_=[State.CLEANING], claimed_by=self._engine.owner)
        return {record.ticket: record.reason or "released" for record in rows}

    def _end(self, ticket: str, reason: str) -> bool:
        """One try. What is not proved, or could not even be claimed, is due again at the next tick."""
        ended = False
        try:
            ended = self._engine.clean(ticket, reason, patience=0.0)
        finally:
            if not ended:
                self._engine.abandoned.append(ticket)
        return ended
