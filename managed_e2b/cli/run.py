"""`me2b run -- CMD`: one command in a sandbox of its own."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TextIO

import typer

from managed_e2b.cli.options import DEFAULT_DB, ApiUrl, AsJson, Backend, Db
from managed_e2b.cli.output import message, print_json
from managed_e2b.errors import ValidationError
from managed_e2b.models import CommandResult

TIMED_OUT = 124
"""The exit code of `timeout(1)` for the same case."""

LIFE_AFTER_COMMAND = 60
"""Seconds of the sandbox's life beyond the command's timeout: to make it, and to kill what timed out."""


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="CMD", help="One word is a line for the shell; several are the words of one command."),
    ],
    template: Annotated[str, typer.Option("--template", "-t", help="The template of the sandbox.")] = "base",
    timeout: Annotated[
        int, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long the command may take.")
    ] = 300,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="NAME=VALUE", help="A variable of the command; repeatable."),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", help="The user to run as.")] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", metavar="DIR", help="The working directory inside.")] = None,
    db: Db = DEFAULT_DB,
    api_url: ApiUrl = None,
    backend: Backend = None,
    as_json: AsJson = False,
) -> None:
    """Run one command in a sandbox of its own, with live output, and leave nothing.

    Exits with the command's code, with 124 when it ran past --timeout. Ctrl-C and SIGTERM kill the sandbox. With --json
    the output is not shown as it comes but is part of the JSON.
    """
    line = command[0] if len(command) == 1 else shlex.join(command)
    job = _Job(template, line, timeout, _variables(env or []), user, cwd, is_live=not as_json)
    try:
        sandbox_id, result = asyncio.run(_in_a_sandbox(job, db, api_url, backend))
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    if as_json:
        print_json(_plain(sandbox_id, line, result))
    elif "\N{REPLACEMENT CHARACTER}" in result.stdout and not _is_utf8(result.stdout_bytes):
        message("the output was not all UTF-8: what was not is shown as \N{REPLACEMENT CHARACTER}")
    if result.output_lost:
        message("the connection was cut while the command ran: output may be missing; the exit code is its own")
    if result.timed_out:
        message(f"the command ran past {timeout} s and was killed with its children (--timeout)")
        raise typer.Exit(TIMED_OUT)
    raise typer.Exit(result.exit_code if result.exit_code >= 0 else 128 + signal.SIGKILL)


@dataclass(frozen=True)
class _Job:
    template: str
    line: str
    timeout: int
    envs: dict[str, str]
    user: str | None
    cwd: str | None
    is_live: bool


async def _in_a_sandbox(
    job: _Job, db: str, api_url: str | None, backend: Literal["local"] | None
) -> tuple[str, CommandResult]:
    # The async face: a signal wakes its event loop at once, while the sync SDK is deaf until the next output comes.
    from managed_e2b.lifecycle import AsyncSandboxLifecycle

    stop = _Stop()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.with_code, 128 + signal.SIGTERM)
    lifecycle = AsyncSandboxLifecycle(db_path=db, e2b_api_url=api_url, backend=backend)
    try:
        life = job.timeout + LIFE_AFTER_COMMAND
        async with lifecycle.acquire(template=job.template, timeout=life, envs=job.envs) as sandbox:
            result = await sandbox.run(
                job.line,
                timeout=job.timeout,
                user=job.user,
                cwd=job.cwd,
                on_stdout=_Sink(sys.stdout, stop) if job.is_live else None,
                on_stderr=_Sink(sys.stderr, stop) if job.is_live else None,
            )
            return sandbox.sandbox_id, result
    except asyncio.CancelledError:
        if stop.code is None:  # Ctrl-C: asyncio.run makes it a KeyboardInterrupt
            raise
        raise typer.Exit(stop.code) from None
    finally:
        await lifecycle.shutdown()


class _Stop:
    """Ends the command from outside, through every `with` and `finally`, as Ctrl-C does."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._task = asyncio.current_task()

    def with_code(self, code: int) -> None:
        if self.code is None and self._task is not None:
            self.code = code
            self._task.cancel()


class _Sink:
    """Passes output on as it comes."""

    def __init__(self, stream: TextIO, stop: _Stop) -> None:
        self._stream = stream
        self._stop = stop

    def __call__(self, text: str) -> None:
        try:
            self._stream.buffer.write(text.encode())  # UTF-8 whatever the locale: it is what the command wrote
            self._stream.flush()
        except BrokenPipeError:
            # Our reader left, as `head` does, and nobody wants the rest: end as a process that SIGPIPE ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            self._stop.with_code(128 + signal.SIGPIPE)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValidationError(f"--env {pair!r}: give NAME=VALUE")
        variables[name] = value
    return variables


def _plain(sandbox_id: str, line: str, result: CommandResult) -> dict[str, object]:
    return {
        "sandbox_id": sandbox_id,
        "command": line,
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "output_lost": result.output_lost,
        "duration": round(result.duration, 6),
        "stdout": result.stdout,
        "stderr": result.stderr,
    }
