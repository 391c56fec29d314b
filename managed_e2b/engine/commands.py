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

# $1: the mark; $2: pids that are known to belong to the command. Kills what has the mark in its environment, and
# its descendants (a sudo may clean the environment), until nothing has it: what forks meanwhile is caught by the next
# round. Prints what this user may not kill. One shell; no tool beyond grep, awk, sed and kill.
_KILL_MARKED = r"""
seen=$2
[ -z "$seen" ] || kill -9 $seen 2>/dev/null
for round in 1 2 3 4 5 6 7 8 9 10; do
  marked=$(grep -slaF "$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 | tr '\n' ' ')
  [ -n "$marked" ] || break
  found=$(cat /proc/[0-9]*/stat 2>/dev/null | awk -v seed="$marked" '
    BEGIN { n = split(seed, s); for (i = 1; i <= n; i++) dead[s[i]] = 1 }
    { pid = $1; sub(/^.*\) /, ""); parent[pid] = $2 }
    END {
      do { more = 0; for (p in parent) if (!(p in dead) && (parent[p] in dead)) { dead[p] = 1; more = 1 } } while (more)
      for (p in dead) printf "%s ", p
    }')
  seen="$seen $found"
  kill -9 $found 2>/dev/null
done
for p in $seen; do
  case $(sed -n 's/^State:[[:space:]]*//p' /proc/$p/status 2>/dev/null) in ""|Z*|X*) ;; *) printf '%s ' $p ;; esac
done
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
    if not isinstance(command, str) or not command or "\0" in command:
        raise ValidationError("run(): a command is a non-empty str, a line for bash, without NUL")
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
    except BackendError as error:
        if (failure := out.failure or err.failure) is not None:
            await _kill_marked(engine, acquired, mark, user)
            raise failure from None  # the caller's own, from a callback
        if isinstance(error, StreamBroken | SandboxNotRunning):
            raise await broken(engine, acquired, error) from error
        if not isinstance(error, DeadlineExceeded):
            raise
        if timeout is None or time.monotonic() - started < timeout * 0.9:
            raise await broken(engine, acquired, error) from error  # an older SDK's word for a sandbox that is gone
        exit_code, timed_out = -1, True
        await _kill_marked(engine, acquired, mark, user)
    finally:
        out.close()
        err.close()
    result = CommandResult(bytes(out.data), bytes(err.data), exit_code, timed_out, time.monotonic() - started)
    if check and not result.ok:
        raise _failure(command, result, timeout)
    return result


def script_command(directory: str, path: str, args: Sequence[str], interpreter: str | None) -> str:
    """The command line that runs a staged script: its interpreter by suffix, else the file itself (by its shebang)."""
    enter = f"cd {shlex.quote(directory)}"
    chosen = interpreter or _INTERPRETERS.get(PurePosixPath(path).suffix)
    quoted = " ".join(shlex.quote(part) for part in [path, *args])
    if chosen is not None:
        return f"{enter} && exec {chosen} {quoted}"
    return f"{enter} && chmod +x -- {shlex.quote(path)} && exec {quoted}"


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


async def _kill_marked(engine: Engine, acquired: Acquired, mark: str, user: str | None) -> None:
    """End a command that ran out of time with all its children. E2B itself only ends the stream.

    First as the command's own user, who may look into its processes everywhere; then as root, for what that left.
    """
    left = ""
    for killer in (user, "root"):
        words = " ".join(shlex.quote(word) for word in (_KILL_MARKED, "me2b", f"{MARK}={mark}", left))
        told, ignored = _Sink(None), _Sink(None)
        try:
            await engine.driver.sdk.run(
                acquired.sandbox,
                f"/bin/sh -c {words}",
                on_stdout=told.take,
                on_stderr=ignored.take,
                envs={},
                user=killer,
                cwd="/",
                timeout=30,
            )
        except (StreamBroken, SandboxNotRunning, DeadlineExceeded) as error:
            raise await broken(engine, acquired, error) from error
        left = told.data.decode("ascii", errors="replace").strip()
        if not left:
            return
    raise BackendError(f"a command ran past its timeout and processes {left} could not be killed: release the sandbox")


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
        self.failure: BaseException | None = None
        self._callback = callback
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, chunk: bytes) -> None:
        self.data += chunk
        self._tell(chunk, final=False)

    def close(self) -> None:
        if self.failure is None:
            self._tell(b"", final=True)

    def _tell(self, chunk: bytes, *, final: bool) -> None:
        if self._callback is None or not (text := self._decoder.decode(chunk, final)):
            return
        try:
            self._callback(text)
        except BaseException as error:
            self.failure = error
            raise
