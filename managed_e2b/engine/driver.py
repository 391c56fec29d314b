"""What the engine asks of a driver: the little that differs between sync and async.

The engine is written once as `async def` and suspends only through a driver. `drivers.aio` really awaits;
every awaitable of `drivers.blocking` has finished before it returns, so that `drivers.run` takes a coroutine
of the engine to its end in one step, on the caller's own thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

from ..errors import Me2bError
from ..models import RemoteSandbox

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=Me2bError)


class Sdk(Protocol):
    """The E2B calls the engine makes. Failures are `BackendError`s; see `drivers.sdk` for the map."""

    endpoint: str

    async def create(
        self,
        *,
        template: str,
        timeout: int,
        metadata: Mapping[str, str],
        envs: Mapping[str, str],
        allow_internet_access: bool | None,
        idempotency_key: str,
    ) -> Any: ...

    async def kill(self, sandbox_id: str) -> bool: ...

    async def info(self, sandbox_id: str) -> RemoteSandbox | None: ...

    async def set_timeout(self, sandbox_id: str, seconds: int) -> bool: ...

    async def adopt(self, sandbox_id: str, seconds: int) -> Any: ...

    def pages(self, metadata: Mapping[str, str] | None = None) -> AsyncIterator[list[RemoteSandbox]]: ...

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
    ) -> int: ...

    async def attach(
        self,
        sandbox: Any,
        pid: int,
        *,
        on_start: Callable[[int], object],
        on_stdout: Callable[[bytes], object],
        on_stderr: Callable[[bytes], object],
        timeout: float,
    ) -> int: ...

    async def pid_of(self, sandbox: Any, name: str, value: str) -> int | None: ...

    async def write_file(self, sandbox: Any, path: str, data: bytes, user: str | None) -> None: ...

    async def read_file(self, sandbox: Any, path: str, user: str | None) -> bytes: ...

    def blocking(self, sandbox: Any) -> Any: ...

    def error(self, kind: type[E]) -> type[E]: ...


class Driver(Protocol):
    """How the engine waits. One instance serves one lifecycle."""

    @property
    def sdk(self) -> Sdk: ...

    async def ledger(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a short blocking function. Once begun it is never abandoned: a cancellation is raised after its end."""
        ...

    async def apart(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function that may take long, beside any event loop. A cancellation does not wait for it."""
        ...

    @property
    def told(self) -> int:
        """How often `notify` was called so far."""
        ...

    async def wait(self, timeout: float, key: str | None = None, since: int | None = None) -> None:
        """Wait until `notify` is called with this key, on whatever thread, or `timeout` seconds have passed.

        `since`, what `told` was before the caller looked: it returns at once when `notify` was called after that.
        """
        ...

    def notify(self, key: str | None = None) -> None:
        """Wake all that `wait` under this key, on both faces and in the keeper; without one: a slot may be free."""
        ...

    async def finish(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run cleanup that nothing interrupts, on a thread of its own, and wait for its end.

        It takes a blocking callable, never a coroutine: a loop that is torn down cancels every task it has,
        cleanup included, but it cannot cancel a thread. Cancellations and Ctrl-C that arrive meanwhile are
        remembered; the last one is raised when the cleanup is done, or a grace time after the first one came:
        the cleanup then goes on in the background, and `join` waits for it.
        """
        ...

    async def hasten(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """As `finish`, for a caller who has been cancelled already: it waits the grace time only.

        None when the cleanup has not ended by then; it goes on in the background.
        """
        ...

    def begin(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """As `finish`, and wait for nothing: only `join` does."""
        ...

    def join(self, timeout: float) -> bool:
        """Wait (blocking) up to `timeout` seconds for cleanup in the background; whether all of it has ended."""
        ...
