"""What the spawner's forks do: enter a sandbox and become a command of it, or look at it from within and report.

A fork tells its result through a SEQPACKET socket, one JSON object a message with descriptors beside it, and never
returns. Standard library only. After `enter` the host's files are out of sight, so nothing may be imported any more.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from managed_e2b.local.runtime import channel, linux, seccomp
from managed_e2b.local.runtime.confine import Confinement

INSIDE = linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
INSIDE |= linux.CLONE_NEWNET
_ID_LIMIT = 2**32 - 1  # -1 to the kernel: "leave as it is"
OOM_SCORE = 500  # a sandbox goes before the server and before what else runs on the host


@dataclass(frozen=True)
class Job:
    """One command, as it came over the wire and was checked."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    uid: int
    gid: int
    groups: list[int]
    stdin: bool
    pty: tuple[int, int] | None  # columns, rows

    @classmethod
    def parse(cls, args: dict[str, Any]) -> Job:
        """Raises ValueError, KeyError or TypeError for anything that is not a command."""
        argv, env, cwd, pty = args["argv"], args["env"], args["cwd"], args["pty"]
        if not argv or not all(_is_text(word) for word in argv):
            raise ValueError("argv must be a list of strings without NUL characters")
        if not all(_is_text(key) and key and "=" not in key and _is_text(value) for key, value in env.items()):
            raise ValueError("env must map names to strings without NUL characters")
        if not (_is_text(cwd) and cwd.startswith("/")):
            raise ValueError("cwd must be an absolute path")
        ids = [args["uid"], args["gid"], *args["groups"]]
        if not all(isinstance(number, int) and 0 <= number < _ID_LIMIT for number in ids):
            raise ValueError("an id is out of range")
        size = (int(pty[0]), int(pty[1])) if pty else None
        return cls(list(argv), dict(env), cwd, ids[0], ids[1], ids[2:], bool(args["stdin"]), size)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


class StepError(OSError):
    """A system call of a fork failed: which one, for people and for the server's error mapping."""

    def __init__(self, step: str, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror or str(cause))
        self.step = step


@contextlib.contextmanager
def step(name: str) -> Any:
    try:
        yield
    except OSError as error:
        raise StepError(name, error) from error


def fork(run: Callable[[], None], report: socket.socket | None = None) -> int:
    """Fork; the child runs `run` and ends, and its failure goes to `report`. Returns the child's pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        if report_failure(run, report):
            status = 0
    finally:
        os._exit(status)


def report_failure(run: Callable[[], None], report: socket.socket | None) -> bool:
    """Call `run`; its failure goes to `report`. For the end of a process: there is no caller who could see it."""
    try:
        run()
    except OSError as error:
        body = failure(error)
    except Exception as error:  # noqa: BLE001 - see above
        body = {"errno": 0, "message": f"{type(error).__name__}: {error}", "step": "spawner"}
    else:
        return True
    if report is not None:
        _tell_if_anybody_listens(report, body)
    return False


def failure(error: OSError) -> dict[str, Any]:
    return {
        "errno": error.errno or 0,
        "message": error.strerror or str(error),
        "step": getattr(error, "step", "spawner"),
    }


def tell(report: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Report to the spawner. Raises OSError when that is gone, or too many descriptors are on their way to it."""
    report.sendmsg([json.dumps(message).encode()], channel.ancillary(fds), socket.MSG_NOSIGNAL)


def _tell_if_anybody_listens(report: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the end of this process in any case
        tell(report, message)


def keep_only(fds: Sequence[int]) -> None:
    """Close every descriptor above 2 but these: a fork of the spawner holds what belongs to other sandboxes."""
    start = 3
    for fd in sorted(fds):
        if fd > start:
            linux.close_range(start, fd - 1)
        start = max(start, fd + 1)
    linux.close_range(start, linux.LAST_DESCRIPTOR)


def detach_signals() -> None:
    """A signal to a fork must not wake the spawner. Else they are as `spawner.main` made them: plain."""
    signal.set_wakeup_fd(-1)


def seal_imports() -> None:
    """From here on an import can only fail: it would run a file of the sandbox in a process of ours."""
    sys.meta_path = []


def enter(pidfd: int, namespaces: int) -> None:
    """Join the namespaces of a sandbox's first process, as its root with all capabilities over them."""
    linux.set_dumpable(False)
    seal_imports()
    with step("setns"):
        linux.setns(pidfd, namespaces)
    become_root()


def become_root() -> None:
    """Root of the user namespace just entered: the id of the host that we still have must not go in."""
    # With one id, an ordinary user may not call setgroups: the groups stay, and lead to nothing that is in there.
    with contextlib.suppress(PermissionError):
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def become_limited(confinement: Confinement) -> None:
    """What a process of a sandbox does first, while it can still see what holds it."""
    detach_signals()
    with contextlib.suppress(OSError):  # a host may forbid it; it only orders who dies first when memory ends
        write_text("/proc/self/oom_score_adj", str(OOM_SCORE))
    with step("limits"):
        confinement.join()


def run_command(pidfd: int, job: Job, report: socket.socket, confinement: Confinement) -> None:
    """After `become_limited`: enter, become the command's user, start it in the pid namespace in there, tell, and end.

    The command is this process's child and so becomes the spawner's. This process itself is not in the pid namespace:
    nothing inside can see it, and what shares its memory until execve is as little dumpable as it is.
    """
    keep_only([pidfd, report.fileno()])
    own = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the sandbox's /proc does not have us
    enter(pidfd, INSIDE)
    # A namespace that tells who belongs to this command: every descendant has it, and none can leave it.
    with step("unshare"):
        linux.unshare(linux.CLONE_NEWCGROUP)
    marker = os.open("ns/cgroup", os.O_RDONLY | os.O_CLOEXEC, dir_fd=own)
    confinement.limit_resources()
    with step("seccomp"):
        seccomp.install()
    linux.limit_capabilities()
    with step("user"):
        with contextlib.suppress(PermissionError):
            os.setgroups(job.groups)
        os.setresgid(job.gid, job.gid, job.gid)
        os.setresuid(job.uid, job.uid, job.uid)
    linux.set_dumpable(False)  # changing ids may have made us dumpable again
    os.umask(0o022)
    with step("cwd"):
        os.chdir(job.cwd)
    with step("stdio"):
        stdio = _open_stdio(job)
    with step("exec"):
        child = _start(job, stdio.actions)
    try:
        _allow_descriptors()
        handle = os.pidfd_open(child)
        told = {"child": child, "pid": _pid_inside(own, handle), "stdio": stdio.names}
        tell(report, told, [handle, marker, *stdio.ours])
    except BaseException:
        os.kill(child, signal.SIGKILL)  # nobody will ever hear of it
        raise


@dataclass(frozen=True)
class Stdio:
    """`ours` and `names`: the server's descriptors and what they are. `actions`: what gives the command its own."""

    ours: list[int]
    names: list[str]
    actions: list[tuple[Any, ...]]


def _open_stdio(job: Job) -> Stdio:
    """Made by the command's user: /dev/stdout and the terminal then belong to who may want to open them by name."""
    if job.pty:
        master, name = linux.open_pty(*job.pty)
        # Opened by a session's leader, a terminal becomes the session's own.
        opened = (os.POSIX_SPAWN_OPEN, 0, name, os.O_RDWR, 0)
        return Stdio([master], ["pty"], [opened, (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)])
    ours, names = [], []
    actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
    if job.stdin:
        theirs, writer = _pipe()
        ours.append(writer)
        names.append("stdin")
        actions = [(os.POSIX_SPAWN_DUP2, theirs, 0)]
    for number, name in ((1, "stdout"), (2, "stderr")):
        reader, theirs = _pipe()
        ours.append(reader)
        names.append(name)
        actions.append((os.POSIX_SPAWN_DUP2, theirs, number))
    return Stdio(ours, names, actions)


def _pipe() -> tuple[int, int]:
    return os.pipe2(os.O_CLOEXEC)


def _start(job: Job, actions: list[tuple[Any, ...]]) -> int:
    """posix_spawn, which copies nothing, in a session of its own; the program is found as by execvpe. Raises OSError.

    On a terminal the command leads the session. Else it leads neither that nor its process group, as in E2B: there
    `setsid program` becomes the program, and its exit status is the program's; a leader it would leave behind.
    """
    if job.pty:
        return _spawn(job, actions, setsid=True)
    os.setsid()  # so we lead both: what the command does to its group may stop us, see `forks.Forks`
    return _spawn(job, actions, setsid=False)


def _spawn(job: Job, actions: list[tuple[Any, ...]], *, setsid: bool) -> int:
    name = job.argv[0]
    path = job.env.get("PATH", os.defpath)
    places = [name] if "/" in name else [os.path.join(part, name) for part in path.split(":") if part]
    refused: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for place in places:
        try:
            return os.posix_spawn(place, job.argv, job.env, file_actions=actions, setsid=setsid)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            refused = error
    raise refused


def _pid_inside(own: int, handle: int) -> int:
    """The number that a process has in the innermost pid namespace, by a pidfd of it."""
    fd = os.open(f"fdinfo/{handle}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=own)
    try:
        text = os.read(fd, 4096).decode()
    finally:
        os.close(fd)
    (line,) = (line for line in text.splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])


def _allow_descriptors() -> None:
    """The limit is the command's. Ours bounds what all processes of this user may have on its way to the spawner."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


def write_text(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
