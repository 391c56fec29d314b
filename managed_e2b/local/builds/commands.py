"""Commands in the sandbox of a build: run to their end, their output a line at a time."""

from __future__ import annotations

import asyncio
import codecs
import errno
import signal
from collections.abc import Callable, Mapping

from managed_e2b.local.envd.pipes import ReadEnd
from managed_e2b.local.runtime.base import Command, Exit, Guest, GuestError, GuestGone, GuestProcess, User
from managed_e2b.local.runtime.standins import PATH

COMMAND_SECONDS = 3600.0
"""As long as upstream lets a step run."""
_CHUNK = 32 * 1024
_LINE = 4096
_CAPTURED = 256  # lines
_EOF_GRACE = 0.2  # seconds after the exit for children to close the output

ROOT = User("root", 0, 0, (0,), "/", "/bin/bash")
"""For scripts of ours: an image may have no accounts."""

Output = Callable[[str, str], None]
"""Called with `stdout` or `stderr`, and a line."""


class CommandFailed(Exception):
    """The message is what upstream says of it."""


async def user_of(guest: Guest, name: str) -> User:
    """Raises CommandFailed when the image has no such user."""
    try:
        return await guest.user(name)
    except KeyError as error:
        raise CommandFailed(f"command failed: unauthenticated: invalid username: '{name}'") from error


async def run(
    guest: Guest,
    script: str,
    *,
    user: User,
    env: Mapping[str, str],
    cwd: str | None = None,
    login: bool = True,
    output: Output = lambda stream, line: None,
    seconds: float | None = COMMAND_SECONDS,
) -> None:
    """Run a script with bash. What it leaves in the background goes on.

    Raises CommandFailed when it cannot be started, fails, or takes too long (None: it may take any time).
    """
    process = await start(guest, script, user=user, env=env, cwd=cwd, login=login)
    try:
        async with asyncio.timeout(seconds):
            exit = await _carry(process, output)
    except BaseException as error:
        process.kill_tree()
        if isinstance(error, TimeoutError):
            raise CommandFailed(f"command failed: it ran longer than {seconds:g} s") from error
        raise
    finally:
        process.close()
    if guest.dead.is_set():
        raise CommandFailed("command failed: the sandbox of the build died")
    if exit.code != 0:
        raise CommandFailed(_status(exit))


async def capture(guest: Guest, script: str, *, user: User, env: Mapping[str, str], login: bool = True) -> str:
    """What a script writes to stdout. Raises CommandFailed, with what it wrote to stderr."""
    lines: dict[str, list[str]] = {"stdout": [], "stderr": []}

    def collect(stream: str, line: str) -> None:
        if len(lines[stream]) < _CAPTURED:
            lines[stream].append(line)

    try:
        await run(
            guest,
            script,
            user=user,
            env=env,
            login=login,
            output=collect,
            seconds=60,
        )
    except CommandFailed as error:
        told = " ".join(lines["stderr"])
        raise CommandFailed(f"{error}: {told}" if told else str(error)) from error
    return "\n".join(lines["stdout"])


async def start(
    guest: Guest, script: str, *, user: User, env: Mapping[str, str], cwd: str | None = None, login: bool = True
) -> GuestProcess:
    """Raises CommandFailed when it cannot be started."""
    ids = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "E2B_SANDBOX": "true"}
    argv = ["/bin/bash", *(["-l"] if login else []), "-c", script]
    place = cwd or user.home
    try:
        return await guest.spawn(Command(argv, {"PATH": PATH, **ids, **env}, place, user))
    except GuestError as error:
        if error.errno == errno.ENOENT and await _is_missing(guest, place):
            raise CommandFailed(f"command failed: invalid_argument: cwd '{place}' does not exist") from error
        raise CommandFailed(f"command failed: {error.message}") from error
    except GuestGone as error:
        raise CommandFailed("command failed: the sandbox of the build died") from error


async def _is_missing(guest: Guest, path: str) -> bool:
    try:
        await guest.call("stat", path=path)
    except GuestError:
        return True
    return False


async def _carry(process: GuestProcess, output: Output) -> Exit:
    fds = [("stdout", process.stdout_fd), ("stderr", process.stderr_fd)]
    ends = [(stream, ReadEnd(fd, _CHUNK)) for stream, fd in fds if fd is not None]
    async with asyncio.TaskGroup() as pumps:
        reading = [pumps.create_task(_lines(end, stream, output)) for stream, end in ends]
        exit = await process.wait()
        if reading:
            await asyncio.wait(reading, timeout=_EOF_GRACE)
        for _, end in ends:
            end.last_call()
    return exit


async def _lines(end: ReadEnd, stream: str, output: Output) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    while data := await end.read():
        *lines, rest = (rest + decoder.decode(data)).replace("\r", "\n").split("\n")
        if len(rest) > _LINE:
            lines, rest = [*lines, rest], ""
        for line in lines:
            if line.strip():
                output(stream, line.rstrip())
    rest += decoder.decode(b"", final=True)
    if rest.strip():
        output(stream, rest.rstrip())


def _status(exit: Exit) -> str:
    if exit.code is not None:
        return f"exit status {exit.code}"
    number = exit.signal or 0
    return f"signal: {(signal.strsignal(number) or str(number)).lower()}"
