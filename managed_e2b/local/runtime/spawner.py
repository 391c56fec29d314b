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

import errno
import gc
import os
import resource
import signal
import socket
from typing import Any

from managed_e2b.local.runtime import cgroup_claim, channel, children, linux
from managed_e2b.local.runtime.desk import BadRequest, Desk, Operation
from managed_e2b.local.runtime.launches import Launches
from managed_e2b.local.runtime.spawner_files import FileOperations
from managed_e2b.local.runtime.spawner_sandboxes import SandboxOperations


class Spawner:
    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._decoder = channel.Decoder()
        self._desk = Desk(server, self._on_end)
        self._launches = Launches(self._desk, lambda name: self._sandboxes.prepare(name))
        self._sandboxes = SandboxOperations(self._desk, self._launches)
        self._operations: dict[str, Operation] = {
            "claim": self._claim,
            **self._launches.operations,
            **self._sandboxes.operations,
            **FileOperations(self._desk, self._launches.sow_anew).operations,
        }

    def run(self) -> None:
        """Serve until the server is gone."""
        self._desk.forks.watch(self._server.fileno(), self._on_request)
        # The end of the socket tells of the server's end too, unless a fork of the server holds a copy of it.
        self._desk.forks.watch(os.pidfd_open(os.getppid()), self._desk.forks.end)
        self._desk.forks.run()
        self._desk.forks.reap_no_more()
        self._launches.end_all()

    def _on_end(self, pid: int, status: int) -> None:
        if not self._launches.bwrap_ended(pid):
            self._sandboxes.child_ended(pid, status)

    def _on_request(self) -> None:
        try:
            data, fds = channel.receive(self._server)
        except ConnectionResetError:  # the server died with answers unread
            self._desk.forks.end()
            return
        if not data:
            self._desk.forks.end()
            return
        for message, received in self._decoder.feed(data, fds):
            try:
                self._dispatch(message, received)
            except OSError as error:
                self._desk.answer(message.get("id"), children.failure(error))
            except (BadRequest, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                text = f"bad request: {type(error).__name__}: {error}"
                self._desk.answer(message.get("id"), {"errno": errno.EINVAL, "message": text, "step": "spawner"})
            finally:
                channel.close_all(received)

    def _dispatch(self, message: channel.Message, fds: list[int]) -> None:
        op, args, request = message.get("op"), message.get("args"), message.get("id")
        if not isinstance(op, str) or not isinstance(args, dict) or not isinstance(request, int):
            raise BadRequest("op, args or id")
        operation = self._operations.get(op)
        if operation is None:
            raise BadRequest(f"no operation {op!r}")
        operation(request, args, fds)

    def _claim(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, server = args["name"], [int(args["server"]), os.getpid()]
        self._desk.work(request, lambda: cgroup_claim.claim(name, server))


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
