"""`FakeProvider`: one E2B account in memory, for tests of the engine that need no server and no real time.

    clock = SteppedClock()
    provider = FakeProvider(clock)
    sdk = provider.sdk("tester")                              # what `drivers.BlockingDriver` takes for an SDK
    provider.fail("create", Fault.LOST_AFTER)                 # the next create happens, and its answer is lost
    ...
    clock.step(300)                                           # what nobody renewed is gone
    assert (provider.live, provider.peak_live) == ([], 1)     # the truth, whatever calls and lists were told

It keeps the contract of `engine.driver.Sdk`. `managed_e2b.testing.local_server` is the real thing: use that one
wherever commands, HTTP or another process matter.
"""

from __future__ import annotations

import collections
import enum
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from ..errors import (
    AuthenticationError,
    BackendError,
    BackendUnavailableError,
    Me2bError,
    RateLimitedError,
    SandboxNotRunning,
)
from ..models import RemoteSandbox
from .clock import SECOND, SteppedClock

E = TypeVar("E", bound=Me2bError)

Op = Literal["create", "kill", "info", "set_timeout", "adopt", "list"]
"""A page of a list is one call of `list`."""


class Fault(enum.Enum):
    """What goes wrong with one call."""

    REFUSED = "refused"
    """400, and nothing happened."""
    UNAUTHORIZED = "unauthorized"
    """401: the key was refused."""
    RATE_LIMITED = "rate limited"
    """429, and nothing happened."""
    UNREACHABLE = "unreachable"
    """The endpoint was not reached."""
    ERROR_BEFORE = "error before"
    """503, and nothing happened."""
    ERROR_AFTER = "error after"
    """504, and it happened."""
    LOST_BEFORE = "lost before"
    """The connection broke, and nothing happened."""
    LOST_AFTER = "lost after"
    """The connection broke, and it happened."""
    LIE = "lie"
    """Of a kill or a renewal: answered as done, and not done. Of a list: the first half is left out."""
    EMPTY = "empty"
    """Of a list: it shows nothing, and no next page."""


AFTER = frozenset({Fault.ERROR_AFTER, Fault.LOST_AFTER})
"""Faults after the effect."""

_LIES: Mapping[Fault, frozenset[str]] = {
    Fault.LIE: frozenset(
        {"kill", "set_timeout", "list"}
    ),  # what is said of one id is the truth: nothing could be proved
    Fault.EMPTY: frozenset({"list"}),
}


@dataclass(frozen=True)
class Call:
    """One call. `sandbox_id` is None for a list, and for a create that made nothing."""

    op: Op
    by: str
    sandbox_id: str | None = None
    ticket: str | None = None
    """Of a create: the `idempotency_key`."""
    fault: Fault | None = None


@dataclass
class FakeSandbox:
    """The native object that `create` and `adopt` answer with: a new one each time."""

    sandbox_id: str
    files: dict[str, bytes] = field(default_factory=dict, repr=False)


@dataclass
class _Box:
    sandbox_id: str
    template: str
    metadata: dict[str, str]
    started_at: int
    end: float
    """On the monotonic clock, seconds; while it is paused it is not looked at."""
    paused: bool = False
    files: dict[str, bytes] = field(default_factory=dict)

    def native(self) -> FakeSandbox:
        # A new one: what its holder hangs on the object must not live as long as the sandbox.
        return FakeSandbox(self.sandbox_id, self.files)


class FakeProvider:
    """One account: its sandboxes, their ends, and the faults that are to strike.

    `clock`: the provider's own. Ends are reckoned on its monotonic side, so setting it back keeps nothing alive.
    `cap`: sandboxes that may run at once; a create above it is answered by 429. Safe to use from any thread.
    """

    endpoint = "fake://provider"

    def __init__(self, clock: SteppedClock, *, cap: int | None = None, page_size: int = 100) -> None:
        self.clock = clock
        self.cap = cap
        self.page_size = page_size
        self.calls: list[Call] = []
        self.peak_live = 0
        self._lock = threading.RLock()
        self._boxes: dict[str, _Box] = {}
        self._made: dict[str, str] = {}
        self._faults: dict[str, collections.deque[Fault]] = collections.defaultdict(collections.deque)
        self._numbers = itertools.count(1)

    def sdk(self, by: str = "") -> FakeSdk:
        """What an engine's driver takes for its SDK. `by` names who calls, in `calls`."""
        return FakeSdk(self, by)

    # -- what a test scripts and looks at -------------------------------------------------------------------

    def fail(self, op: Op, *faults: Fault) -> None:
        """Let these faults strike the next calls of `op`, one each, after those that wait already.

        Raises ValueError for a lie that this operation cannot tell.
        """
        if op not in get_args(Op):
            raise ValueError(f"there is no operation {op!r}: {', '.join(get_args(Op))}")
        for fault in faults:
            if op not in _LIES.get(fault, {op}):
                raise ValueError(f"{op} cannot be answered with {fault.name}")
        with self._lock:
            self._faults[op].extend(faults)

    def calm(self) -> None:
        """Forget the faults that have not struck yet."""
        with self._lock:
            self._faults.clear()

    @property
    def live(self) -> list[str]:
        """Ids of the sandboxes that run."""
        with self._lock:
            return [sandbox_id for sandbox_id, box in self._current().items() if not box.paused]

    @property
    def paused(self) -> list[str]:
        """Ids of the sandboxes that are paused."""
        with self._lock:
            return [sandbox_id for sandbox_id, box in self._current().items() if box.paused]

    def look(self, sandbox_id: str) -> RemoteSandbox | None:
        """The truth about one id: no fault strikes here, and it is no call."""
        with self._lock:
            box = self._current().get(sandbox_id)
            return None if box is None else self._told(box)

    # -- what others do to a sandbox ------------------------------------------------------------------------

    def kill(self, sandbox_id: str) -> bool:
        """End it, as its provider or another program does. False when there is none."""
        with self._lock:
            return self._current().pop(sandbox_id, None) is not None

    def pause(self, sandbox_id: str) -> bool:
        """Pause it: it does not run, and has no end, until somebody connects to it. False when there is none."""
        with self._lock:
            box = self._current().get(sandbox_id)
            if box is not None:
                box.paused = True
            return box is not None

    # -- calls, made by `FakeSdk` ---------------------------------------------------------------------------

    def call(self, op: Op, by: str, sandbox_id: str | None, ticket: str | None, effect: Callable[[], Any]) -> Any:
        """One call: let a fault strike before it, after it, or not at all, and note it."""
        with self._lock:
            fault = self._faults[op].popleft() if self._faults[op] else None
            try:
                if fault is not None and fault not in AFTER and fault not in _LIES:
                    raise _error(fault, f"cannot {op} at {self.endpoint}")
                if fault is Fault.LIE and op != "list":
                    return True
                result = effect()
                sandbox_id = getattr(result, "sandbox_id", sandbox_id)
                if fault is not None and fault in AFTER:
                    raise _error(fault, f"cannot {op} at {self.endpoint}")
                if fault in _LIES:
                    result = [] if fault is Fault.EMPTY else result[(len(result) + 1) // 2 :]
                return result
            finally:
                self.calls.append(Call(op, by, sandbox_id, ticket, fault))

    def made(self, ticket: str, template: str, timeout: int, metadata: Mapping[str, str]) -> FakeSandbox:
        """The effect of a create. The same key makes one sandbox, and gets the same answer for ever."""
        if ticket in self._made:
            return FakeSandbox(self._made[ticket])
        if self.cap is not None and len(self.live) >= self.cap:
            raise RateLimitedError(f"maximum number of concurrent sandboxes ({self.cap}) is reached")
        sandbox_id = f"ifake{next(self._numbers):015d}"
        box = _Box(sandbox_id, template, dict(metadata), self.clock.now, self._monotonic() + timeout)
        self._boxes[sandbox_id] = box
        self._made[ticket] = sandbox_id
        self.peak_live = max(self.peak_live, len(self.live))
        return box.native()

    def extended(self, sandbox_id: str, seconds: int, *, resume: bool) -> FakeSandbox | None:
        """The effect of a renewal, or of a connect, which also resumes. None when it does not run, or is not there."""
        box = self._current().get(sandbox_id)
        if box is None or (box.paused and not resume):
            return None
        end = self._monotonic() + seconds
        box.end = end if box.paused or not resume else max(end, box.end)  # a connect shortens no life
        box.paused = False
        self.peak_live = max(self.peak_live, len(self.live))
        return box.native()

    def listed(self, metadata: Mapping[str, str] | None) -> list[RemoteSandbox]:
        """What there is, running and paused, with this metadata; the newest first."""
        wanted = (metadata or {}).items()
        return [self._told(box) for box in reversed(self._current().values()) if wanted <= box.metadata.items()]

    # -- inside ---------------------------------------------------------------------------------------------

    def _monotonic(self) -> float:
        return self.clock.read().monotonic

    def _current(self) -> dict[str, _Box]:
        now = self._monotonic()
        for sandbox_id in [name for name, box in self._boxes.items() if not box.paused and box.end <= now]:
            del self._boxes[sandbox_id]
        return self._boxes

    def _told(self, box: _Box) -> RemoteSandbox:
        return RemoteSandbox(
            sandbox_id=box.sandbox_id,
            template=box.template,
            state="paused" if box.paused else "running",
            metadata=dict(box.metadata),
            started_at=box.started_at,
            end_at=self.clock.now + round((box.end - self._monotonic()) * SECOND),
        )


class FakeSdk:
    """The calls of one owner on a `FakeProvider`: see `engine.driver.Sdk`. Commands do nothing and exit with 0."""

    def __init__(self, provider: FakeProvider, by: str) -> None:
        self.endpoint = provider.endpoint
        self._provider = provider
        self._by = by

    async def create(
        self,
        *,
        template: str,
        timeout: int,
        metadata: Mapping[str, str],
        envs: Mapping[str, str],
        allow_internet_access: bool | None,
        idempotency_key: str,
    ) -> FakeSandbox:
        provider = self._provider
        made: FakeSandbox = provider.call(
            "create",
            self._by,
            None,
            idempotency_key,
            lambda: provider.made(idempotency_key, template, timeout, metadata),
        )
        return made

    async def kill(self, sandbox_id: str) -> bool:
        return bool(self._call("kill", sandbox_id, lambda: self._provider.kill(sandbox_id)))

    async def info(self, sandbox_id: str) -> RemoteSandbox | None:
        found: RemoteSandbox | None = self._call("info", sandbox_id, lambda: self._provider.look(sandbox_id))
        return found

    async def set_timeout(self, sandbox_id: str, seconds: int) -> bool:
        extend = self._provider.extended
        return bool(self._call("set_timeout", sandbox_id, lambda: extend(sandbox_id, seconds, resume=False)))

    async def adopt(self, sandbox_id: str, seconds: int) -> FakeSandbox:
        extend = self._provider.extended
        adopted: FakeSandbox | None = self._call("adopt", sandbox_id, lambda: extend(sandbox_id, seconds, resume=True))
        if adopted is None:
            raise BackendError(f"cannot connect to a sandbox: there is no {sandbox_id}", status=404)
        return adopted

    async def pages(self, metadata: Mapping[str, str] | None = None) -> AsyncIterator[list[RemoteSandbox]]:
        provider, start, end = self._provider, 0, False
        while not end:

            def page(start: int = start) -> list[RemoteSandbox]:
                nonlocal end
                found = provider.listed(metadata)
                end = len(found) <= start + provider.page_size
                return found[start : start + provider.page_size]

            shown = self._call("list", None, page)
            end = end or not shown  # an empty page names no next one
            yield shown
            start += provider.page_size

    async def run(
        self,
        sandbox: Any,
        command: str,
        *,
        on_start: Callable[[int], object],
        on_stdout: Callable[[bytes], object],
        on_stderr: Callable[[bytes], object],
        envs: Mapping[str, str],
        user: str | None,
        cwd: str | None,
        timeout: float,
        opening: float | None = None,
    ) -> int:
        self._running(sandbox)
        on_start(1)
        return 0

    async def attach(
        self,
        sandbox: Any,
        pid: int,
        *,
        on_start: Callable[[int], object],
        on_stdout: Callable[[bytes], object],
        on_stderr: Callable[[bytes], object],
        timeout: float,
    ) -> int:
        self._running(sandbox)
        on_start(pid)
        return 0

    async def pid_of(self, sandbox: Any, name: str, value: str) -> int | None:
        self._running(sandbox)
        return None

    async def write_file(self, sandbox: Any, path: str, data: bytes, user: str | None) -> None:
        self._running(sandbox).files[path] = data

    async def read_file(self, sandbox: Any, path: str, user: str | None) -> bytes:
        files = self._running(sandbox).files
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    def blocking(self, sandbox: Any) -> Any:
        return sandbox

    def error(self, kind: type[E]) -> type[E]:
        return kind

    def _call(self, op: Op, sandbox_id: str | None, effect: Callable[[], Any]) -> Any:
        return self._provider.call(op, self._by, sandbox_id, None, effect)

    def _running(self, sandbox: Any) -> FakeSandbox:
        found = self._provider.look(sandbox.sandbox_id)
        if found is None or found.state != "running":
            raise SandboxNotRunning(f"{sandbox.sandbox_id} does not run")
        native: FakeSandbox = sandbox
        return native


def _error(fault: Fault, told: str) -> BackendError:
    match fault:
        case Fault.REFUSED:
            return BackendError(f"{told}: it refused", status=400)
        case Fault.UNAUTHORIZED:
            return AuthenticationError(f"{told}: the key was refused", status=401)
        case Fault.RATE_LIMITED:
            return RateLimitedError(f"{told}: too many requests")
        case Fault.UNREACHABLE:
            return BackendUnavailableError(f"{told}: it cannot be reached")
        case Fault.ERROR_BEFORE:
            return BackendError(f"{told}: it is busy", status=503)
        case Fault.ERROR_AFTER:
            return BackendError(f"{told}: its gateway timed out", status=504)
        case _:
            return BackendError(f"{told}: the connection was lost")
