"""The two faces of a sandbox in the caller's hands: the same methods, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import e2b

from .drivers import run as _run
from .engine import commands, staging
from .engine.base import Acquired, Engine
from .models import CommandResult

Content: TypeAlias = str | bytes | Path
"""What can be staged in: text (as UTF-8), bytes, or a file of the caller's."""

Tell: TypeAlias = Callable[[str], object]
"""Is told output as it comes: text, whole characters."""


class SandboxHandle:
    """A running sandbox, held. Made by `SandboxLifecycle.acquire`; it may be used from several threads.

    Every method raises a SandboxGoneError when the sandbox cannot be used any more: its class and its fields say how it
    ended. Where nobody knows that it has, SandboxUnreachableError. Both are also the SDK's exceptions for the case.
    """

    def __init__(self, engine: Engine, acquired: Acquired) -> None:
        self._engine = engine
        self._acquired = acquired

    @property
    def sandbox(self) -> e2b.Sandbox:
        """The native object of the E2B SDK. It is not told when the sandbox is released."""
        sandbox: e2b.Sandbox = self._acquired.sandbox
        return sandbox

    @property
    def sandbox_id(self) -> str:
        """The backend's id of it."""
        return self._acquired.sandbox_id

    @property
    def ticket(self) -> str:
        """The ledger's id of it."""
        return self._acquired.ticket

    def run(
        self,
        command: str,
        *,
        timeout: float | None = commands.DEFAULT_TIMEOUT,
        check: bool = False,
        cwd: str | None = None,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Tell | None = None,
        on_stderr: Tell | None = None,
    ) -> CommandResult:
        """Run a line of bash and wait for its end.

        A non-zero exit is a result, not an exception, unless `check` (then CommandError). A command that runs
        past `timeout` seconds (None: no limit of its own) is killed with all its children, and its result says
        `timed_out` (CommandTimeoutError with `check`). Output is kept as bytes; callbacks are told it as text.

        It is run once. When the connection to it is cut it is picked up again, and the result says `output_lost`;
        CommandLostError when how it ended cannot be known any more. A call that is cancelled or interrupted returns at
        once, and the command is killed with its children in the background.
        """
        return _run(
            commands.run(
                self._engine,
                self._acquired,
                command,
                timeout=timeout,
                check=check,
                cwd=cwd,
                envs=envs,
                user=user,
                stdin=stdin,
                on_stdout=on_stdout,
                on_stderr=on_stderr,
            )
        )

    def run_script(
        self,
        path: str,
        args: Sequence[str] = (),
        *,
        interpreter: str | None = None,
        timeout: float | None = commands.DEFAULT_TIMEOUT,
        check: bool = False,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Tell | None = None,
        on_stderr: Tell | None = None,
    ) -> CommandResult:
        """Run a staged script in /task, with arguments that no shell touches.

        The interpreter is chosen by suffix (.py, .sh, .js, …); a script with another name runs by its `#!` line.
        """
        line = commands.script_command(path, args, interpreter)
        return self.run(
            line,
            timeout=timeout,
            check=check,
            envs=envs,
            user=user,
            stdin=stdin,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )

    def stage_in(self, files: Mapping[str, Content], *, user: str | None = None) -> None:
        """Write files, named relative to /task. Raises StageError, naming the file."""
        _run(staging.stage_in(self._engine, self._acquired, files, user))

    def stage_out(self, paths: Iterable[str], *, user: str | None = None) -> dict[str, bytes]:
        """Read files, named relative to /task, into memory. Raises StageError, naming the file."""
        return _run(staging.stage_out(self._engine, self._acquired, paths, user))

    def __repr__(self) -> str:
        return f"<SandboxHandle {self.sandbox_id}>"


class AsyncSandboxHandle:
    """The async face of SandboxHandle: the same names, the same contract, awaited."""

    def __init__(self, engine: Engine, acquired: Acquired) -> None:
        self._engine = engine
        self._acquired = acquired

    @property
    def sandbox(self) -> e2b.AsyncSandbox:
        """The native object of the E2B SDK. It is not told when the sandbox is released."""
        sandbox: e2b.AsyncSandbox = self._acquired.sandbox
        return sandbox

    @property
    def sandbox_id(self) -> str:
        """The backend's id of it."""
        return self._acquired.sandbox_id

    @property
    def ticket(self) -> str:
        """The ledger's id of it."""
        return self._acquired.ticket

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = commands.DEFAULT_TIMEOUT,
        check: bool = False,
        cwd: str | None = None,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Tell | None = None,
        on_stderr: Tell | None = None,
    ) -> CommandResult:
        """See SandboxHandle.run. The callbacks are called on the event loop's thread."""
        return await commands.run(
            self._engine,
            self._acquired,
            command,
            timeout=timeout,
            check=check,
            cwd=cwd,
            envs=envs,
            user=user,
            stdin=stdin,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )

    async def run_script(
        self,
        path: str,
        args: Sequence[str] = (),
        *,
        interpreter: str | None = None,
        timeout: float | None = commands.DEFAULT_TIMEOUT,
        check: bool = False,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Tell | None = None,
        on_stderr: Tell | None = None,
    ) -> CommandResult:
        """See SandboxHandle.run_script."""
        line = commands.script_command(path, args, interpreter)
        return await self.run(
            line,
            timeout=timeout,
            check=check,
            envs=envs,
            user=user,
            stdin=stdin,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
        )

    async def stage_in(self, files: Mapping[str, Content], *, user: str | None = None) -> None:
        """See SandboxHandle.stage_in."""
        await staging.stage_in(self._engine, self._acquired, files, user)

    async def stage_out(self, paths: Iterable[str], *, user: str | None = None) -> dict[str, bytes]:
        """See SandboxHandle.stage_out."""
        return await staging.stage_out(self._engine, self._acquired, paths, user)

    def __repr__(self) -> str:
        return f"<AsyncSandboxHandle {self.sandbox_id}>"
