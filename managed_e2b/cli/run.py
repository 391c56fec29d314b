"""`me2b run -- CMD`: one command in a sandbox of its own."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, NoReturn, TextIO

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
    from managed_e2b.lifecycle import SandboxLifecycle

    envs = _variables(env or [])
    line = command[0] if len(command) == 1 else shlex.join(command)
    previous = signal.signal(signal.SIGTERM, _terminated)
    try:
        lifecycle = SandboxLifecycle(db_path=db, e2b_api_url=api_url, backend=backend)
        try:
            with lifecycle.acquire(template=template, timeout=timeout + LIFE_AFTER_COMMAND) as sandbox:
                result = sandbox.run(
                    line,
                    timeout=timeout,
                    envs=envs,
                    user=user,
                    cwd=cwd,
                    on_stdout=None if as_json else _Sink(sys.stdout),
                    on_stderr=None if as_json else _Sink(sys.stderr),
                )
                sandbox_id = sandbox.sandbox_id
        finally:
            lifecycle.shutdown()
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
    if as_json:
        print_json(_plain(sandbox_id, line, result))
    elif "\N{REPLACEMENT CHARACTER}" in result.stdout and not _is_utf8(result.stdout_bytes):
        message("the output was not all UTF-8: what was not is shown as \N{REPLACEMENT CHARACTER}")
    if result.timed_out:
        message(f"the command ran past {timeout} s and was killed with its children (--timeout)")
        raise typer.Exit(TIMED_OUT)
    raise typer.Exit(result.exit_code if result.exit_code >= 0 else 128 + signal.SIGKILL)


class _Sink:
    """Passes output on as it comes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, text: str) -> None:
        try:
            self._stream.buffer.write(text.encode())  # UTF-8 whatever the locale: it is what the command wrote
            self._stream.flush()
        except BrokenPipeError:
            # Our reader left, as `head` does. Nobody wants the rest: end as a process that SIGPIPE ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None


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
        "duration": round(result.duration, 6),
        "stdout": result.stdout,
        "stderr": result.stderr,
    }


def _terminated(number: int, _frame: FrameType | None) -> NoReturn:
    """SIGTERM leaves through every `with` and `finally`, as Ctrl-C does."""
    raise SystemExit(128 + number)
