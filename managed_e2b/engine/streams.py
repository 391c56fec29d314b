"""One command, started once and followed to its true end, through cuts of its stream.

Output of a command whose stream was cut goes nowhere until somebody is attached again, so a result that went through a
cut says `output_lost`. An end is kept for 30 seconds by the sandbox; when it cannot be had any more, that is what is
said, and never an exit code that nobody has seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..errors import (
    BackendError,
    CommandLostError,
    DeadlineExceeded,
    Me2bError,
    NotOpened,
    ProcessGone,
    RateLimitedError,
    SandboxNotRunning,
    SandboxUnreachableError,
    StreamBroken,
)
from ..rules import failures
from .base import Acquired, Engine
from .endings import why_failed
from .sinks import Sink

MARK = "ME2B_COMMAND"
"""An environment variable that every process of a command inherits: by it its processes are found again."""

PATIENCE = 30.0
"""Seconds for which a sandbox that runs, or does not answer, is asked for a command again after its last sign."""

PROBE = 10.0
"""Seconds for `true`, which tells whether it was the command that was refused or the sandbox is broken."""

_LOOKS = 3
"""How often a command is looked for whose start was not answered: it may just be starting."""


class Stream:
    """A command on its way. `may_run` tells whether processes of it may be running."""

    def __init__(
        self, engine: Engine, acquired: Acquired, mark: str, out: Sink, err: Sink, timeout: float | None
    ) -> None:
        self.may_run = False
        self.output_lost = False
        self.pid: int | None = None
        self._engine = engine
        self._acquired = acquired
        self._mark = mark
        self._out = out
        self._err = err
        self._timeout = timeout
        self._started = self._seen = time.monotonic()

    async def run(self, command: str, *, envs: Mapping[str, str], user: str | None, cwd: str | None) -> int | None:
        """Start it and follow it: its exit code, -1 when a signal ended it, None when it ran past its timeout.

        Raises SandboxGoneError, SandboxUnreachableError (also when the sandbox can start nothing any more),
        CommandLostError, and another BackendError when the sandbox refuses to start this command.
        """
        self.may_run = True
        self._started = self._seen = time.monotonic()
        try:
            exit_code = await self._engine.driver.sdk.run(
                self._acquired.sandbox,
                command,
                on_start=self._begun,
                on_stdout=self._out.take,
                on_stderr=self._err.take,
                envs={**envs, MARK: self._mark},
                user=user,
                cwd=cwd,
                timeout=self._timeout or 0,
            )
            return self._ended(exit_code)
        except DeadlineExceeded as error:
            if self._is_over(0.9):
                return None
            return await self._pick_up(error)  # an older SDK's word for a sandbox that is gone
        except NotOpened as error:
            raise await self._why(error) from error
        except (StreamBroken, SandboxNotRunning, SandboxUnreachableError) as error:
            return await self._pick_up(error)
        except BackendError as error:
            self.may_run = False  # it was refused
            is_asked = self._engine.is_ours() and not isinstance(error, RateLimitedError)  # a forked child asks nobody
            if is_asked and (broken := await self._broken()) is not None:
                raise broken from error
            raise

    async def _broken(self) -> Me2bError | None:
        """Why not even `true` can be started in the sandbox, as when its shell is gone; None: it can be."""
        try:
            await self._engine.driver.sdk.run(
                self._acquired.sandbox,
                "true",
                on_start=lambda _pid: None,
                on_stdout=lambda _data: None,
                on_stderr=lambda _data: None,
                envs={},
                user=None,
                cwd=None,
                timeout=PROBE,
                opening=PROBE,
            )
        except RateLimitedError:
            return None
        except BackendError as error:
            return await why_failed(self._engine, self._acquired, error)
        return None

    def _begun(self, pid: int) -> None:
        self.pid = pid
        self._seen = time.monotonic()

    def _is_over(self, part: float = 1.0) -> bool:
        return self._timeout is not None and time.monotonic() - self._started >= self._timeout * part

    def _ended(self, exit_code: int) -> int | None:
        if exit_code == -1 and self._is_over():
            return None  # the sandbox was faster with the timeout's SIGKILL than we with the timeout
        self.may_run = False
        return exit_code

    async def _pick_up(self, cut: BackendError) -> int | None:
        """Attach again and again, until the command has ended, its end is lost, or the sandbox has ended."""
        attempt = 0
        self._seen = time.monotonic()
        while True:
            try:
                return self._ended(await self._go_on())
            except ProcessGone as error:
                self.may_run = False
                raise self._lost("its process has ended, and its exit code is not kept any more") from error
            except DeadlineExceeded:
                return None
            except BackendError as error:
                cut = error
            failure = await self._why(cut)
            is_over = self.pid is None or time.monotonic() - self._seen > PATIENCE
            if is_over or not isinstance(failure, SandboxUnreachableError):
                raise failure from cut
            if self._is_over():
                return None
            await self._engine.driver.wait(failures.backoff(attempt))
            attempt += 1

    async def _why(self, error: BackendError) -> Me2bError:
        failure = await why_failed(self._engine, self._acquired, error)
        if not isinstance(failure, SandboxUnreachableError):
            self.may_run = False  # nothing runs in a sandbox that has ended
        return failure

    async def _go_on(self) -> int:
        pid = self.pid or await self._find()
        self.output_lost = True
        left = 0.0 if self._timeout is None else max(0.001, self._started + self._timeout - time.monotonic())
        return await self._engine.driver.sdk.attach(
            self._acquired.sandbox,
            pid,
            on_start=self._begun,
            on_stdout=self._out.take,
            on_stderr=self._err.take,
            timeout=left,
        )

    async def _find(self) -> int:
        """The pid of a command whose start was not answered."""
        for attempt in range(_LOOKS):
            if attempt:
                await self._engine.driver.wait(failures.backoff(attempt, base=0.1))
            pid = await self._engine.driver.sdk.pid_of(self._acquired.sandbox, MARK, self._mark)
            if pid is not None:
                return pid
        raise self._lost("the answer to its start was cut off, and no process of it is found")

    def _lost(self, why: str) -> CommandLostError:
        return CommandLostError(
            f"the stream of a command in sandbox {self._acquired.sandbox_id} was cut, and how it ended is not known: "
            f"{why}. It was not run again",
            stdout_bytes=bytes(self._out.data),
            stderr_bytes=bytes(self._err.data),
            pid=self.pid,
        )
