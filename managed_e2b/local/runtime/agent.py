"""The agent: one process of ours per sandbox that has joined its user, mount and network namespaces as root.

Every path it opens is resolved inside the sandbox, so no link in there can name a file of the host. It is not in the
sandbox's pid namespace: nothing inside can see, signal or trace it. What it can do is in `agent_ops`.

Standard library only; runs in a fork of the spawner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import Any

from managed_e2b.local.runtime import agent_ops, channel, children, linux
from managed_e2b.local.runtime.confine import Confinement

# User namespaces inside a sandbox would give every process there all capabilities over a mount namespace of its own.
_NO_NESTED_USER_NAMESPACES = "/proc/sys/user/max_user_namespaces"
_DEV_SIZE = "size=1m,nr_inodes=1k"
# What the host allows a user for all of them, its own programs included: all sandboxes count as the server's user. And
# what one sandbox may have of it.
_SHARES = {
    "/proc/sys/fs/inotify/max_user_instances": "/proc/sys/user/max_inotify_instances",
    "/proc/sys/fs/inotify/max_user_watches": "/proc/sys/user/max_inotify_watches",
}
_SHARE = 4  # a quarter


def run(pidfd: int, connection: socket.socket, report: socket.socket, parent: int, confinement: Confinement) -> None:
    """Enter the sandbox, finish what its first process has no right to do, report, and serve until its end."""
    children.keep_only([pidfd, connection.fileno(), report.fileno()])
    children.detach_signals()
    os.setsid()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # what it writes beyond the limit fails
    confinement.limit_file_size()
    children.enter(pidfd, linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWNET)
    os.umask(0o022)
    os.close(pidfd)
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    _prepare_sandbox()
    report.send(b"{}")
    report.close()
    serve(connection)


def _prepare_sandbox() -> None:
    with children.step("mount"):
        # bubblewrap mounts everything nosuid; the sudo stand-in lies below /usr, which is a mount or the root's own.
        usr = "/usr" if os.path.ismount("/usr") else "/"
        linux.mount("none", usr, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_NODEV)
        # And it gives this tmpfs half of the host's memory, in files that nothing frees before the sandbox's end.
        linux.mount("none", "/dev", None, linux.MS_REMOUNT | linux.MS_NOSUID | linux.MS_NODEV, _DEV_SIZE)
    with children.step("forbid nested user namespaces"):
        children.write_text(_NO_NESTED_USER_NAMESPACES, "0")
    with children.step("limit inotify"), contextlib.suppress(FileNotFoundError):  # a kernel without it
        for whole, share in _SHARES.items():
            with open(whole, "rb") as file:
                children.write_text(share, str(max(1, int(file.read()) // _SHARE)))


def serve(connection: socket.socket) -> None:
    """Answer requests one after the other until the other side closes."""
    decoder = channel.Decoder()
    while True:
        data, fds = channel.receive(connection)
        if not data:
            return
        for request, received in decoder.feed(data, fds):
            _answer(connection, request, received)


def _answer(connection: socket.socket, request: channel.Message, received: list[int]) -> None:
    reply: dict[str, Any] = {"id": request.get("id")}
    fds: list[int] = []
    try:
        handler = agent_ops.HANDLERS.get(request.get("op", ""))
        if handler is None:
            raise OSError(38, "no such operation")
        reply["value"], fds = handler(request.get("args", {}), received)
    except OSError as error:
        reply.update(children.failure(error))
    except Exception as error:  # noqa: BLE001 - one bad request must not end the agent; the caller gets the error
        reply.update(errno=5, message=f"{type(error).__name__}: {error}", step="agent")
    finally:
        channel.close_all(received)
    try:
        channel.send(connection, reply, fds)
    finally:
        channel.close_all(fds)
