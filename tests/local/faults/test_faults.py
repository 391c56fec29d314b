"""What goes wrong outside the server: a client that goes, a disk that is full, a sandbox that takes all it can get, a
SIGKILL. Others are unhurt, and nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import AsyncSandbox, AsyncTemplate, CommandExitException, NotEnoughSpaceException
from e2b.exceptions import SandboxException, TimeoutException

from managed_e2b.local.background import LocalServerError, LocalServerProcess

from .conftest import Seen, eventually, state

pytestmark = pytest.mark.timeout(180)

MB = 1024 * 1024


# -- a client that goes ------------------------------------------------------------------------------------------------


def raw(seen: Seen, head: str, body: bytes = b"", **headers: str) -> socket.socket:
    """Begin a request on a connection of its own."""
    host, port = seen.process.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    lines = [f"{head} HTTP/1.1", f"Host: {host}", f"X-API-KEY: {seen.process.api_key}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return connection


def to_envd(sandbox: AsyncSandbox) -> dict[str, str]:
    token = sandbox._envd_access_token
    assert token is not None
    return {"E2b_Sandbox_Id": sandbox.sandbox_id, "E2b_Sandbox_Port": "49983", "X_Access_Token": token}


def envelope(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return b"\0" + len(body).to_bytes(4, "big") + body


def stream(seen: Seen, sandbox: AsyncSandbox, method: str, message: dict[str, Any]) -> socket.socket:
    body = envelope(message)
    kind = {"Content_Type": "application/connect+json", "Connect_Protocol_Version": "1"}
    return raw(seen, f"POST /{method}", body, Content_Length=str(len(body)), **kind, **to_envd(sandbox))


async def first_bytes(connection: socket.socket, wanted: bytes) -> None:
    """Wait until the answer holds this."""
    connection.setblocking(False)
    loop, got = asyncio.get_running_loop(), b""
    async with asyncio.timeout(30):
        while wanted not in got:
            chunk = await loop.sock_recv(connection, 65536)
            assert chunk, got
            got += chunk


def reset(connection: socket.socket) -> None:
    """Close at once, with a reset: as a process that was killed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, (1).to_bytes(4, "little") + bytes(4))
    connection.close()


async def test_a_client_that_goes_in_the_middle_of_everything(seen: Seen) -> None:
    before = seen.held()
    sandbox = await AsyncSandbox.create(timeout=300, metadata={"of": "the test"}, **seen.options)
    make = json.dumps({"templateID": "base", "timeout": 300, "metadata": {"of": "the test"}}).encode()
    json_type = {"Content_Type": "application/json"}

    # a create, before it is answered and before it is whole
    reset(raw(seen, "POST /v2/sandboxes", make, Content_Length=str(len(make)), **json_type))
    reset(raw(seen, "POST /v2/sandboxes", make[:10], Content_Length=str(len(make)), **json_type))

    # a command whose output is read: it works on, as E2B's do
    script = "touch began; for i in $(seq 200); do echo $i; done; exec sleep 1000"
    process = {"cmd": "/bin/bash", "args": ["-c", script], "cwd": "/home/user"}
    running = stream(seen, sandbox, "process.Process/Start", {"process": process})
    await first_bytes(running, b"data")
    reset(running)
    assert any("sleep 1000" in " ".join(process.args) for process in await sandbox.commands.list())

    # a watcher, an upload that stops, a download that nobody reads
    watching = stream(seen, sandbox, "filesystem.Filesystem/WatchDir", {"path": "/home/user"})
    await first_bytes(watching, b"start")
    reset(watching)
    head = "POST /files?path=/home/user/half&username=user"
    octets = {"Content_Type": "application/octet-stream", "Content_Length": str(10 * MB)}
    uploading = raw(seen, head, b"x" * MB, **octets, **to_envd(sandbox))
    reset(uploading)
    await sandbox.commands.run("head -c 50M /dev/zero > large")
    downloading = raw(seen, "GET /files?path=/home/user/large&username=user", **to_envd(sandbox))
    await first_bytes(downloading, b"200")
    reset(downloading)

    # a pause, a fork and a snapshot
    for path, body in (("pause", {}), ("connect", {"timeout": 300}), ("fork", {"count": 2}), ("snapshots", {})):
        text = json.dumps(body).encode()
        reset(
            raw(seen, f"POST /sandboxes/{sandbox.sandbox_id}/{path}", text, Content_Length=str(len(text)), **json_type)
        )

    async def ours() -> list[str]:
        pages = AsyncSandbox.list(**seen.options)
        found = []
        while pages.has_next:
            found += [item.sandbox_id for item in await pages.next_items() if item.metadata.get("of") == "the test"]
        return found

    alive = await back(seen, sandbox.sandbox_id)
    assert (await alive.commands.run("echo alive; ls began")).stdout == "alive\nbegan\n"
    for snapshot in await snapshots_of(alive):
        await AsyncSandbox.delete_snapshot(snapshot, **seen.options)
    async with asyncio.timeout(60):
        while found := await ours():  # what was asked for may still be made
            for sandbox_id in found:
                await AsyncSandbox.kill(sandbox_id, **seen.options)
            await asyncio.sleep(0.1)
    await seen.settled(before)


async def back(seen: Seen, sandbox_id: str) -> AsyncSandbox:
    """The sandbox, once what was asked for it is done, the pause among it."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(SandboxException, TimeoutException):
                sandbox = await AsyncSandbox.connect(sandbox_id, timeout=300, **seen.options)
                for _ in range(5):
                    await sandbox.commands.run("true")
                return sandbox
            await asyncio.sleep(0.1)


async def snapshots_of(sandbox: AsyncSandbox) -> list[str]:
    pages, found = sandbox.list_snapshots(), []
    while pages.has_next:
        found += [item.snapshot_id for item in await pages.next_items()]
    return found


# -- a disk that is full -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small filesystem to fill")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160m,nr_inodes=100k,mode=755", "me2b-test", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this host lets nobody mount a small filesystem: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def full(small_disk: Path) -> Iterator[Seen]:
    """A server whose sandboxes have little room."""
    process = LocalServerProcess(data_dir=small_disk / "data")
    try:
        process.start()
    except LocalServerError as error:
        pytest.skip(f"this host cannot run sandboxes on a tmpfs: {error}")
    yield Seen(process)
    process.stop()


async def test_a_full_disk_is_told_and_others_go_on(full: Seen) -> None:
    greedy, other = [await AsyncSandbox.create(timeout=300, **full.options) for _ in range(2)]
    with pytest.raises(CommandExitException) as ended:
        await greedy.commands.run("head -c 1G /dev/zero > ~/fill")
    assert "No space left" in ended.value.stderr
    with pytest.raises(NotEnoughSpaceException):
        await greedy.files.write("/home/user/more", b"x" * MB)
    with pytest.raises(NotEnoughSpaceException):
        await other.files.write("/home/user/more", b"x" * MB)
    assert (await other.commands.run("echo goes on")).stdout == "goes on\n"
    with pytest.raises(SandboxException) as refused:
        await greedy.create_snapshot()
    assert "space" in str(refused.value)
    assert len(await AsyncSandbox.list(**full.options).next_items()) == 2
    await greedy.kill()
    await other.files.write("/home/user/more", b"x" * MB)
    assert (await other.commands.run("stat -c %s ~/more")).stdout == f"{MB}\n"
    await (await AsyncSandbox.create(timeout=60, **full.options)).kill()
    await other.kill()


# -- a sandbox that takes all it can get -------------------------------------------------------------------------------


BOMB = "bomb() { bomb & bomb & wait; }; bomb"


@pytest.fixture
async def pair(seen: Seen) -> AsyncIterator[tuple[AsyncSandbox, AsyncSandbox]]:
    bad, good = [await AsyncSandbox.create(timeout=300, **seen.options) for _ in range(2)]
    yield bad, good
    for sandbox in (bad, good):
        await sandbox.kill()


async def test_a_fork_bomb_costs_others_nothing_but_time(seen: Seen, pair: tuple[AsyncSandbox, AsyncSandbox]) -> None:
    bad, good = pair
    before = seen.held()
    await bad.commands.run(f"ulimit -u 300; {BOMB}", background=True, timeout=0)
    for number in range(3):
        assert (await good.commands.run(f"echo {number}")).stdout == f"{number}\n"
    await bad.kill()
    assert (await good.commands.run("echo after")).stdout == "after\n"
    await seen.settled(before)


@pytest.fixture
async def small(seen: Seen) -> AsyncIterator[AsyncSandbox]:
    """A sandbox of a template that was built with little memory, and one CPU."""
    name, template = f"small-{secrets.token_hex(4)}", AsyncTemplate().from_template("base")
    await AsyncTemplate.build(template, name, cpu_count=1, memory_mb=128, **seen.options)
    sandbox = await AsyncSandbox.create(name, timeout=300, **seen.options)
    yield sandbox
    await sandbox.kill()


async def test_a_memory_hog_ends_as_a_killed_command(
    seen: Seen, small: AsyncSandbox, pair: tuple[AsyncSandbox, AsyncSandbox]
) -> None:
    info = await small.get_info()
    if info.memory_mb != 128:
        pytest.skip("this host does not limit the memory of a sandbox")
    assert info.cpu_count == 1
    with pytest.raises(CommandExitException) as ended:
        await small.commands.run("x=$(tr '\\0' x < /dev/zero)", timeout=120)
    assert ended.value.exit_code in (-1, 137)
    assert (await small.commands.run("echo still")).stdout == "still\n"
    assert (await pair[1].commands.run("echo unhurt")).stdout == "unhurt\n"
    (metric, *_) = await small.get_metrics()
    assert (metric.mem_total, metric.cpu_count) == (128 * MB, 1)


# -- a server that is killed -------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def test_a_killed_server_leaves_no_process_and_the_next_one_says_what_it_removed(seen: Seen, place: Path) -> None:
    """`seen`: skips where the host cannot run sandboxes."""
    first = LocalServerProcess(data_dir=place)
    first.start()
    options = {"api_key": first.api_key, "api_url": first.url, "sandbox_url": first.url}
    sandboxes = [await AsyncSandbox.create(timeout=300, **options) for _ in range(3)]
    for sandbox in sandboxes:
        await sandbox.commands.run("(setsid sleep 4242 &); echo x > ~/file", timeout=30)
    await sandboxes[0].pause()
    spawner = Seen(first).spawner
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.stop()
    await eventually(lambda: state(spawner) == "Z" and not any(map(is_ours, pids())))

    command = [sys.executable, "-m", "managed_e2b.cli", "serve", "--port", "0", "--json", "--data-dir", str(place)]
    environment = {**os.environ, "XDG_STATE_HOME": str(place.parent / "state")}
    second = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert second.stdout is not None
    assert second.stderr is not None
    try:
        ready = json.loads(await asyncio.wait_for(second.stdout.readline(), 60))
        assert ready["pid"] == second.pid
        assert list((place / "sandboxes").glob("*/guests/*")) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            second.terminate()
        told = (await second.stderr.read()).decode()
        await second.wait()
    assert "left by a server that died" in told
    assert str(place) in told


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def is_ours(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text() == "sleep\x004242\x00"
    except (FileNotFoundError, ProcessLookupError):
        return False
