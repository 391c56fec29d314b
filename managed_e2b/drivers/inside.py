"""The SDK's calls into a sandbox: commands and files, and what their failures tell of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import e2b
import httpx
from connectrpc.errors import ConnectError
from e2b import exceptions as sdk_errors

from ..errors import (
    BackendError,
    DeadlineExceeded,
    Me2bError,
    NotOpened,
    ProcessGone,
    SandboxNotRunning,
    SandboxUnreachableError,
    StreamBroken,
)
from .gone import combined
from .heard import heard
from .streams import Listener, Silent, follow, follow_in_thread
from .unsent import sent

NativeSandbox = e2b.Sandbox | e2b.AsyncSandbox

E = TypeVar("E", bound=Me2bError)

# Newer than the oldest SDK that is supported (2.45), which says "timeout" of a sandbox that is gone, too.
NOT_RUNNING: type[Exception] | None = getattr(sdk_errors, "SandboxNotRunningException", None)
UNREACHABLE: type[Exception] | None = getattr(sdk_errors, "SandboxUnreachableException", None)


class Inside:
    """Half of `Sdk`. A sandbox that does not answer is SandboxNotRunning when its gateway says so (a hint: the per-id
    answer of the control plane decides), and SandboxUnreachableError when nobody says anything.
    """

    endpoint: str
    _is_async: bool

    async def run(
        self,
        sandbox: NativeSandbox,
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
        """Run a command and pass on its output as bytes; its exit code, -1 when a signal ended it.

        `on_start` is told its pid once it is known to run. `timeout` in seconds, 0 for none: the sandbox ends it then.
        `opening`: seconds within which it must have begun, the SDK's request timeout by default.
        Raises NotOpened or SandboxUnreachableError (it may run or not), DeadlineExceeded, StreamBroken or
        SandboxNotRunning (it was cut off), another BackendError (it was refused), and what a callback raised.
        """
        native: Any = sandbox
        start = functools.partial(
            native.commands.run, command, background=True, envs=dict(envs), user=user, cwd=cwd, timeout=timeout
        )
        listener = Listener(on_start, on_stdout, on_stderr)
        return await self._follow("run a command", native, start, listener, opening)

    async def attach(
        self,
        sandbox: NativeSandbox,
        pid: int,
        *,
        on_start: Callable[[int], object],
        on_stdout: Callable[[bytes], object],
        on_stderr: Callable[[bytes], object],
        timeout: float,
    ) -> int:
        """Go on with a command that runs, or that ended a moment ago; as `run`. Raises ProcessGone, too."""
        native: Any = sandbox
        start = functools.partial(native.commands.connect, pid, timeout=timeout)
        return await self._follow("go on with a command", native, start, Listener(on_start, on_stdout, on_stderr))

    async def pid_of(self, sandbox: NativeSandbox, name: str, value: str) -> int | None:
        """The running command that has this environment variable, None when there is none."""
        native: Any = sandbox
        for process in await self._call_inside("list commands", native.commands.list):
            if process.envs.get(name) == value:
                return int(process.pid)
        return None

    async def write_file(self, sandbox: NativeSandbox, path: str, data: bytes, user: str | None) -> None:
        native: Any = sandbox
        await self._call_inside("write a file", native.files.write, path, data, user=user)

    async def read_file(self, sandbox: NativeSandbox, path: str, user: str | None) -> bytes:
        """Raises FileNotFoundError when there is none."""
        native: Any = sandbox
        try:
            return bytes(await self._call_inside("read a file", native.files.read, path, format="bytes", user=user))
        except BackendError as error:
            if isinstance(error.__cause__, sdk_errors.NotFoundException):
                raise FileNotFoundError(path) from error
            raise

    @staticmethod
    def blocking(sandbox: NativeSandbox) -> e2b.Sandbox:
        """The same sandbox as an object of the sync SDK, made from what this one knows. Nothing is sent."""
        if isinstance(sandbox, e2b.Sandbox):
            return sandbox
        return e2b.Sandbox(
            sandbox_id=sandbox.sandbox_id,
            sandbox_domain=sandbox.sandbox_domain,
            envd_version=sandbox._envd_version,
            envd_access_token=sandbox._envd_access_token,
            traffic_access_token=sandbox.traffic_access_token,
            connection_config=sandbox.connection_config,
        )

    @staticmethod
    def error(kind: type[E]) -> type[E]:
        """The class to raise: `kind`, and also what the SDK itself raises in that case."""
        return combined(kind)

    # -- inside ---------------------------------------------------------------------------------------------

    async def _follow(
        self, what: str, native: Any, open_: Callable[..., Any], listener: Listener, opening: float | None = None
    ) -> int:
        self._begin()
        opening = opening or native.connection_config.request_timeout  # None when its user has disabled it
        try:
            if self._is_async:
                with heard():
                    return await follow(open_, listener, opening)
            return follow_in_thread(open_, listener, opening)
        except Silent as error:
            kind = StreamBroken if listener.opened else NotOpened
            raise kind(f"cannot {what} at {self.endpoint}: {error}") from error
        except Exception as error:
            if listener.failure is not None:
                raise listener.failure from None
            raise self._of_stream(error, what, listener.opened) from error

    def _of_stream(self, error: Exception, what: str, opened: bool) -> BackendError:
        told = f"cannot {what} at {self.endpoint}: {error}"
        if not opened:
            if isinstance(error, sdk_errors.NotFoundException):
                return ProcessGone(told)
            if _is_timeout(error):
                return NotOpened(told)
            return self._of_sandbox(error, what)
        if NOT_RUNNING is not None and isinstance(error, NOT_RUNNING):
            return SandboxNotRunning(told)
        if _is_timeout(error):
            return DeadlineExceeded(told)
        return StreamBroken(told)  # whatever it was: the command did not end by it

    async def _call_inside(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin()
        try:
            return await sent(function, *args, **kwargs)
        except Exception as error:
            raise self._of_sandbox(error, what) from error

    def _of_sandbox(self, error: Exception, what: str) -> BackendError:
        told = f"cannot {what} at {self.endpoint}: {error}"
        if isinstance(error, sdk_errors.AuthenticationException):  # of envd, not of the key: no such user
            return BackendError(told, status=401)
        silent = isinstance(error, httpx.TransportError | ConnectError)
        if silent or _is_timeout(error) or (UNREACHABLE is not None and isinstance(error, UNREACHABLE)):
            return SandboxUnreachableError(told)
        return self._mapped(error, what)

    def _begin(self) -> None:
        raise NotImplementedError

    def _mapped(self, error: Exception, what: str) -> BackendError:
        raise NotImplementedError


def _is_timeout(error: Exception) -> bool:
    """A deadline that has passed, and not one of its subclasses that tell of the sandbox."""
    tell = tuple(kind for kind in (NOT_RUNNING, UNREACHABLE) if kind is not None)
    return isinstance(error, sdk_errors.TimeoutException) and not isinstance(error, tell)
