"""The one small process that makes sandboxes and puts processes into them, for a server that must not fork.

The server is threaded and asynchronous, while entering a user namespace takes a single thread; and what belongs to a
sandbox's own ids can only be touched from within its namespaces. So one process, with one thread, the standard
library and an empty environment, does it all: it forks, and the fork enters a sandbox and becomes the command. It
never holds the API key, its children hold no descriptor of another sandbox, and it ends with the server, which ends
every sandbox.

Requests come over one socket (`channel`); an operation that takes time goes on in a fork while the next request is
served.

| op | arguments | value; descriptors |
|---|---|---|
| configure | uids, gids, via, helpers, owners | |
| view | directory | a path by which the sandboxes' ids can reach it |
| check_overlay | directory (made) | whether it can hold the upper layer of an overlay (`upkeep.try_overlay`) |
| build | directory (made), layers (made), kept, scratch, home, facts | the layers of `base` (`base_template.provide`) |
| empty | directory | |
| launch | sandbox, argv, layout (`layers.Layout`) | host pid; pidfd, life pipe, agent's socket, agent's pidfd |
| spawn | sandbox, argv, env, cwd, uid, gid, groups, stdin, pty | pid, child, stdio; pidfd, marker, stdio descriptors |
| kill_marked | sandbox; + marker | |
| abandon | sandbox, job (a spawn request) | its command is killed, with all its descendants |
| signal_all | sandbox, signal | |
| dial | sandbox, port | ; a connected socket |
| way_out | sandbox | ; a listening TCP socket, a UDP socket (see `netlink`) |
| usage | sandbox, directories | see `look.usage` |
| keep | directories, layer (made) | copies of them, by their last names, in `layer` |
| measure | directory | bytes on disk of what is in it |
| unpack | directory (made), bounds (`unpack.Bounds`); + archive | see `unpack.unpack` |
| remove | directory | |
| bury | sandbox, directory | once nothing of it runs, its directory is removed |

Events: `{"event": "exit", "job": id of the spawn request, "code": …, "signal": …}`.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from managed_e2b.local.runtime import agent, base_template, channel, children, launch, linux, look, netlink, upkeep
from managed_e2b.local.runtime.forks import Forks, Told
from managed_e2b.local.runtime.launch import LaunchPipes
from managed_e2b.local.runtime.layers import Layout
from managed_e2b.local.runtime.userns import OWNERS, MapSpec

_STATUS_LIMIT = 65536


class BadRequest(Exception):
    """A request that cannot be understood or that names a sandbox which is not there."""


@dataclass
class Sandbox:
    """A sandbox that was launched and is not buried yet. `bwrap` is the pid of bubblewrap outside, None once reaped."""

    bwrap: int | None
    pidfd: int
    waiters: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Launching:
    """A launch under way: the status pipe has not said "ready" yet."""

    request: int
    name: str
    bwrap: int
    info: int
    life: int
    text: bytes = b""


class Spawner:
    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._decoder = channel.Decoder()
        self._forks = Forks(self._on_end)
        self._sandboxes: dict[str, Sandbox] = {}
        self._jobs: dict[int, int] = {}  # pid of a command → its request
        self._unclaimed: dict[int, int] = {}  # pid → status, reaped before we knew what it was
        self._bwraps: dict[int, str] = {}
        self._spec: MapSpec | None = None
        self._turns = itertools.count(int.from_bytes(os.urandom(2)))  # so that two servers do not share owners
        self._maintenance = -1  # a user namespace with the sandboxes' id map, to build and remove their files in

    def run(self) -> None:
        """Serve until the server is gone."""
        self._forks.watch(self._server.fileno(), self._on_request)
        # The end of the socket tells of the server's end too, unless a fork of the server holds a copy of it.
        self._forks.watch(os.pidfd_open(os.getppid()), self._forks.end)
        self._forks.run()

    # -- requests and answers --------------------------------------------------------------------------------------

    def _on_request(self) -> None:
        try:
            data, fds = channel.receive(self._server)
        except ConnectionResetError:  # the server died with answers unread
            self._forks.end()
            return
        if not data:
            self._forks.end()
            return
        for message, received in self._decoder.feed(data, fds):
            try:
                self._dispatch(message, received)
            except OSError as error:
                self._answer(message.get("id"), children.failure(error))
            except (BadRequest, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                text = f"bad request: {type(error).__name__}: {error}"
                self._answer(message.get("id"), {"errno": errno.EINVAL, "message": text, "step": "spawner"})
            finally:
                channel.close_all(received)

    def _dispatch(self, message: channel.Message, fds: list[int]) -> None:
        op, args, request = message.get("op"), message.get("args"), message.get("id")
        if not isinstance(op, str) or not isinstance(args, dict) or not isinstance(request, int):
            raise BadRequest("op, args or id")
        operation = self._OPERATIONS.get(op)
        if operation is None:
            raise BadRequest(f"no operation {op!r}")
        operation(self, request, args, fds)

    def _answer(self, request: Any, body: dict[str, Any], fds: list[int] | None = None) -> None:
        self._send({"id": request, **body}, fds or [])

    def _send(self, message: channel.Message, fds: list[int]) -> None:
        try:
            channel.send(self._server, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            self._forks.end()

    def _relay(self, request: int) -> Callable[[Told], None]:
        """Pass on the value, or the failure, that a fork told."""
        return lambda told: self._answer(request, *told)

    def _visit(
        self, request: int, name: Any, namespaces: int, action: Callable[[int], look.Answer], keep: int = -1
    ) -> None:
        pidfd = self._sandbox(name).pidfd
        self._forks.fork(
            lambda report: look.visit(pidfd, namespaces, lambda: action(pidfd), report, keep), self._relay(request)
        )

    def _maintain(
        self,
        request: int,
        work: Callable[[], Any],
        before: Callable[[], Any] = lambda: None,
        keep: Sequence[int] = (),
    ) -> None:
        """Run `work` in a fork, as root of the maintenance namespace; `before`, as who we are.

        `keep`: descriptors that it needs.
        """
        if self._maintenance < 0:
            raise BadRequest("not configured")
        fd = self._maintenance

        def run(report: socket.socket) -> None:
            children.keep_only([fd, report.fileno(), *keep])
            children.detach_signals()
            before()
            linux.setns(fd, linux.CLONE_NEWUSER)
            children.become_root()
            os.umask(0o022)
            children.tell(report, {"value": work()})

        self._forks.fork(run, self._relay(request))

    def _sandbox(self, name: Any) -> Sandbox:
        sandbox = self._sandboxes.get(name) if isinstance(name, str) else None
        if sandbox is None:
            raise OSError(errno.ESRCH, "no such sandbox")
        return sandbox

    # -- children that ended ---------------------------------------------------------------------------------------

    def _on_end(self, pid: int, status: int) -> None:
        if pid in self._jobs:
            self._tell_exit(self._jobs.pop(pid), status)
        elif pid in self._bwraps:
            self._bwrap_ended(self._bwraps.pop(pid))
        elif self._forks.pending:
            self._unclaimed[pid] = status
        else:
            self._unclaimed.clear()

    def _tell_exit(self, job: int, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        ended = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
        self._send({"event": "exit", "job": job, **ended}, [])

    def _bwrap_ended(self, name: str) -> None:
        sandbox = self._sandboxes.get(name)
        if sandbox is None:
            return
        sandbox.bwrap = None
        for go_on in sandbox.waiters:
            go_on()
        sandbox.waiters.clear()

    # -- operations ------------------------------------------------------------------------------------------------

    def _configure(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        spec = MapSpec(args["uids"], args["gids"], args["via"], args["helpers"], args["owners"])
        self._maintenance = upkeep.keep_user_namespace(spec)
        self._spec = spec
        self._answer(request, {"value": None})

    def _view(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        self._answer(request, {"value": upkeep.reachable(args["directory"])})

    def _check_overlay(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory = args["directory"]
        self._maintain(request, lambda: upkeep.try_overlay(directory))

    def _build(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory, layers, kept, scratch, home, facts = (
            args[name] for name in ("directory", "layers", "kept", "scratch", "home", "facts")
        )

        def build() -> dict[str, Any]:
            for path in (directory, layers):
                os.mkdir(path, 0o755)
            return base_template.provide(kept, scratch, home, facts)

        self._maintain(request, build)

    def _empty(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory = args["directory"]
        self._maintain(request, lambda: upkeep.empty(directory))

    def _launch(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, argv, layout = args["sandbox"], args["argv"], Layout(**args["layout"])
        spec = self._spec
        if spec is None or not isinstance(name, str) or name in self._sandboxes or name in self._bwraps.values():
            raise BadRequest("not configured, or the sandbox exists")
        life_reader, life_writer = os.pipe2(os.O_CLOEXEC)
        status_reader, status_writer = os.pipe2(os.O_CLOEXEC)
        info_reader, info_writer = os.pipe2(os.O_CLOEXEC)
        pipes, parent = LaunchPipes(life_reader, status_writer, info_writer), os.getpid()
        owner = None if spec.owners is None else spec.owners + next(self._turns) % OWNERS
        bwrap = children.fork(lambda: launch.become_sandbox(spec, owner, layout, argv, pipes, parent))
        channel.close_all((life_reader, status_writer, info_writer))
        self._bwraps[bwrap] = name
        self._sandboxes[name] = Sandbox(bwrap, -1)
        state = Launching(request, name, bwrap, info_reader, life_writer)
        self._forks.watch(status_reader, lambda: self._on_status(status_reader, state))

    def _on_status(self, fd: int, state: Launching) -> None:
        data = os.read(fd, 4096)
        state.text = (state.text + data)[-_STATUS_LIMIT:]
        if data and launch.READY not in state.text:
            return
        self._forks.unwatch(fd)
        os.close(fd)
        info = os.read(state.info, 4096)
        os.close(state.info)
        if not data:
            text = state.text.decode("utf-8", "replace").strip() or "bubblewrap ended without a word"
            self._launch_failed(state, {"errno": errno.EIO, "message": text, "step": "launch"})
            return
        try:
            inside = launch.child_pid(info)
            pidfd = _open_child(inside, state.bwrap)
        except (OSError, ValueError) as error:
            self._launch_failed(state, {"errno": errno.EIO, "message": str(error), "step": "launch"})
            return
        sandbox = self._sandboxes.get(state.name)
        if sandbox is None:  # buried meanwhile
            os.close(pidfd)
            os.close(state.life)
            return
        sandbox.pidfd = pidfd
        self._start_agent(state, inside, pidfd)

    def _start_agent(self, state: Launching, inside: int, pidfd: int) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()

        def done(told: Told) -> None:
            with ours:
                if "errno" in told[0]:
                    os.close(handle)
                    self._launch_failed(state, told[0])
                    return
                self._answer(state.request, {"value": {"pid": inside}}, [pidfd, state.life, ours.fileno(), handle])
            channel.close_all((state.life, handle))

        with theirs:
            pid = self._forks.fork(lambda report: agent.run(pidfd, theirs, report, parent), done)
        handle = os.pidfd_open(pid)  # our own child, and not reaped before the next turn of the loop

    def _launch_failed(self, state: Launching, body: dict[str, Any]) -> None:
        """Tell of it once nothing of the sandbox runs any more. Its directory is the server's to have buried."""
        os.close(state.life)
        sandbox = self._sandboxes.get(state.name)
        if sandbox is None:  # buried meanwhile
            self._answer(state.request, body)
        else:
            self._when_ended(sandbox, lambda: self._answer(state.request, body))

    def _when_ended(self, sandbox: Sandbox, go_on: Callable[[], None]) -> None:
        if sandbox.bwrap is None:
            go_on()
            return
        sandbox.waiters.append(go_on)
        if sandbox.pidfd < 0:  # still being made
            os.kill(sandbox.bwrap, signal.SIGKILL)
            return
        # bubblewrap ends after its child, which ends after everything else inside.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)

    def _spawn(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        pidfd, job = self._sandbox(args["sandbox"]).pidfd, children.Job.parse(args)
        self._forks.fork(
            lambda report: children.run_command(pidfd, job, report), lambda told: self._spawned(request, pidfd, told)
        )

    def _spawned(self, request: int, pidfd: int, told: Told) -> None:
        body, fds = told
        child = body.get("child")
        if not isinstance(child, int) or "errno" in body:
            if isinstance(child, int) and self._unclaimed.pop(child, None) is None:
                self._kill_command(pidfd, child)  # it runs, but its descriptors were lost
            self._answer(request, body)
            return
        self._answer(request, {"value": body}, fds)
        early = self._unclaimed.pop(child, None)
        if early is None:
            self._jobs[child] = request
        else:
            self._tell_exit(request, early)

    def _kill_command(self, pidfd: int, child: int, done: Callable[[Told], None] = lambda told: None) -> None:
        """`child`: a command that has not been reaped."""
        try:
            self._forks.fork(lambda report: look.kill_command(pidfd, child, report), done)
        except OSError:  # no process and no descriptor to be had: then the command alone
            os.kill(child, signal.SIGKILL)
            done(({"value": None}, []))

    def _abandon(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        pidfd, job = self._sandbox(args["sandbox"]).pidfd, args["job"]
        child = next((pid for pid, number in self._jobs.items() if number == job), None)
        if child is None:
            self._answer(request, {"value": None})  # it has ended, or never began
        else:
            self._kill_command(pidfd, child, self._relay(request))

    def _kill_marked(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        if len(fds) != 1:
            raise BadRequest("one marker")
        marker = fds[0]
        inside = linux.CLONE_NEWUSER | linux.CLONE_NEWNS
        self._visit(request, args["sandbox"], inside, lambda _: look.kill_marked(marker), marker)

    def _signal_all(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        number = signal.Signals(args["signal"])
        inside = linux.CLONE_NEWUSER | linux.CLONE_NEWNS
        self._visit(request, args["sandbox"], inside, lambda _: look.signal_all(number))

    def _dial(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        port = args["port"]
        if not isinstance(port, int) or not 0 < port < 65536:
            raise BadRequest("port")
        inside = linux.CLONE_NEWUSER | linux.CLONE_NEWNET
        self._visit(request, args["sandbox"], inside, lambda _: look.dial(port))

    def _way_out(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        inside = linux.CLONE_NEWUSER | linux.CLONE_NEWNET
        self._visit(request, args["sandbox"], inside, lambda _: netlink.open_way_out())

    def _usage(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directories = list(args["directories"])
        self._visit(request, args["sandbox"], linux.CLONE_NEWUSER, lambda pidfd: look.usage(pidfd, directories))

    def _keep(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directories, layer = list(args["directories"]), args["layer"]
        self._maintain(request, lambda: upkeep.keep(directories, layer))

    def _measure(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory = args["directory"]
        self._maintain(request, lambda: upkeep.measure(directory))

    def _unpack(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory, bounds = args["directory"], args["bounds"]
        if len(fds) != 1:
            raise BadRequest("one archive")
        archive = fds[0]

        def work() -> dict[str, int]:
            from managed_e2b.local.runtime import unpack

            return unpack.unpack(archive, directory, unpack.Bounds(**bounds))

        # Imported in the fork alone: it would make every other one larger. And before it is nobody on the host.
        self._maintain(request, work, before=lambda: import_module("managed_e2b.local.runtime.unpack"), keep=[archive])

    def _remove(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory = args["directory"]
        self._maintain(request, lambda: upkeep.remove_tree(directory))

    def _bury(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, directory = args["sandbox"], args["directory"]
        sandbox = self._sandboxes.get(name)

        def remove() -> None:
            if sandbox is not None:
                self._sandboxes.pop(name, None)
                if sandbox.pidfd >= 0:
                    os.close(sandbox.pidfd)
            self._maintain(request, lambda: upkeep.remove_tree(directory))

        if sandbox is None:
            remove()
        else:
            self._when_ended(sandbox, remove)

    _OPERATIONS: ClassVar[dict[str, Callable[[Spawner, int, dict[str, Any], list[int]], None]]] = {
        "configure": _configure,
        "view": _view,
        "empty": _empty,
        "check_overlay": _check_overlay,
        "build": _build,
        "launch": _launch,
        "spawn": _spawn,
        "kill_marked": _kill_marked,
        "abandon": _abandon,
        "signal_all": _signal_all,
        "dial": _dial,
        "way_out": _way_out,
        "usage": _usage,
        "keep": _keep,
        "measure": _measure,
        "unpack": _unpack,
        "remove": _remove,
        "bury": _bury,
    }


def _open_child(pid: int, parent: int) -> int:
    """A pidfd of `pid`, proved to be a child of `parent`, which has not been reaped. Raises OSError(ESRCH)."""
    pidfd = os.pidfd_open(pid)
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    if int(fields[1]) != parent:
        os.close(pidfd)
        raise OSError(errno.ESRCH, "the sandbox ended while it started")
    return pidfd


def main(fd: int) -> None:
    """Run as the process that `link.SpawnerLink` starts, with its socket at `fd`."""
    os.chdir("/")
    os.umask(0o022)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; commands must not inherit that
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    linux.become_subreaper()
    linux.forget_session_keyring()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.collect()
    gc.freeze()  # forks share these pages
    with socket.socket(fileno=fd) as server:
        server.set_inheritable(False)
        Spawner(server).run()
