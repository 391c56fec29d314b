"""The server as a whole: start, stop, its key and state file, and the process that `backend="local"` runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest

from managed_e2b.local import keys
from managed_e2b.local.background import LocalServerError, LocalServerProcess
from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.runtime.deaths import MOST
from managed_e2b.local.server import LocalServer

from .conftest import FakeRuntime

PATIENCE = 30.0


def ask(url, key, method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, method=method, data=data, headers={"X-API-KEY": key})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=PATIENCE) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def listening_addresses(port):
    """The IPv4 addresses something listens on at the port, as the kernel writes them."""
    sockets = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        local.split(":")[0] for local, _, state in sockets if state == "0A" and int(local.split(":")[1], 16) == port
    ]


def wait_for_end(pidfd):
    """Whether the process ended in time."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(PATIENCE * 1000))


@pytest.fixture(scope="module")
def can_run_sandboxes():
    try:
        with LocalServerProcess():
            pass
    except LocalServerError as error:
        pytest.skip(f"this host cannot run sandboxes: {error}")


class TestInProcess:
    async def test_it_listens_on_the_loopback_address_only(self, world):
        host, port = world.server.url.removeprefix("http://").split(":")
        assert host == "127.0.0.1"
        assert listening_addresses(int(port)) == ["0100007F"]

    async def test_a_port_that_is_taken(self, world, serve):
        server = LocalServer(port=int(world.server.url.rpartition(":")[2]), runtime=world.runtime)
        with pytest.raises(OSError, match="in use"):
            await server.start()
        await server.close()

    async def test_a_host_that_cannot_run_sandboxes_leaves_no_listener(self, world, runtime_unavailable, monkeypatch):
        async def fail():
            raise runtime_unavailable

        monkeypatch.setattr(world.runtime, "start", fail)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = LocalServer(port=port, runtime=world.runtime)
        with pytest.raises(type(runtime_unavailable)):
            await server.start()
        with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", port))
        await server.close()

    async def test_it_can_be_closed_twice_and_leaves_no_descriptor(self, serve):
        before = len(os.listdir("/proc/self/fd"))
        world = await serve(clock=None)
        await world.create()
        await world.api.aclose()
        await world.anonymous.aclose()
        await world.server.close()
        await world.server.close()
        assert len(os.listdir("/proc/self/fd")) <= before
        assert not world.runtime.alive

    async def test_a_stream_that_is_open_does_not_hold_up_the_end(self, world):
        sandbox = await world.create()
        async with world.anonymous.stream("GET", "/stream", headers=world.envd_headers(sandbox)) as stream:
            await anext(stream.aiter_text())
            async with asyncio.timeout(PATIENCE):
                await world.server.close()


class TestKeys:
    def test_a_key_has_the_form_every_sdk_accepts(self):
        key = keys.choose_api_key({})
        assert key.startswith("e2b_")
        assert len(bytes.fromhex(key.removeprefix("e2b_"))) == 20
        assert keys.choose_api_key({"E2B_API_KEY": "mine"}) == "mine"
        assert keys.choose_api_key({"E2B_API_KEY": ""}).startswith("e2b_")

    def test_the_state_is_for_its_user_alone(self, tmp_path):
        path = keys.state_file({"XDG_STATE_HOME": str(tmp_path)})
        state = keys.ServerState("http://127.0.0.1:1", "e2b_00", 42)
        old_mask = os.umask(0)
        try:
            keys.write_state(path, state)
        finally:
            os.umask(old_mask)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert keys.read_state(path) == state
        assert "e2b_00" not in repr(state)
        assert os.listdir(path.parent) == ["local.json"]

    def test_only_its_own_state_is_removed(self, tmp_path):
        path = tmp_path / "local.json"
        keys.write_state(path, keys.ServerState("http://127.0.0.1:1", "e2b_00", 42))
        keys.remove_state(path, 41)
        assert path.exists()
        keys.remove_state(path, 42)
        assert not path.exists()
        keys.remove_state(path, 42)

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "{}", '{"url": 1}', "null", '{"url": "a", "api_key": "b", "pid": "x"}']
    )
    def test_a_broken_state_file_is_none(self, tmp_path, text):
        path = tmp_path / "local.json"
        path.write_text(text)
        assert keys.read_state(path) is None

    def test_a_relative_state_home_is_ignored(self):
        assert keys.state_file({"XDG_STATE_HOME": "relative"}).is_absolute()


SERVE = """
    import sys
    from managed_e2b.local import server
    server.run_server(0, announce=lambda s: print(s.url, flush=True))
"""


@pytest.mark.usefixtures("can_run_sandboxes")
class TestForeground:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_it_cleanly(self, tmp_path, number):
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "E2B_API_KEY": "e2b_" + "a" * 40}
        command = [sys.executable, "-c", textwrap.dedent(SERVE)]
        with contextlib.ExitStack() as cleanup:
            process = cleanup.enter_context(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            )
            cleanup.callback(process.kill)
            url = process.stdout.readline().strip()
            state = keys.read_state(tmp_path / "me2b" / "local.json")
            assert (state.url, state.api_key, state.pid) == (url, "e2b_" + "a" * 40, process.pid)
            ask(url, state.api_key, "POST", "/v2/sandboxes", {"templateID": "base"})
            process.send_signal(number)
            assert process.wait(PATIENCE) == 0
        assert not (tmp_path / "me2b" / "local.json").exists()


PARENT = r"""
    import os, sys, time
    from managed_e2b.local.background import LocalServerProcess

    def say(*words):  # in one write: two processes share the pipe
        os.write(1, " ".join(map(str, words)).encode() + b"\n")

    server = LocalServerProcess()
    server.start()
    if "fork" in sys.argv and os.fork() == 0:
        server.stop()                       # not ours: it must go on
        say("forked", os.getpid())
        time.sleep(600)
    say("server", server.pid, server.url, server.api_key)
    time.sleep(600)
"""


@pytest.mark.usefixtures("can_run_sandboxes")
class TestBackground:
    def test_it_serves_until_it_is_stopped_and_the_key_is_nowhere_to_be_seen(self):
        server = LocalServerProcess()
        server.start()
        server.start()  # it runs already
        try:
            assert server.alive
            ask(server.url, server.api_key, "POST", "/v2/sandboxes", {"templateID": "base"})
            assert ask(server.url, server.api_key, "GET", "/me2b/stats")["live"] == 1
            for name in ("cmdline", "environ"):
                assert server.api_key.encode() not in Path(f"/proc/{server.pid}/{name}").read_bytes()
            assert os.getsid(server.pid) == server.pid  # Ctrl-C does not reach it
            pidfd = os.pidfd_open(server.pid)
        finally:
            server.stop()
        assert wait_for_end(pidfd)
        os.close(pidfd)
        server.stop()
        assert not server.alive

    def test_a_port_that_is_taken_is_told(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            server = LocalServerProcess(port=taken.getsockname()[1])
            with pytest.raises(LocalServerError, match="in use"):
                server.start()
        assert server.pid is None

    @pytest.mark.parametrize("arguments", [[], ["fork"]])
    def test_it_dies_with_its_parent_even_when_a_fork_of_that_lives_on(self, arguments):
        command = [sys.executable, "-c", textwrap.dedent(PARENT), *arguments]
        with contextlib.ExitStack() as cleanup:
            parent = cleanup.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            cleanup.callback(parent.kill)
            said = dict(parent.stdout.readline().split(maxsplit=1) for _ in range(1 + len(arguments)))
            if "forked" in said:
                cleanup.callback(os.kill, int(said["forked"]), signal.SIGKILL)
            pid, url, key = said["server"].split()
            pidfd = os.pidfd_open(int(pid))
            cleanup.callback(os.close, pidfd)
            ask(url, key, "POST", "/v2/sandboxes", {"templateID": "base"})
            parent.kill()
            assert wait_for_end(pidfd)

    def test_it_outlives_its_spawner_a_few_times_and_then_ends_with_one_line(self, capfd):
        server = LocalServerProcess()
        server.start()
        try:
            for _ in range(MOST):
                kill_spawner(server.pid)
                ask(server.url, server.api_key, "POST", "/v2/sandboxes", {"templateID": "base"})
            pidfd = os.pidfd_open(server.pid)
            kill_spawner(server.pid)
            assert wait_for_end(pidfd)
            os.close(pidfd)
        finally:
            server.stop()
        last = capfd.readouterr().err.splitlines()[-1]
        assert last.startswith("me2b local server: the process that makes sandboxes died more than")


def kill_spawner(server):
    """The child of a server that makes its sandboxes, once there is one."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if is_spawner_of(server, Path("/proc", pid)):
                    os.kill(int(pid), signal.SIGKILL)
                    return
    raise AssertionError("the server has no spawner")


def is_spawner_of(server, directory):
    parent = int((directory / "stat").read_text().rpartition(") ")[2].split()[1])
    return parent == server and (directory / "cmdline").read_bytes().startswith(b"me2b-spawner")


async def test_a_runtime_that_fails_ends_the_server():
    runtime = FakeRuntime()
    async with LocalServer(runtime=runtime) as server:
        serving = asyncio.create_task(server.serve_forever())
        runtime.failure.set()
        with pytest.raises(RuntimeUnavailable, match="failed"):
            await serving


def test_importing_the_background_server_is_cheap():
    check = "import sys, managed_e2b.local.background; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert "managed_e2b.local.background" in found.stdout.split()
    assert not {"uvicorn", "starlette", "connectrpc"} & set(found.stdout.split())


def is_cut(connection):
    connection.settimeout(PATIENCE)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_leave_descriptors_for_the_sandboxes(can_run_sandboxes):
    with LocalServerProcess() as server, contextlib.ExitStack() as stack:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        idle = [stack.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(100)]
        assert is_cut(stack.enter_context(socket.create_connection(address, PATIENCE)))
        idle[0].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert idle[0].recv(12) == b"HTTP/1.1 204"
        idle[0].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        while idle[0].recv(4096):
            pass
        sandbox = ask(server.url, server.api_key, "POST", "/v2/sandboxes", {"templateID": "base"})
        assert sandbox["sandboxID"]
