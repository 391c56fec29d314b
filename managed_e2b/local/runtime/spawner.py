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
| claim | name, server (its pid) | see `cgroup_claim.claim` |
| configure | uids, gids, via, helpers, owners, trees (lists as of `cgroups.Tree`) | |
| view | directory | a path by which the sandboxes' ids can reach it |
| check_overlay | directory (made) | whether it can hold the upper layer of an overlay (`upkeep.try_overlay`) |
| build | directory (made), layers (made), kept, scratch, home, facts | the layers of `base` (`base_template.provide`) |
| empty | directory | |
| launch | sandbox, argv, layout (`layers.Layout`), limits | host pid; pidfd, life pipe, agent's socket, agent's pidfd |
| spawn | sandbox, argv, env, cwd, uid, gid, groups, stdin, pty | pid, child, stdio; pidfd, marker, stdio descriptors |
| kill_marked | sandbox; + marker | |
| abandon | sandbox, job (a spawn request) | its command is killed, with all its descendants |
| freeze | sandbox, frozen | once all its processes stand still, or go on |
| dial | sandbox, port | ; a connected socket |
| way_out | sandbox | ; a listening TCP socket, a UDP socket (see `netlink`) |
| usage | sandbox, directories | see `look.usage` |
| keep | directories, layer (made) | copies of them, by their last names, in `layer` |
| measure | directory | bytes on disk of what is in it |
| unpack | directory (made), bounds (`unpack.Bounds`); + archive | see `unpack.unpack` |
| remove | directory | |
| open_room | store, scratch, overlay | (see `volume_rooms`: once, before the next four) |
| create_volume | volume | |
| remove_volume | volume | |
| mount_volumes | volumes | ; mounts for `launch`, one for each |
| volume | volume, operation, args | as that operation of `volume_ops` |
| bury | sandbox, directory | once nothing of it runs, its directory and its control groups are removed |
| remove_groups | directories | how many sandboxes had groups there |

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
from importlib import import_module
from typing import Any, ClassVar

from managed_e2b.local.runtime import (
    base_template,
    cgroup_claim,
    cgroups,
    channel,
    children,
    launch,
    linux,
    look,
    netlink,
    upkeep,
    volume_rooms,
)
from managed_e2b.local.runtime.cgroups import Tree
from managed_e2b.local.runtime.confine import Confinement
from managed_e2b.local.runtime.forks import Forks, Told
from managed_e2b.local.runtime.launch import LaunchPipes
from managed_e2b.local.runtime.launcher import Launching, Sandbox
from managed_e2b.local.runtime.layers import Layout
from managed_e2b.local.runtime.userns import OWNERS, MapSpec
from managed_e2b.local.runtime.volume_rooms import Room

_END_SECONDS = 2.0  # for the control groups of sandboxes whose processes are being killed


class BadRequest(Exception):
    """A request that cannot be understood or that names a sandbox which is not there."""


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
        self._trees: list[Tree] = []
        self._turns = itertools.count(int.from_bytes(os.urandom(2)))  # so that two servers do not share owners
        self._room: Room | None = None
        self._maintenance = -1  # a user namespace with the sandboxes' id map, to build and remove their files in

    def run(self) -> None:
        """Serve until the server is gone."""
        self._forks.watch(self._server.fileno(), self._on_request)
        # The end of the socket tells of the server's end too, unless a fork of the server holds a copy of it.
        self._forks.watch(os.pidfd_open(os.getppid()), self._forks.end)
        self._forks.run()
        self._end_all()

    def _end_all(self) -> None:
        """What is frozen would outlive us: it hears of no death. And nobody else is left to remove the groups."""
        self._forks.reap_no_more()
        for sandbox in self._sandboxes.values():
            sandbox.end()
        for tree in self._trees:
            with contextlib.suppress(OSError):  # the next server here tries again
                cgroups.remove_tree(tree.directory, _END_SECONDS)

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

    def _work(self, request: int, work: Callable[[], Any]) -> None:
        """Run `work` in a fork, as who we are."""

        def run(report: socket.socket) -> None:
            children.keep_only([report.fileno()])
            children.detach_signals()
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
        if sandbox is not None:
            sandbox.ended()

    # -- operations ------------------------------------------------------------------------------------------------

    def _claim(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, server = args["name"], [int(args["server"]), os.getpid()]
        self._work(request, lambda: cgroup_claim.claim(name, server))

    def _configure(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        spec = MapSpec(args["uids"], args["gids"], args["via"], args["helpers"], args["owners"])
        self._trees = [Tree.parse(value) for value in args["trees"]]
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
        confinement = Confinement.parse(name, self._trees, args["limits"])
        life_reader, life_writer = os.pipe2(os.O_CLOEXEC)
        status_reader, status_writer = os.pipe2(os.O_CLOEXEC)
        info_reader, info_writer = os.pipe2(os.O_CLOEXEC)
        pipes, parent = LaunchPipes(life_reader, status_writer, info_writer), os.getpid()
        owner = None if spec.owners is None else spec.owners + next(self._turns) % OWNERS
        bwrap = children.fork(lambda: launch.become_sandbox(spec, owner, layout, argv, pipes, parent, confinement, fds))
        channel.close_all((life_reader, status_writer, info_writer))
        self._bwraps[bwrap] = name
        self._sandboxes[name] = Sandbox(bwrap, -1, confinement)
        Launching(
            self._forks,
            lambda: self._sandboxes.get(name),
            lambda body, fds: self._answer(request, body, fds),
            bwrap,
            status_reader,
            info_reader,
            life_writer,
        ).watch()

    def _spawn(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        sandbox, job = self._sandbox(args["sandbox"]), children.Job.parse(args)
        pidfd, confinement = sandbox.pidfd, sandbox.confinement
        self._forks.fork(
            lambda report: children.run_command(pidfd, job, report, confinement),
            lambda told: self._spawned(request, pidfd, told),
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

    def _freeze(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        sandbox, frozen = self._sandbox(args["sandbox"]), bool(args["frozen"])
        group = sandbox.confinement.freezer()
        if group is not None:
            self._work(request, lambda: cgroups.freeze(group, frozen=frozen))
            return
        number = signal.SIGSTOP if frozen else signal.SIGCONT
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
        directories, confinement = list(args["directories"]), self._sandbox(args["sandbox"]).confinement

        def measure(pidfd: int) -> look.Answer:
            return look.usage(pidfd, directories, confinement.usage())

        self._visit(request, args["sandbox"], linux.CLONE_NEWUSER, measure)

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

    def _open_room(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        maintenance, store, scratch, overlay = self._maintenance, args["store"], args["scratch"], bool(args["overlay"])

        def opened(told: Told) -> None:
            body, namespace = told
            if namespace:
                self._room = Room(os.dup(namespace[0]), f"{scratch}/all")
            self._answer(request, body)

        self._forks.fork(lambda report: volume_rooms.open_room(maintenance, store, scratch, overlay, report), opened)

    def _in_room(self, request: int, work: Callable[[str, socket.socket], volume_rooms.Answer | None]) -> None:
        maintenance, room = self._maintenance, self._room
        if room is None:
            raise BadRequest("no room for volumes")
        self._forks.fork(
            lambda report: volume_rooms.visit(maintenance, room, lambda told: work(room.top, told), report),
            self._relay(request),
        )

    def _create_volume(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name = _file_name(args["volume"])
        self._in_room(request, lambda top, _: volume_rooms.create(f"{top}/{name}"))

    def _remove_volume(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name = _file_name(args["volume"])
        self._in_room(request, lambda top, _: volume_rooms.remove(top, name))

    def _mount_volumes(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        names = [_file_name(name) for name in args["volumes"]]
        self._in_room(request, lambda top, _: volume_rooms.mounts([f"{top}/{name}" for name in names]))

    def _volume(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, op, more = _file_name(args["volume"]), args["operation"], args["args"]
        self._in_room(request, lambda top, report: volume_rooms.operate(f"{top}/{name}", op, more, report))

    def _remove(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory = args["directory"]
        self._maintain(request, lambda: upkeep.remove_tree(directory))

    def _bury(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, directory = args["sandbox"], args["directory"]
        sandbox = self._sandboxes.get(name)
        trees = self._trees

        def remove() -> None:
            if sandbox is not None:
                self._sandboxes.pop(name, None)
                if sandbox.pidfd >= 0:
                    os.close(sandbox.pidfd)
            self._maintain(request, lambda: upkeep.remove_tree(directory), before=lambda: cgroups.remove(trees, name))

        if sandbox is None:
            remove()
        else:
            sandbox.when_ended(remove)

    def _remove_groups(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directories = list(args["directories"])
        self._work(request, lambda: max([0, *map(cgroups.remove_tree, directories)]))

    _OPERATIONS: ClassVar[dict[str, Callable[[Spawner, int, dict[str, Any], list[int]], None]]] = {
        "claim": _claim,
        "configure": _configure,
        "view": _view,
        "empty": _empty,
        "check_overlay": _check_overlay,
        "build": _build,
        "launch": _launch,
        "spawn": _spawn,
        "kill_marked": _kill_marked,
        "abandon": _abandon,
        "freeze": _freeze,
        "dial": _dial,
        "way_out": _way_out,
        "usage": _usage,
        "keep": _keep,
        "measure": _measure,
        "unpack": _unpack,
        "open_room": _open_room,
        "create_volume": _create_volume,
        "remove_volume": _remove_volume,
        "mount_volumes": _mount_volumes,
        "volume": _volume,
        "remove": _remove,
        "bury": _bury,
        "remove_groups": _remove_groups,
    }


def _file_name(value: Any) -> str:
    if not isinstance(value, str) or not value or "/" in value or "\0" in value or value.startswith("."):
        raise BadRequest("the name of a volume")
    return value


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
