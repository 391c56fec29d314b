"""Commands in a sandbox: their true result, as bytes, and nothing of them left running after a timeout."""

from __future__ import annotations

import logging
import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ..errors import (
    BackendError,
    CommandError,
    CommandLostError,
    CommandTimeoutError,
    SandboxNotRunning,
    SandboxUnreachableError,
)
from ..models import CommandResult
from ..rules import arguments
from .base import Acquired, Engine
from .endings import ensure_held, why_failed
from .sinks import Sink
from .streams import MARK, Stream

logger = logging.getLogger("managed_e2b")

DEFAULT_TIMEOUT = 60.0
"""Seconds, as E2B's own `commands.run`."""

KILL_OPENING = 10.0
"""Seconds for the sandbox to begin with killing a command: an agent that hangs must not hold a program that exits."""

LOOKS = (0.0, 0.5, 2.0)
"""Seconds before each look for a command that was given up and is not known to have begun: it may just be starting."""

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
    arguments.text("run", "command", command, what="a non-empty str, a line for bash")
    arguments.seconds("run", "timeout", timeout)
    arguments.flag("run", "check", check)
    arguments.optional_text("run", "cwd", cwd)
    arguments.optional_text("run", "user", user)
    variables = arguments.variables("run", "envs", envs)
    data = arguments.standard_input("run", "stdin", stdin)
    out = Sink(arguments.callback("run", "on_stdout", on_stdout))
    err = Sink(arguments.callback("run", "on_stderr", on_stderr))
    await ensure_held(engine, acquired)
    mark = uuid.uuid4().hex
    started = time.monotonic()
    stream = Stream(engine, acquired, mark, out, err, timeout)
    try:
        if data is not None:
            command = await _with_stdin(engine, acquired, command, data, user, mark)
        exit_code = await stream.run(command, envs=variables, user=user, cwd=cwd)
        if exit_code is None:
            await _kill_all_of(engine, acquired, mark, user)
            stream.may_run = False
    except (SandboxUnreachableError, CommandLostError):
        raise
    except GeneratorExit:
        stream.may_run = False  # dropped, perhaps by the collector: no thread may be begun; its sandbox is dropped, too
        raise
    except Exception:
        if stream.may_run:  # the caller's own error, from a callback
            await engine.driver.finish(engine.end_command, acquired.sandbox, mark, user, True)
            stream.may_run = False
        raise
    finally:
        if stream.may_run and engine.is_ours():  # cancelled, interrupted, or not known to have begun
            engine.driver.begin(engine.end_command, acquired.sandbox, mark, user, stream.pid is not None)
        out.close()
        err.close()
    result = CommandResult(
        bytes(out.data),
        bytes(err.data),
        -1 if exit_code is None else exit_code,
        timed_out=exit_code is None,
        duration=time.monotonic() - started,
        output_lost=stream.output_lost,
    )
    if check and not result.ok:
        raise _failure(command, result, timeout)
    return result


def script_command(path: str, args: Sequence[str], interpreter: str | None) -> str:
    """The command line that runs a staged script: its interpreter by suffix, else the file itself (by its shebang)."""
    path = arguments.path("run_script", "path", path)
    chosen = arguments.optional_text("run_script", "interpreter", interpreter)
    chosen = chosen or _INTERPRETERS.get(PurePosixPath(path).suffix)
    enter = f"cd {arguments.TASK_DIR}"
    quoted = " ".join(shlex.quote(part) for part in [path, *arguments.words("run_script", "args", args)])
    if chosen is not None:
        return f"{enter} && exec {chosen} {quoted}"
    return f"{enter} && chmod +x -- {shlex.quote(path)} && exec {quoted}"


async def _with_stdin(
    engine: Engine, acquired: Acquired, command: str, data: bytes, user: str | None, mark: str
) -> str:
    # By a file, not by the stream: a command that writes before it reads cannot block on us, whatever the size.
    path = f"/tmp/.me2b-stdin-{mark}"
    try:
        await engine.driver.sdk.write_file(acquired.sandbox, path, data, user)
    except (SandboxNotRunning, SandboxUnreachableError) as error:
        raise await why_failed(engine, acquired, error) from error
    return f"exec < {path}; rm -f {path}\n{command}"


async def _kill_all_of(engine: Engine, acquired: Acquired, mark: str, user: str | None) -> None:
    """End a command that ran out of time with all its children. E2B itself only ends the stream."""
    try:
        left = await _kill_marked(engine, acquired.sandbox, mark, user)
    except BackendError as error:
        raise await why_failed(engine, acquired, error) from error
    if left:
        raise BackendError(
            f"a command ran past its timeout and processes {left} could not be killed: release the sandbox"
        )


async def end(engine: Engine, sandbox: Any, mark: str, user: str | None, begun: bool) -> None:
    """End a command that nobody waits for any more, with all its children; in the background.

    `begun=False`: it is not known to have started, so it is looked for again: it may have started a moment later.
    """
    for pause in (0.0,) if begun else LOOKS:
        await engine.driver.wait(pause)
        try:
            left = await _kill_marked(engine, sandbox, mark, user)
        except SandboxNotRunning:
            return  # nor does anything in it
        except BackendError as error:
            logger.warning("a command that was given up may go on until its sandbox is released: %s", error)
            return
        if left:
            logger.warning("a command was given up, and its processes %s could not be killed", left)


async def _kill_marked(engine: Engine, sandbox: Any, mark: str, user: str | None) -> str:
    """SIGKILL to all processes that carry a mark, and their children. The pids of those that still live.

    First as the command's own user, who may look into its processes everywhere; then as root, for what that left.
    """
    left = ""
    for killer in (user, "root"):
        words = " ".join(shlex.quote(word) for word in (_KILL_MARKED, "me2b", f"{MARK}={mark}", left))
        told, ignored = Sink(), Sink()
        await engine.driver.sdk.run(
            sandbox,
            f"/bin/sh -c {words}",
            on_start=lambda _pid: None,
            on_stdout=told.take,
            on_stderr=ignored.take,
            envs={},
            user=killer,
            cwd="/",
            timeout=30,
            opening=KILL_OPENING,
        )
        left = told.data.decode("ascii", errors="replace").strip()
        if not left:
            break
    return left


def _failure(command: str, result: CommandResult, timeout: float | None) -> CommandError:
    shown = command if len(command) <= 200 else command[:197] + "..."
    tail = result.stderr[-2000:].strip()
    told = f"\n{tail}" if tail else ""
    if result.timed_out:
        return CommandTimeoutError(f"{shown!r} ran past its timeout of {timeout} s and was killed{told}", result=result)
    return CommandError(f"{shown!r} exited with {result.exit_code}{told}", result=result)
