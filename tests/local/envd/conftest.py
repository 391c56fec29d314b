"""envd served over real HTTP to the real SDK, in front of processes of this host instead of a sandbox.

`HostGuest` is no sandbox: it keeps the contract of `runtime.base.Guest` with plain local processes, so that envd's own
tests run on every host. What needs real isolation is tested with the runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import pwd
import signal
import socket
import struct
import subprocess
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest
import uvicorn
from e2b import AsyncSandbox, Sandbox
from e2b.connection_config import ConnectionConfig
from packaging.version import Version

from managed_e2b.local.envd.app import Envd
from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.runtime import agent_ops
from managed_e2b.local.runtime.base import Command, Exit, GuestError, GuestGone, PtySize, Reply, Usage, User

SANDBOX_ID = "i0123456789abcdefghij"
TOKEN = "token-of-the-sandbox"


class HostProcess:
    """A local process behind the interface of `GuestProcess`."""

    def __init__(self, popen: subprocess.Popen[bytes], fds: dict[str, int | None]) -> None:
        self.pid = popen.pid
        self.stdin_fd = fds.get("stdin")
        self.stdout_fd = fds.get("stdout")
        self.stderr_fd = fds.get("stderr")
        self.pty_fd = fds.get("pty")
        self._popen = popen
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        for fd in (self.stdin_fd, self.stdout_fd, self.stderr_fd, self.pty_fd):
            if fd is not None:
                os.set_blocking(fd, False)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._popen.wait()
        self._exit.set_result(Exit(code=status, signal=None) if status >= 0 else Exit(code=None, signal=-status))

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    def signal(self, number: int, *, group: bool = False) -> bool:
        if self._exit.done():
            return False
        os.killpg(self.pid, number) if group else os.kill(self.pid, number)
        return True

    def kill_tree(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def resize(self, size: PtySize) -> None:
        assert self.pty_fd is not None
        fcntl.ioctl(self.pty_fd, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.cols, 0, 0))

    def close_stdin(self) -> None:
        self._close("stdin_fd")

    def close(self) -> None:
        for name in ("stdin_fd", "stdout_fd", "stderr_fd", "pty_fd"):
            self._close(name)

    def _close(self, name: str) -> None:
        fd = getattr(self, name)
        setattr(self, name, None)
        if fd is not None:
            os.close(fd)


class HostGuest:
    """`Guest` of local processes; every user is the one who runs the tests, under the name asked for."""

    def __init__(self, home: str) -> None:
        self.sandbox_id = SANDBOX_ID
        self.dead = asyncio.Event()
        self.home = home
        self.processes: list[HostProcess] = []

    async def spawn(self, command: Command) -> HostProcess:
        if self.dead.is_set():
            raise GuestGone
        options: dict[str, Any] = {"env": dict(command.env), "cwd": command.cwd, "start_new_session": True}
        try:
            if command.pty is not None:
                return self._keep(*self._spawn_pty(command, options))
            popen = subprocess.Popen(  # noqa: ASYNC220 -- a few milliseconds, in a test
                command.argv,
                stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                **options,
            )
        except OSError as error:
            raise GuestError(error.errno or errno.EIO, error.strerror or str(error)) from error
        pipes = {"stdin": popen.stdin, "stdout": popen.stdout, "stderr": popen.stderr}
        fds = {}
        for name, pipe in pipes.items():
            if pipe is not None:
                fds[name] = os.dup(pipe.fileno())
                pipe.close()
        return self._keep(popen, fds)

    def _spawn_pty(self, command: Command, options: dict[str, Any]) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
        assert command.pty is not None
        ours, theirs = os.openpty()
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", command.pty.rows, command.pty.cols, 0, 0))

        def own_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        try:
            popen = subprocess.Popen(
                command.argv, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=own_terminal, **options
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return popen, {"pty": ours}

    def _keep(self, popen: subprocess.Popen[bytes], fds: dict[str, int]) -> HostProcess:
        process = HostProcess(popen, dict(fds))
        self.processes.append(process)
        return process

    async def call(self, op: str, fds: Sequence[int] = (), **args: Any) -> Reply:
        """The file agent's own operations, on the files of this host."""
        if self.dead.is_set():
            raise GuestGone
        try:
            value, given = agent_ops.HANDLERS[op](json.loads(json.dumps(args)), list(fds))
        except OSError as error:
            raise GuestError(error.errno or errno.EIO, error.strerror or str(error)) from error
        return Reply(json.loads(json.dumps(value)), given)

    async def user(self, name: str) -> User:
        if name not in ("user", "root"):
            raise KeyError(name)
        me = pwd.getpwuid(os.getuid())
        return User(name=name, uid=me.pw_uid, gid=me.pw_gid, groups=(), home=self.home, shell="/bin/bash")

    async def connect(self, port: int) -> int:
        raise GuestError(errno.ECONNREFUSED, "nothing listens")

    async def freeze(self) -> None: ...

    async def thaw(self) -> None: ...

    async def usage(self) -> Usage:
        return Usage(
            cpu_count=2,
            cpu_used_pct=12.5,
            mem_used=3 << 20,
            mem_total=7 << 20,
            mem_cache=0,
            disk_used=1,
            disk_total=2,
        )

    async def kill(self) -> None:
        for process in self.processes:
            process.kill_tree()
            await process.wait()
        agent_ops.HANDLERS["watch_close"]({}, [])
        self.dead.set()


class Served:
    """envd behind a small gateway: while the sandbox lives its requests, then the gateway's 502."""

    def __init__(self, guest: HostGuest, envd: Envd, url: str) -> None:
        self.guest = guest
        self.envd = envd
        self.url = url
        self.headers = {"X-Access-Token": TOKEN}
        self.gone = False

    async def kill(self) -> None:
        """As the control plane does it: the sandbox is gone for its gateway before its streams end."""
        self.gone = True
        await self.envd.abort(f"the connection to sandbox {SANDBOX_ID} ended before the stream completed")
        await self.guest.kill()

    def options(self, token: str = TOKEN) -> dict[str, Any]:
        headers = {"E2b-Sandbox-Id": SANDBOX_ID, "E2b-Sandbox-Port": "49983", "X-Access-Token": token}
        return {
            "sandbox_id": SANDBOX_ID,
            "sandbox_domain": None,
            "envd_version": Version("0.6.13"),
            "envd_access_token": token,
            "traffic_access_token": None,
            "connection_config": ConnectionConfig(
                api_key="e2b_" + "0" * 40, sandbox_url=self.url, extra_sandbox_headers=headers
            ),
        }


async def eventually(condition: Callable[[], Any], *, within: float = 20.0) -> None:
    """Wait until the condition holds; the deadline only ends a failing test."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110 -- conditions of other processes make no event
            await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    return eventually


@pytest.fixture
async def served(tmp_path: Any) -> AsyncIterator[Served]:
    guest = HostGuest(str(tmp_path))
    envd = Envd(EnvdContext(sandbox_id=SANDBOX_ID, guest=guest, access_token=TOKEN, env_vars={"OF_THE_SANDBOX": "yes"}))

    async def gateway(scope: Any, receive: Any, send: Any) -> None:
        if not guest.dead.is_set() and not served.gone:
            await envd(scope, receive, send)
            return
        body = b'{"sandboxId":"%s","message":"The sandbox was not found","code":502}' % SANDBOX_ID.encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 502, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    # asyncio sets TCP_NODELAY only on sockets that say they are TCP; without it every answer waits 40 ms for an ACK.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(gateway, lifespan="off", log_level="warning", timeout_keep_alive=320))
    served = Served(guest, envd, f"http://127.0.0.1:{listener.getsockname()[1]}")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await eventually(lambda: server.started)
    try:
        yield served
    finally:
        await guest.kill()
        await eventually(lambda: envd.open_calls == 0)
        server.should_exit = server.force_exit = True
        await serving
        listener.close()


@pytest.fixture
def sandbox(served: Served) -> AsyncSandbox:
    return AsyncSandbox(**served.options())


@pytest.fixture
def sync_sandbox(served: Served) -> Sandbox:
    return Sandbox(**served.options())


class WireStream:
    """A server stream as it is on the wire, read only when asked to."""

    pid: int  # of the process it shows, when `Wire.start` made it

    def __init__(self, response: httpx.Response) -> None:
        self._chunks = response.aiter_raw()
        self._buffer = bytearray()

    async def frame(self) -> tuple[int, dict[str, Any]]:
        """The next envelope: flags (2 ends the stream) and JSON."""
        while len(self._buffer) < 5 or len(self._buffer) < 5 + int.from_bytes(self._buffer[1:5]):
            self._buffer += await anext(self._chunks)
        flags, end = self._buffer[0], 5 + int.from_bytes(self._buffer[1:5])
        body = json.loads(bytes(self._buffer[5:end]))
        del self._buffer[:end]
        return flags, body

    async def event(self) -> dict[str, Any]:
        flags, body = await self.frame()
        assert flags == 0, body
        return body["event"]

    async def rest(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """All events to the end of the stream, and what its last envelope says: {} or {"error": …}."""
        events = []
        while True:
            flags, body = await self.frame()
            if flags & 2:
                return events, body
            events.append(body["event"])


class Wire:
    """envd's RPCs without the SDK: for what the SDK would hide, mend or never do."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.http = httpx.AsyncClient(base_url=served.url, headers=served.headers, timeout=60, trust_env=False)

    async def call(self, method: str, message: dict[str, Any]) -> httpx.Response:
        return await self.http.post(f"/process.Process/{method}", json=message)

    @contextlib.asynccontextmanager
    async def stream(self, method: str, message: dict[str, Any], **headers: str) -> AsyncIterator[WireStream]:
        body = json.dumps(message).encode()
        async with self.http.stream(
            "POST",
            f"/process.Process/{method}",
            content=bytes([0]) + len(body).to_bytes(4) + body,
            headers={"Content-Type": "application/connect+json"} | {k.replace("_", "-"): v for k, v in headers.items()},
        ) as response:
            yield WireStream(response)

    @contextlib.asynccontextmanager
    async def start(
        self, script: str, extra: dict[str, Any] | None = None, **headers: str
    ) -> AsyncIterator[WireStream]:
        """Start a shell script; the stream stands after its start event, and has its pid."""
        process = {"cmd": "/bin/bash", "args": ["-c", script]}
        async with self.stream("Start", {"process": process, "stdin": False} | (extra or {}), **headers) as stream:
            stream.pid = (await stream.event())["start"]["pid"]
            yield stream


@pytest.fixture
async def wire(served: Served) -> AsyncIterator[Wire]:
    wire = Wire(served)
    yield wire
    await wire.http.aclose()
