"""A world on one thread and on a clock of its own: owners of one account, on two hosts, over a real ledger.

The engine is the real one, on the blocking driver; only what it waits on is not: a wait steps the clock, during which
the keepers of all owners do their rounds, and the provider is a fake. So hours pass in milliseconds, a process can die
or stop at any boundary of its path, and what happens is the same every time.
"""

from __future__ import annotations

import functools
import gc
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from managed_e2b.drivers import BlockingDriver, Wakeup, run
from managed_e2b.engine import base, foreign, host, patience, reap, release, waiting
from managed_e2b.engine.acquire import acquire, validated
from managed_e2b.engine.base import OWNER, Acquired, Engine
from managed_e2b.engine.keeper import Keeper
from managed_e2b.engine.reconcile import reconcile
from managed_e2b.errors import BackendError
from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.models import Host, ReapReport, State
from managed_e2b.rules import leases
from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.limits import Caps
from managed_e2b.testing import FakeProvider, SteppedClock
from managed_e2b.testing.provider import FakeSandbox
from managed_e2b.testing.steps import Steps

T = TypeVar("T")

HERE = Host("machine", "boot", "pid:[1]")
ELSEWHERE = Host("another machine", "its boot", "pid:[1]")
ACCOUNT = "account"
LIMIT = 3
MAX_CONCURRENT = 2
LEASE = 60
STALE = 120
ROUND = leases.beat_interval(LEASE, STALE)
"""Seconds between two rounds of a keeper."""


class Died(BaseException):
    """The process of an owner is no more: nothing of it runs any further."""


class Interrupted(BaseException):
    """Ctrl-C, or a cancellation."""


class Provider(FakeProvider):
    """It also knows which creates came from an owner that had been taken for dead: its row was no longer its own."""

    def __init__(self, world: World) -> None:
        super().__init__(world.clock, page_size=2)
        self._world = world
        self.late: set[str] = set()
        self.peak_counted = 0

    def made(self, ticket: str, template: str, timeout: int, metadata: Mapping[str, str]) -> FakeSandbox:
        made = super().made(ticket, template, timeout, metadata)
        row = self._world.book.record(ticket)
        if row is None or row.state is not State.CREATING:
            self.late.add(made.sandbox_id)
        self.peak_counted = max(self.peak_counted, len(set(self.live) - self.late))
        return made


class World:
    """See the module."""

    def __init__(self, db: Path) -> None:
        self.clock = SteppedClock()
        self.set_by = 0.0
        """Seconds by which somebody has set the ledger's clock. The provider's and the monotonic ones are not set."""
        self.book = Ledger(open_engine(db), lambda: self.clock.now + round(self.set_by * SECOND))
        self.provider = Provider(self)
        self.owners: list[Owner] = []
        self.harmed: set[str] = set()
        """Sandboxes that somebody paused or killed, whose owner was suspended, or whose renewal failed."""
        self._pids = itertools.count(1000)
        self._acting: list[Owner] = []
        self._next_round = self.now + ROUND
        self._patches = ExitStack()
        # The collector is part of the story: what it finds abandoned is released. So it runs when it is told to.
        gc.collect()
        gc.freeze()
        gc.disable()
        self._patches.callback(gc.enable)
        self._patches.callback(gc.unfreeze)
        virtual = SimpleNamespace(monotonic=lambda: self.now)
        for module in (release, waiting, patience, reap, foreign):
            self._patches.enter_context(mock.patch.object(module, "time", virtual))
        tickets = (SimpleNamespace(hex=f"{number:032x}") for number in itertools.count(1))
        self._patches.enter_context(mock.patch.object(base, "uuid", SimpleNamespace(uuid4=lambda: next(tickets))))
        self._patches.enter_context(mock.patch.object(host, "here", self._here))
        self._patches.enter_context(mock.patch.object(host, "steady", virtual.monotonic))
        self._patches.enter_context(mock.patch.object(host, "process_started", self._process_started))

    def close(self) -> None:
        self._patches.close()
        self.book.close()

    @property
    def now(self) -> float:
        """Seconds, on the clock that nobody sets."""
        return self.clock.read().monotonic

    @property
    def living(self) -> list[Owner]:
        return [owner for owner in self.owners if not owner.dead]

    def open_owner(self, where: Host = HERE) -> Owner:
        owner = Owner(self, f"owner{len(self.owners)}", where, next(self._pids))
        self.owners.append(owner)
        return owner

    @contextmanager
    def acting(self, owner: Owner) -> Iterator[None]:
        """What is asked of the host meanwhile is asked by this owner."""
        self._acting.append(owner)
        try:
            yield
        finally:
            self._acting.pop()

    def running_of(self, owner: Owner) -> set[str]:
        """What an owner has made and the provider runs."""
        found = [self.provider.look(sandbox_id) for sandbox_id in self.provider.live]
        return {item.sandbox_id for item in found if item is not None and item.metadata[OWNER] == owner.name}

    def sleep(self, seconds: float) -> None:
        """Time passes, and the keepers of all who live do their rounds. A keeper's own waits take no time."""
        until = self.now + max(seconds, 0.001)
        while self._next_round <= until:
            self.clock.step(max(0.0, self._next_round - self.now))
            self._next_round += ROUND
            for owner in self.living:
                owner.round()
        self.clock.step(max(0.0, until - self.now))

    def _here(self) -> Host:
        return self._acting[-1].host

    def _process_started(self, pid: int) -> int | None:
        return next((1 for owner in self.living if owner.pid == pid), None)


class Driver(BlockingDriver):
    """Its waits are the world's."""

    def __init__(self, world: World, owner: str) -> None:
        super().__init__(world.provider.sdk(owner), Wakeup())
        self._world = world

    async def wait(self, timeout: float, key: str | None = None, since: int | None = None) -> None:
        if since is None or since == self.told:
            self._world.sleep(timeout)


class Rounds(Keeper):
    """A keeper without its threads, and without its patience for errors that nobody expected."""

    def round(self) -> None:
        self._beat()
        self._renew()
        self._sweep()

    def _guarded(self, item: str, step: Callable[[], object]) -> None:
        try:
            step()
        except BackendError:
            return  # it will try again


class Held:
    """A sandbox in somebody's hands: inside its `with` block."""

    def __init__(self, owner: Owner, context: Any, acquired: Acquired, timeout: int, since: float) -> None:
        self.owner = owner
        self.context = context
        self.ticket = acquired.ticket
        self.sandbox_id = acquired.sandbox_id
        self.until = since + timeout
        """It must live as long, on the monotonic clock, unless it is harmed."""

    @property
    def harmed(self) -> bool:
        return self.sandbox_id in self.owner.world.harmed


class Owner:
    """One lifecycle in a process of its own: the face's engine, the cleaner's, the keeper, and what it holds."""

    def __init__(self, world: World, name: str, where: Host, pid: int) -> None:
        self.world, self.name, self.host, self.pid = world, name, where, pid
        self.dead = False
        self.suspended = False
        self.stood_still = False
        """It was suspended, ever: elsewhere it may have been taken for dead."""
        self.held: list[Held] = []
        self._fuse: int | None = None
        self._event: Callable[[], object] = lambda: None
        self._busy: set[str] = set()
        self._keeping = False
        make = functools.partial(
            Engine,
            book=world.book,
            account=ACCOUNT,
            owner=name,
            caps=Caps(MAX_CONCURRENT, account_limit=LIMIT),
            lease=LEASE,
            clean=self._clean,
            calls=patience.Hold(),
        )
        self._cleaner = make(Driver(world, name))
        self._engine = make(Driver(world, name), abandoned=self._cleaner.abandoned, began=self._cleaner.began)
        self._keeper = Rounds(self._cleaner, run, stale_after=STALE, reaps=False)
        world.book.open_owner(name, where, pid, 1, name, STALE * SECOND, MAX_CONCURRENT)
        self.steps = Steps(self._at)
        self.steps.watch(self)

    # -- what its program does: each raises Died when it dies on the way -------------------------------------

    def acquire(self, timeout: int, patience: float) -> Held:
        request = validated(template="base", timeout=timeout, acquire_timeout=patience)
        since = self.world.now
        context = acquire(self._engine, request, "test")
        held = Held(self, context, self._do(context.__aenter__()), timeout, since)
        self.held.append(held)
        return held

    def leave(self, held: Held) -> None:
        """Leave its `with` block."""
        self.held.remove(held)
        self._do(held.context.__aexit__(None, None, None))

    def drop(self, held: Held) -> None:
        """Forget it: nobody holds the context, the handle or the native object any more."""
        self.held.remove(held)
        held.context = None
        gc.collect()  # an error on its way may have left a cycle
        assert held.ticket in self._engine.abandoned

    def reap(self, max_iter: int = 1) -> ReapReport:
        report: ReapReport = self._do(reap.reap(self._cleaner, max_iter=max_iter, bounds=self._bounds()))
        return report

    def reconcile(self) -> None:
        self._do(reconcile(self._cleaner, one_backend=True, bounds=self._bounds()))

    def round(self) -> None:
        """The keeper's. A process that stands still does none."""
        if self.suspended or self._keeping:
            return
        self._keeping = True
        try:
            with self.world.acting(self):
                self._keeper.round()
        except Died:
            assert self.dead
        finally:
            self._keeping = False

    # -- what happens to its process ------------------------------------------------------------------------

    def after(self, steps: int, event: Callable[[], object]) -> None:
        """Let something happen at a boundary of what it does next: before or after a call, so many on."""
        self._fuse, self._event = steps, event

    def undisturbed(self) -> None:
        self._fuse = None

    def die(self) -> None:
        """As by SIGKILL: not even a `finally` of it does anything."""
        self.dead = True
        self.held.clear()
        self._engine.pid = self._cleaner.pid = -1

    def stop(self, seconds: float) -> None:
        """As by SIGSTOP, and SIGCONT after so many seconds, in which the others look for dead owners."""
        self.suspended = self.stood_still = True
        self.world.harmed |= self.world.running_of(self)
        self.world.sleep(seconds)
        for other in self.world.living:
            if other is not self and not other.suspended:
                other.reap()
        self.world.sleep(ROUND)
        self.suspended = False

    def interrupt(self) -> None:
        if threading.current_thread() is threading.main_thread():  # where the interpreter raises it, and a loop cancels
            raise Interrupted

    # -- inside ---------------------------------------------------------------------------------------------

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self.world.acting(self):
            return run(coroutine)

    def _clean(self, ticket: str, reason: str, **options: Any) -> bool:
        if ticket in self._busy:
            return False
        self._busy.add(ticket)
        try:
            return run(release.release(self._cleaner, ticket, reason, **options))
        finally:
            self._busy.discard(ticket)

    def _bounds(self) -> reap.Bounds:
        return reap.Bounds(started=self.world.now)

    def _at(self, _number: int) -> None:
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse < 0:
                self._fuse = None
                self._event()
        if self.dead:
            raise Died
