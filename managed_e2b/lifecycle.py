"""The two faces of a lifecycle: thin, one engine below."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import TracebackType

from .base import BaseLifecycle
from .contexts import AsyncSandboxContext, SandboxContext
from .drivers import AioDriver, BlockingDriver, Wakeup
from .drivers import run as _run
from .engine import listing
from .models import ReapReport, ReconcileReport, RemoteSandbox, SandboxRecord, State

SHUTDOWN_TIMEOUT = 30.0
"""Seconds."""


class SandboxLifecycle(BaseLifecycle):
    """Sandboxes that cannot outlive their use. See `__init__` for the arguments.

    Use it as a context manager, or call `shutdown` at the end. It may be used from many threads.
    """

    def _driver(self, wakeup: Wakeup) -> BlockingDriver:
        return BlockingDriver(self._sdk(is_async=False), wakeup)

    def acquire(
        self,
        template: str | None = None,
        *,
        image: str | None = None,
        dockerfile: str | None = None,
        timeout: int = 300,
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        allow_internet_access: bool | None = None,
        acquire_timeout: float | None = None,
        keep_on_error: bool = False,
    ) -> SandboxContext:
        """A sandbox for the body of a `with`; when the block is left, in whatever way, the sandbox is ended.

        Leaving it deletes the sandbox and waits until the backend, asked for this id, answers 404. What cannot be
        proved within about 10 seconds, because the endpoint fails or wants to be left alone, raises nothing: the row
        stays `cleaning` and keeps its slot, the keeper tries again every second, `shutdown` raises what it could not
        prove either, and at the latest the lease ends it. Who is cancelled or interrupted is free within 80 ms, while
        the release goes on.

        template, image, dockerfile: what it is made from; at most one, the template "base" when none is given.
        timeout: the hard limit of its life, in whole seconds.
        metadata, envs: str to str; the metadata is kept in the ledger, `envs` (which may be secrets) is not.
        acquire_timeout: seconds to wait for a slot, and for an endpoint that answers 429; None: as long as it takes.
        keep_on_error: when the block raises an Exception, leave the sandbox (and the handle) alive, to look at what
            happened: until its timeout, or until this lifecycle is shut down or its process dies. A note on the
            exception tells the id and the time.

        Raises ValidationError here, before anything is sent; entering raises AcquireTimeoutError, BackendError
        (AuthenticationError, TemplateNotFoundError, BackendUnavailableError, SandboxCreateError). Both ends of the
        block raise LedgerError when the ledger fails; the sandbox is killed all the same.
        """
        request = self._request(
            template=template,
            image=image,
            dockerfile=dockerfile,
            timeout=timeout,
            metadata=metadata,
            envs=envs,
            allow_internet_access=allow_internet_access,
            acquire_timeout=acquire_timeout,
            keep_on_error=keep_on_error,
        )
        return SandboxContext(self._engine, request, self._check_open)

    def records(self, states: Collection[State] | None = None) -> list[SandboxRecord]:
        """The ledger's rows of this account, oldest first: those in `states`, or all."""
        return self._book.records(states_=states, account=self._engine.account)

    def list_remote(self) -> list[RemoteSandbox]:
        """What the backend lists as running or paused for this key, ours or not. A clue, never a proof."""
        return _run(listing.everything(self._engine))

    def reap(
        self,
        *,
        purge_foreign: bool = False,
        metadata: Mapping[str, str] | None = None,
        template: str | None = None,
        older_than: float | None = None,
        include_other_ledgers: bool = False,
        dry_run: bool = False,
    ) -> ReapReport:
        """End what dead owners left on this ledger and account. Live owners' sandboxes are never touched.

        purge_foreign: end also what the backend lists for this key and no live owner of this ledger has: sandboxes
            that other programs made, or whose rows have ended. Not those of other ledgers' owners, of whom nobody here
            can tell whether they live: they end with their lease.
        metadata, template, older_than: only sandboxes that have these pairs, are made from this template (by name or
            id), and were created so many seconds ago or earlier.
        include_other_ledgers: end those of other ledgers' owners, too. It is for leftovers of a ledger that is gone,
            when nobody uses that any more; `older_than` must then be a lease or more.
        dry_run: end nothing, and tell what would be.

        It is bounded in passes (`reaper_max_iter`), sandboxes and seconds; the report says where it was cut, and the
        next call goes on. Sandboxes that were paused on purpose outlive their owner. Raises ValidationError, and
        AuthenticationError with `purge_foreign`; other failures are told in the report.
        """
        return _run(
            self._reap(
                purge_foreign=purge_foreign,
                metadata=metadata,
                template=template,
                older_than=older_than,
                include_other_ledgers=include_other_ledgers,
                dry_run=dry_run,
            )
        )

    def reconcile(self) -> ReconcileReport:
        """Compare the ledger with the backend: each row by its id, and each sandbox that the backend lists by its row.

        It ends what this proves: the row of a sandbox that the backend does not know any more, unless another live
        owner has it, and a sandbox whose row has ended. No row is closed because of a list. Raises AuthenticationError.
        """
        return _run(self._reconcile())

    def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT) -> tuple[SandboxRecord, ...]:
        """Release everything, wait up to about `timeout` seconds for the proofs, and say goodbye in the ledger.

        Raises SandboxLeakError when sandboxes could not be proved dead in time, and LedgerError when the ledger fails:
        what this process knows of is killed first, and the watchdog goes on with the rest. Returns the rows of creates
        that were never answered, of which it is not known yet whether they made one; most often none. Both are left
        `cleaning`, for any reaper on this ledger, and end with their lease at the latest. May be called again: it waits
        for what the first call has begun, should that have been interrupted. In a forked child it does nothing:
        everything is the parent's.
        """
        return _run(self._close(timeout))

    def __enter__(self) -> SandboxLifecycle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


class AsyncSandboxLifecycle(BaseLifecycle):
    """The async face of SandboxLifecycle: the same names, the same contract, awaited. Not bound to one event loop."""

    def _driver(self, wakeup: Wakeup) -> AioDriver:
        return AioDriver(self._sdk(is_async=True), wakeup)

    def acquire(
        self,
        template: str | None = None,
        *,
        image: str | None = None,
        dockerfile: str | None = None,
        timeout: int = 300,
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        allow_internet_access: bool | None = None,
        acquire_timeout: float | None = None,
        keep_on_error: bool = False,
    ) -> AsyncSandboxContext:
        """See SandboxLifecycle.acquire."""
        request = self._request(
            template=template,
            image=image,
            dockerfile=dockerfile,
            timeout=timeout,
            metadata=metadata,
            envs=envs,
            allow_internet_access=allow_internet_access,
            acquire_timeout=acquire_timeout,
            keep_on_error=keep_on_error,
        )
        return AsyncSandboxContext(self._engine, request, self._check_open)

    async def records(self, states: Collection[State] | None = None) -> list[SandboxRecord]:
        """See SandboxLifecycle.records."""
        return await self._engine.driver.ledger(self._book.records, states_=states, account=self._engine.account)

    async def list_remote(self) -> list[RemoteSandbox]:
        """See SandboxLifecycle.list_remote."""
        return await listing.everything(self._engine)

    async def reap(
        self,
        *,
        purge_foreign: bool = False,
        metadata: Mapping[str, str] | None = None,
        template: str | None = None,
        older_than: float | None = None,
        include_other_ledgers: bool = False,
        dry_run: bool = False,
    ) -> ReapReport:
        """See SandboxLifecycle.reap."""
        return await self._reap(
            purge_foreign=purge_foreign,
            metadata=metadata,
            template=template,
            older_than=older_than,
            include_other_ledgers=include_other_ledgers,
            dry_run=dry_run,
        )

    async def reconcile(self) -> ReconcileReport:
        """See SandboxLifecycle.reconcile."""
        return await self._reconcile()

    async def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT) -> tuple[SandboxRecord, ...]:
        """See SandboxLifecycle.shutdown."""
        return await self._close(timeout)

    async def __aenter__(self) -> AsyncSandboxLifecycle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()
