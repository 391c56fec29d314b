"""Commands in a sandbox: their true result, as bytes, and nothing of them left running after a timeout."""

from __future__ import annotations

import codecs
import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ..errors import (
    BackendError,
    CommandError,
    CommandTimeoutError,
    DeadlineExceeded,
    SandboxGoneError,
    SandboxNotRunning,
    StreamBroken,
    ValidationError,
)
from ..models import CommandResult
from .base import Acquired, Engine

DEFAULT_TIMEOUT = 60.0
"""Seconds, as E2B's own `commands.run`."""

MARK = "ME2B_COMMAND"
"""An environment variable that every process of a command inherits: by it its children are found again."""

_INTERPRETERS = {".py": "python3", ".sh": "bash", ".bash": "bash", ".js": "node", ".rb": "ruby", ".pl": "perl"}

# Kills every process that has the mark in its environment, and their descendants (sudo cleans the environment),
# until none is found: what forks while it runs is caught by the next round. One shell, no tool beyond
# grep, awk and kill.
_KILL_MARKED = r"""
for round in 1 2 3 4 5 6 7 8 9 10; do
  marked=$(grep -slaF "$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 | tr '\n' ' ')
  [ -n "$marked" ] || exit 0
  all=$(cat /proc/[0-9]*/stat 2>/dev/null | awk -v seed="$marked" '
    BEGIN { n = split(seed, s); for (i = 1; i <= n; i++) dead[s[i]] = 1 }
    { pid = $1; sub(/^.*\) /, ""); parent[pid] = $2 }
    END {
      do { more = 0; for (p in parent) if (!(p in dead) && (parent[p] in dead)) { dead[p] = 1; more = 1 } } while (more)
      for (p in dead) print p
    }')
  kill -9 $all 2>/dev/null
done
exit 1
"""


async def run(
    engine: Engine,
    acquired: Acquired,
    command: str,
    *,
    timeout: float | None,
    check: bool,
    cwd: str | None,
    envs: Mapping[str, str] | None,
    user: str | None,
    stdin: str | bytes | None,
    on_stdout: Callable[[str], object] | None,
    on_stderr: Callable[[str], object] | None,
) -> CommandResult:
    """See `SandboxHandle.run`."""
    if timeout is not None and timeout <= 0:
        raise ValidationError(f"run(timeout={timeout!r}): seconds above 0, or None for no limit of its own")
    if not command or "\0" in command:
        raise ValidationError("run(): a command is a non-empty line for bash, without NUL")
    await ensure_held(engine, acquired)
    out, err = _Sink(on_stdout), _Sink(on_stderr)
    mark = uuid.uuid4().hex
    started = time.monotonic()
    timed_out = False
    try:
        if stdin is not None:
            command = await _with_stdin(engine, acquired, command, stdin, user, mark)
        exit_code = await engine.driver.sdk.run(
            acquired.sandbox,
            command,
            on_stdout=out.take,
            on_stderr=err.take,
            envs={**(envs or {}), MARK: mark},
            user=user,
            cwd=cwd,
            timeout=timeout or 0,
        )
    except DeadlineExceeded:
        if timeout is None or time.monotonic() - started < timeout * 0.9:
            raise
        exit_code, timed_out = -1, True
        await _kill_marked(engine, acquired, mark)
    except (StreamBroken, SandboxNotRunning) as error:
        raise await broken(engine, acquired, error) from error
    finally:
        out.close()
        err.close()
    result = CommandResult(bytes(out.data), bytes(err.data), exit_code, timed_out, time.monotonic() - started)
    if check and not result.ok:
        raise _failure(command, result, timeout)
    return result


def script_command(path: str, args: Sequence[str], interpreter: str | None) -> str:
    """The command line that runs a staged script: its interpreter by suffix, else the file itself (by its shebang)."""
    chosen = interpreter or _INTERPRETERS.get(PurePosixPath(path).suffix)
    quoted = " ".join(shlex.quote(part) for part in [path, *args])
    if chosen is not None:
        return f"exec {chosen} {quoted}"
    return f"chmod +x -- {shlex.quote(path)} && exec {quoted}"


async def ensure_held(engine: Engine, acquired: Acquired) -> None:
    """Raise SandboxGoneError when the handle was released, with the ledger's reason."""
    if acquired.released:
        raise await gone(engine, acquired)


async def gone(engine: Engine, acquired: Acquired) -> SandboxGoneError:
    record = await engine.driver.ledger(engine.book.record, acquired.ticket)
    reason = record.reason if record is not None else None
    return SandboxGoneError(
        f"sandbox {acquired.sandbox_id} is not there any more: {reason or 'killed or expired at the backend'}",
        sandbox_id=acquired.sandbox_id,
        reason=reason,
    )


async def broken(engine: Engine, acquired: Acquired, error: BackendError) -> SandboxGoneError | BackendError:
    """What a broken stream means: gone only if the per-id answer says so, else the error as it came."""
    if await engine.driver.sdk.info(acquired.sandbox_id) is None:
        return await gone(engine, acquired)
    return error


async def _with_stdin(
    engine: Engine, acquired: Acquired, command: str, stdin: str | bytes, user: str | None, mark: str
) -> str:
    # By a file, not by the stream: a command that writes before it reads cannot block on us, whatever the size.
    path = f"/tmp/.me2b-stdin-{mark}"
    data = stdin.encode() if isinstance(stdin, str) else stdin
    await engine.driver.sdk.write_file(acquired.sandbox, path, data, user)
    return f"exec < {path}; rm -f {path}\n{command}"


async def _kill_marked(engine: Engine, acquired: Acquired, mark: str) -> None:
    """End a command that ran out of time with all its children. E2B itself only ends the stream."""
    script = f"/bin/sh -c {shlex.quote(_KILL_MARKED)} me2b {shlex.quote(f'{MARK}={mark}')}"
    ignore = _Sink(None)
    try:
        left = await engine.driver.sdk.run(
            acquired.sandbox,
            script,
            on_stdout=ignore.take,
            on_stderr=ignore.take,
            envs={},
            user="root",
            cwd="/",
            timeout=30,
        )
    except (StreamBroken, SandboxNotRunning) as error:
        raise await broken(engine, acquired, error) from error
    if left:
        raise BackendError("a command ran past its timeout and its processes could not be killed: release the sandbox")


def _failure(command: str, result: CommandResult, timeout: float | None) -> CommandError:
    shown = command if len(command) <= 200 else command[:197] + "..."
    tail = result.stderr[-2000:].strip()
    told = f"\n{tail}" if tail else ""
    if result.timed_out:
        return CommandTimeoutError(f"{shown!r} ran past its timeout of {timeout} s and was killed{told}", result=result)
    return CommandError(f"{shown!r} exited with {result.exit_code}{told}", result=result)


class _Sink:
    """Collects one stream's bytes, and tells them as text to a callback, whole characters only."""

    def __init__(self, callback: Callable[[str], Any] | None) -> None:
        self.data = bytearray()
        self._callback = callback
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, chunk: bytes) -> None:
        self.data += chunk
        if self._callback is not None and (text := self._decoder.decode(chunk)):
            self._callback(text)

    def close(self) -> None:
        if self._callback is not None and (text := self._decoder.decode(b"", final=True)):
            self._callback(text)
