"""From a Start request to the command to run: environment, working directory, what is refused."""

from __future__ import annotations

import errno
import os.path
import re

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process.process_pb import PTY, ProcessConfig, StartRequest

from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.runtime.base import Command, GuestError, PtySize, User

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PTY_MAX = 0xFFFF  # a window size is 16 bits

_PROGRAM = re.compile(r"[A-Za-z0-9_./+-]{1,64}")

# What is short now may be there later: clients may try again. Everything else is wrong for good.
_TRANSIENT = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC}


def command_of(ctx: EnvdContext, user: User, request: StartRequest) -> Command:
    """Raises ConnectError(INVALID_ARGUMENT) for what no system could run."""
    config = request.process
    if config is None or not config.cmd:
        raise ConnectError(Code.INVALID_ARGUMENT, "no command given")
    argv = [config.cmd, *config.args]
    if any("\0" in text for text in (*argv, *config.envs.keys(), *config.envs.values())):
        raise ConnectError(Code.INVALID_ARGUMENT, "a command and its environment cannot contain a zero byte")
    if any(not key or "=" in key for key in config.envs):
        raise ConnectError(Code.INVALID_ARGUMENT, "an environment variable's name cannot be empty or contain '='")
    return Command(
        argv=argv,
        env=environment(ctx, user, dict(config.envs)),
        cwd=resolve(config.cwd or ctx.default_workdir or "", user),
        user=user,
        # Absent means yes: clients that old always expect a stdin.
        stdin=request.pty is None and (not request.has_field("stdin") or request.stdin),
        pty=None if request.pty is None else pty_size(request.pty),
    )


def program_of(config: ProcessConfig | None) -> str:
    """What may be told of a command in a log: the program's name. Arguments, and whatever a shell would expand or
    assign, may hold secrets.
    """
    if config is None:
        return ""
    shell = os.path.basename(config.cmd)
    line = config.args[-1] if shell in ("bash", "sh") and "-c" in config.args[:-1] else shell
    name = os.path.basename(next(iter(line.split()), ""))
    return name if _PROGRAM.fullmatch(name) else "a shell command"


def environment(ctx: EnvdContext, user: User, request: dict[str, str]) -> dict[str, str]:
    """The whole environment of a command; what comes later in the line wins."""
    ids = {"E2B_SANDBOX_ID": ctx.sandbox_id}
    if ctx.template_id is not None:
        ids["E2B_TEMPLATE_ID"] = ctx.template_id
    return {
        "PATH": PATH,
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
        "E2B_SANDBOX": "true",
        **ids,
        **ctx.env_vars,
        **request,
    }


def resolve(path: str, user: User) -> str:
    """An absolute path: `~` is the user's home, and relative paths start there.

    Raises ConnectError(INVALID_ARGUMENT) for `~other` and for zero bytes.
    """
    if "\0" in path:
        raise ConnectError(Code.INVALID_ARGUMENT, "path contains invalid characters")
    if path == "~" or path.startswith("~/"):
        path = user.home + path[1:]
    elif path.startswith("~"):
        raise ConnectError(
            Code.INVALID_ARGUMENT,
            f"failed to expand path '{path}' for user '{user.name}': cannot expand user-specific home dir",
        )
    # normpath keeps two leading slashes, which POSIX lets mean something else.
    return "/" + os.path.normpath(os.path.join(user.home, path)).lstrip("/")


def pty_size(pty: PTY) -> PtySize:
    size = pty.size or PTY.Size()
    return PtySize(cols=min(size.cols, PTY_MAX), rows=min(size.rows, PTY_MAX))


def start_error(config: ProcessConfig | None, error: GuestError) -> ConnectError:
    """How a failed start is told."""
    code = Code.RESOURCE_EXHAUSTED if error.errno in _TRANSIENT else Code.INVALID_ARGUMENT
    words = [] if config is None else [config.cmd, *config.args]
    return ConnectError(code, f"error starting process '{' '.join(words)}': {error.message}")


def missing_cwd(cwd: str) -> ConnectError:
    return ConnectError(Code.INVALID_ARGUMENT, f"cwd '{cwd}' does not exist")
