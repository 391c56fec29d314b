"""What both faces of a lifecycle share: its opening, its cleaner, its end."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from .backend import BackendName, close_backend, open_backend
from .drivers import AioDriver, BlockingDriver, Sdk, Wakeup
from .drivers import run as _run
from .drivers.base import Background
from .engine import host
from .engine.acquire import validated
from .engine.base import Engine
from .engine.commands import end as end_command
from .engine.complaints import Complaints
from .engine.foreign import purge
from .engine.keeper import Keeper
from .engine.patience import Hold
from .engine.reap import Bounds, reap
from .engine.reconcile import reconcile
from .engine.release import release
from .errors import ConfigError, LedgerError, Me2bError, SandboxLeakError
from .exits import exits
from .ledger import Ledger, location, open_engine
from .models import MAX_TIMEOUT, AcquireRequest, ReapReport, ReconcileReport, SandboxRecord, State
from .rules import states as _states
from .rules.cleanup import wanted
from .rules.leases import SECOND
from .rules.limits import Caps
from .watchdog.companion import companion

HOBBY_CREATE_RATE = 1.0
"""Creates per second that E2B's smallest plan allows: the default for endpoints that are not on this machine."""

CLEANERS = 32
"""Releases of one lifecycle at once: a thousand tasks that end together must not be a storm of requests."""

_SHUT = "shut"
"""Wakes who waits for a shutdown that another call has begun."""


class BaseLifecycle:
    """What both faces share: the ledger, the owner's row, the two engines (the face's, the keeper's), the keeper."""

    def __init__(
        self,
        db_path: str | os.PathLike[str] = "sandboxes.db",
        *,
        max_concurrent: int = 4,
        account_limit: int | None = None,
        create_rate: float | None = None,
        max_build_concurrency: int = 4,
        stale_timeout: float = 600,
        reaper_max_iter: int = 5,
        lease: int = 300,
        request_timeout: float | None = None,
        backend: BackendName | None = None,
        e2b_api_url: str | None = None,
        e2b_key: str | None = None,
        env_file: str | os.PathLike[str] | None = None,
        label: str | None = None,
        opening_reap: bool = True,
        watchdog: bool = True,
    ) -> None:
        """Open a lifecycle. It blocks for a moment: the ledger is opened, a local server started.

        db_path: the ledger: a file for SQLite, or a `postgresql://` URL. Processes that share it share limits
            and reap each other's orphans.
        max_concurrent: sandboxes of this lifecycle at once, from create to proved death. More wait in line.
        account_limit: the same for all lifecycles that share ledger, endpoint and key.
        create_rate: creates per second, for all of them together. None: 1 for a remote endpoint (E2B's Hobby
            plan), no limit on this machine; `math.inf`: no limit.
        stale_timeout: seconds without a heartbeat after which another host may take this owner for dead.
        reaper_max_iter: the most rounds of one `reap()`.
        lease: seconds that the backend lets a sandbox live when nobody renews it: the dead man's switch.
        request_timeout: seconds for each request to the control plane. None: 60 for a create, 15 for the others, which
            are asked again. The SDK counts sending and waiting apart, so an endpoint that takes a request and never
            answers it may hold it up for twice as long.
        backend: "local" runs sandboxes on this machine, on a server started for this process.
        e2b_api_url, e2b_key, env_file: another endpoint than the environment's; see `get_e2b_config`.
        label: a name for this owner in listings; the program's name by default.
        opening_reap: end in the background what dead owners left on this ledger, at once and then every minute.
        watchdog: have a small process, one for all lifecycles of this one, that ends the sandboxes at once when this
            process is killed. Not used by the local backend, whose sandboxes end with this process anyway.

        Raises ConfigError (LedgerError among them) and BackendUnavailableError.
        """
        _positive("max_concurrent", max_concurrent, int)
        _positive("max_build_concurrency", max_build_concurrency, int)
        _positive("reaper_max_iter", reaper_max_iter, int)
        _positive("stale_timeout", stale_timeout, int, float)
        if stale_timeout == math.inf:
            raise ConfigError("stale_timeout=inf: an owner on another host that died must be found out some day")
        if account_limit is not None:
            _positive("account_limit", account_limit, int)
        if create_rate is not None:
            _positive("create_rate", create_rate, int, float)
        if isinstance(lease, bool) or not isinstance(lease, int) or not 10 <= lease <= MAX_TIMEOUT:
            raise ConfigError(f"lease={lease!r}: whole seconds from 10 to {MAX_TIMEOUT}")
        if request_timeout is not None:
            _positive("request_timeout", request_timeout, int, float)
            if request_timeout == math.inf:
                raise ConfigError("request_timeout=inf: a request that is never answered must end some day")
        self._pid = os.getpid()
        self._request_timeout = request_timeout
        self._reaper_max_iter = reaper_max_iter
        self._closed = False
        self._closing = threading.Lock()
        self._outcome: Future[tuple[SandboxRecord, ...]] = Future()
        """What the shutdown comes to; told once."""
        self._told = False
        self._backend = open_backend(backend, e2b_api_url, e2b_key, env_file)
        try:
            ledger = open_engine(db_path)
            self._book = Ledger(ledger)
            here = host.here()
            rate = create_rate
            if rate is None and not self._backend.config.is_loopback:
                rate = HOBBY_CREATE_RATE
            caps = Caps(max_concurrent, account_limit, None if rate == math.inf else rate)
            wakeup = Wakeup()
            owner = uuid.uuid4().hex
            self._busy: set[str] = set()
            self._busy_lock = threading.Lock()
            self._cleaners = threading.BoundedSemaphore(CLEANERS)
            make = functools.partial(
                Engine,
                book=self._book,
                account=self._backend.account,
                owner=owner,
                caps=caps,
                lease=lease,
                clean=self._clean,
                end_command=self._end_command,
                calls=Hold(),
                complaints=Complaints(),
            )
            self._cleaner = make(BlockingDriver(self._sdk(is_async=False), wakeup))
            self._engine = make(
                self._driver(wakeup),
                clean=self._clean_in_turn,
                abandoned=self._cleaner.abandoned,
                began=self._cleaner.began,
                unidentified=self._cleaner.unidentified,
                made=self._cleaner.made,
            )
            self._book.open_owner(
                owner,
                here,
                self._pid,
                host.process_started(self._pid) or 0,
                label or _program(),
                int(stale_timeout * SECOND),
                max_concurrent,
            )
            has_watchdog = watchdog and not self._backend.is_local
            self._keeper = Keeper(
                self._cleaner,
                _run,
                stale_after=stale_timeout,
                reaps=opening_reap,
                watch=companion.look if has_watchdog else None,
            )
            self._registration: dict[str, Any] | None = None
            if has_watchdog:
                self._registration = {
                    "owner": owner,
                    "ledger": location(ledger),
                    "account": self._backend.account,
                    "lease": lease,
                    "endpoint": dataclasses.asdict(self._backend.config),
                }
            self._keeper.start()
            exits.opened(self)
        except BaseException:
            close_backend(self._backend)
            raise

    def _driver(self, wakeup: Wakeup) -> AioDriver | BlockingDriver:
        raise NotImplementedError

    def _sdk(self, *, is_async: bool) -> Sdk:
        return Sdk(self._backend.config, is_async=is_async, request_timeout=self._request_timeout)

    @property
    def owner_id(self) -> str:
        """This lifecycle's id in the ledger."""
        return self._engine.owner

    @property
    def endpoint(self) -> str:
        """The control plane's URL."""
        return self._backend.config.endpoint

    def _request(self, **values: Any) -> AcquireRequest:
        self._check_open()
        request = validated(**values)
        if self._registration is not None:
            companion.watch(self.owner_id, self._registration)
        return request

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise Me2bError("this lifecycle belongs to the parent process: open one of its own after a fork")
        if self._closed:
            raise Me2bError("this lifecycle is shut down: open another one")

    async def _reap(
        self,
        *,
        purge_foreign: bool,
        metadata: Mapping[str, str] | None,
        template: str | None,
        older_than: float | None,
        include_other_ledgers: bool,
        dry_run: bool,
    ) -> ReapReport:
        self._check_open()
        want = wanted(
            metadata,
            template,
            older_than,
            purge_foreign=purge_foreign,
            include_other_ledgers=include_other_ledgers,
            lease=self._engine.lease,
        )
        bounds = Bounds()
        report = await reap(self._engine, want=want, dry_run=dry_run, max_iter=self._reaper_max_iter, bounds=bounds)
        if not purge_foreign:
            return report
        items, cut = await purge(
            self._engine, want=want, include_other_ledgers=include_other_ledgers, dry_run=dry_run, bounds=bounds
        )
        return ReapReport((*report.items, *items), report.cut or cut)

    async def _reconcile(self) -> ReconcileReport:
        self._check_open()
        return await reconcile(self._engine, one_backend=not self._backend.is_local)

    def _clean_in_turn(self, ticket: str, reason: str, **options: Any) -> bool:
        """As `_clean`, a bounded number at once. The keeper does not wait for those."""
        with self._cleaners:
            return self._clean(ticket, reason, **options)

    def _end_command(self, sandbox: Any, *options: Any) -> None:
        """End a command of a native sandbox of either face, on the blocking driver."""
        _run(end_command(self._cleaner, self._cleaner.driver.sdk.blocking(sandbox), *options))

    def _clean(self, ticket: str, reason: str, **options: Any) -> bool:
        """Release a ticket on the blocking driver; one at a time for each. Whether the row is terminal."""
        with self._busy_lock:
            if ticket in self._busy:
                return False
            self._busy.add(ticket)
        try:
            return bool(_run(release(self._cleaner, ticket, reason, **options)))
        finally:
            with self._busy_lock:
                self._busy.discard(ticket)

    def end(self, timeout: float) -> None:
        """See `exits.Endable`."""
        deadline = time.monotonic() + timeout
        if self._shutdown(timeout):
            self._tell()
        futures.wait([self._outcome], max(0.0, deadline - time.monotonic()))

    async def _close(self, timeout: float) -> tuple[SandboxRecord, ...]:
        """See `SandboxLifecycle.shutdown`."""
        if self._pid != os.getpid():
            return ()
        deadline = time.monotonic() + timeout
        driver = self._engine.driver
        try:
            await driver.finish(self._shutdown, timeout)
            # Another call may have begun it, which was cancelled, or is another task's.
            while not self._outcome.done() and (left := deadline - time.monotonic()) > 0:
                told = driver.told
                if not self._outcome.done():
                    await driver.wait(left, _SHUT, told)
            return self._tell() if self._outcome.done() else self._checked(tuple(self._open_rows()), timeout)
        finally:
            exits.restore()

    def _tell(self) -> tuple[SandboxRecord, ...]:
        """What the shutdown came to, for the first who asks."""
        with self._closing:
            told, self._told = self._told, True
        return () if told else self._outcome.result(0)

    def _shutdown(self, timeout: float) -> bool:
        """Blocking: shut down, unless that has begun before. Whether this was the first call."""
        with self._closing:
            if self._closed:
                return False
            self._closed = True
        try:
            outcome = self._end_and_close(timeout)
        except BaseException as error:  # noqa: BLE001 - whoever asks raises it
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(outcome)
        self._engine.driver.notify(_SHUT)
        return True

    def _end_and_close(self, timeout: float) -> tuple[SandboxRecord, ...]:
        deadline = time.monotonic() + timeout
        left: tuple[SandboxRecord, ...] = ()
        is_told = False
        try:
            self._keeper.stop(0.0)  # it is asked to; what it is doing goes on beside the rest
            self._end_all(deadline)
            self._engine.driver.join(max(0.0, deadline - time.monotonic()))
            self._keeper.stop(max(0.0, deadline - time.monotonic()))
            left = tuple(self._open_rows())  # whoever of these has ended them
            self._book.close_owner(self._engine.owner)
            is_told = True
        except LedgerError as error:
            if living := [made.sandbox_id for made in self._engine.made.values() if not made.is_dead]:
                error.add_note(f"not proved dead: {', '.join(living)}; at the latest their lease ends them")
            raise
        finally:
            try:
                # A goodbye that the ledger has not taken is for the watchdog to deliver.
                companion.dismiss(self._engine.owner, left_something=bool(left) or not is_told)
            finally:
                close_backend(self._backend)
                self._book.close()
                exits.closed(self)
        if self._backend.is_local:  # the local server has just taken its sandboxes with it
            return ()
        return self._checked(left, timeout)

    def _checked(self, left: tuple[SandboxRecord, ...], timeout: float) -> tuple[SandboxRecord, ...]:
        """The rows that are left, when none of them has a sandbox. Raises SandboxLeakError."""
        known = [record.sandbox_id for record in left if record.sandbox_id is not None]
        if known:
            raise SandboxLeakError(
                f"not proved dead within {timeout} s: {', '.join(known)}. Their rows stay `cleaning`: the next "
                "lifecycle on this ledger, or `me2b reap`, goes on; at the latest their lease ends them",
                sandbox_ids=known,
            )
        return left

    def _open_rows(self) -> list[SandboxRecord]:
        """The rows of this owner that have to end with it: all that are open but the paused ones."""
        open_states = set(State) - _states.TERMINAL - {State.PAUSED}
        return self._book.records(states_=open_states, owner=self._engine.owner)

    def _end_all(self, deadline: float) -> None:
        """End every open row, and wait for that until the deadline."""
        patience = max(1.0, deadline - time.monotonic())
        background = Background()  # all at once: one that hangs must not cost the others their turn
        try:
            tickets = [row.ticket for row in self._open_rows()]
        except LedgerError:  # `_end_and_close` raises it, when this is done
            tickets = list(self._engine.made)
        for ticket in tickets:
            background.start(self._clean_in_turn, ticket, "shutdown", patience=patience)
        background.join(patience)


def _positive(name: str, value: object, *kinds: type) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:  # type: ignore[operator]
        raise ConfigError(f"{name}={value!r}: a number above 0")


def _program() -> str:
    return os.path.basename(sys.argv[0]) or "python"
