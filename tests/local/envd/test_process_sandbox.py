"""The process service in real sandboxes, through the whole local server and the unmodified SDK."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from e2b import AsyncSandbox, CommandExitException, Sandbox, SandboxNotRunningException, TimeoutException
from e2b.sandbox.commands.command_handle import PtySize

from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.server import LocalServer

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for all: starting one takes its time


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[LocalServer]:
    server = LocalServer()
    try:
        await server.start()
    except RuntimeUnavailable as error:
        pytest.skip(str(error))
    try:
        yield server
    finally:
        await server.close()


def options(server: LocalServer) -> dict[str, str]:
    return {"api_key": server.api_key, "api_url": server.url, "sandbox_url": server.url}


@pytest_asyncio.fixture(loop_scope="module")
async def box(server: LocalServer) -> AsyncIterator[AsyncSandbox]:
    box = await AsyncSandbox.create(**options(server))
    yield box
    await box.kill()


def envd_of(server: LocalServer, box: AsyncSandbox):
    found = server.registry.find(box.sandbox_id)
    assert found is not None
    return found.envd


async def test_the_login_shell_of_the_user(box):
    result = await box.commands.run("id -un; pwd; echo $PATH; echo $E2B_SANDBOX_ID $E2B_TEMPLATE_ID; tty || true")
    assert result.stdout.splitlines() == [
        "user",
        "/home/user",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        f"{box.sandbox_id} base",
        "not a tty",
    ]


async def running(box: AsyncSandbox, pattern: str, count: int) -> None:
    """Wait until so many processes of the sandbox match."""
    async with asyncio.timeout(30):
        while (await box.commands.run(f"pgrep -fc '{pattern}' || true")).stdout != f"{count}\n":
            pass


@pytest.mark.parametrize("name", ["user", "root"])
async def test_killing_a_command_leaves_nothing_of_it(box, name):
    """Neither children, nor orphans, nor those that made a session of their own."""
    script = "sleep 9871 & (setsid sleep 9872 &) ; (setsid sh -c 'sleep 9873 & exec sleep 9874' &); sleep 9875; :"
    command = await box.commands.run(script, background=True, user=name)
    await running(box, "^sleep 987[1-5]", 5)
    assert await command.kill()
    await running(box, "^sleep 987[1-5]", 0)
    with pytest.raises(CommandExitException) as raised:
        await command.wait()
    assert raised.value.error == "signal: killed"


async def test_a_timeout_kills_the_children_too(box):
    starting = asyncio.create_task(box.commands.run("(setsid sleep 9876 &); sleep 9877; :", timeout=1.5))
    await running(box, "^sleep 987[67]", 2)
    with pytest.raises(TimeoutException):
        await starting
    await running(box, "^sleep 987[67]", 0)


async def test_a_server_started_in_the_background_lives_on(box):
    """The way people do it, with its output going nowhere in particular."""
    await box.commands.run("python3 -u -m http.server 8123 &")
    get = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://127.0.0.1:8123/\").status)'"
    async with asyncio.timeout(30):
        for _ in range(3):  # each makes it write a line to the pipe whose reader has its answer long ago
            while True:
                with contextlib.suppress(CommandExitException):
                    assert (await box.commands.run(get)).stdout == "200\n"
                    break


async def test_killing_the_sandbox_ends_its_streams_on_both_faces(box, server, until):
    command = await box.commands.run("sleep 1000", background=True)
    terminal = await box.pty.create(PtySize(rows=24, cols=80), on_data=lambda data: None)
    same = await asyncio.to_thread(Sandbox.connect, box.sandbox_id, **options(server))
    running = asyncio.create_task(asyncio.to_thread(same.commands.run, "sleep 1000"))
    envd = envd_of(server, box)
    await until(lambda: envd.processes.readers == 3)
    assert await box.kill()
    for waiting in (command.wait(), terminal.wait(), running):
        with pytest.raises(SandboxNotRunningException, match="was killed or reached its end of life"):
            await waiting
    assert envd.processes.readers == 0


async def test_a_sandbox_that_dies_by_itself_ends_its_streams(box, server):
    command = await box.commands.run("sleep 1000", background=True)
    found = server.registry.find(box.sandbox_id)
    assert found is not None
    await found.guest.kill()  # nobody told envd
    with pytest.raises(SandboxNotRunningException):
        await command.wait()


async def test_a_process_killed_from_inside_is_an_end_like_any_other(box):
    command = await box.commands.run("sleep 1000", background=True)
    await box.commands.run(f"kill -9 {command.pid}")
    with pytest.raises(CommandExitException) as raised:
        await command.wait()
    assert (raised.value.exit_code, raised.value.error) == (-1, "signal: killed")


async def test_a_terminal(box):
    output = bytearray()
    terminal = await box.pty.create(PtySize(rows=24, cols=80), on_data=output.extend)
    await box.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    await box.pty.send_stdin(terminal.pid, b"tty; stty size; exit 0\n")
    assert (await terminal.wait()).exit_code == 0
    assert b"/dev/pts/" in output
    assert b"30 100" in output


async def test_a_terminal_with_a_job_that_outlives_it(box):
    terminal = await box.pty.create(PtySize(rows=24, cols=80), on_data=lambda data: None)
    await box.pty.send_stdin(terminal.pid, b"(trap '' HUP; sleep 1000) & exit 0\n")
    async with asyncio.timeout(20):
        assert (await terminal.wait()).exit_code == 0


async def test_pause_ends_streams_and_keeps_processes(box, server):
    command = await box.commands.run("cat", background=True, stdin=True)
    assert await box.pause()
    with pytest.raises(SandboxNotRunningException):
        await command.wait()
    await box.connect()
    again = await box.commands.connect(command.pid)
    await box.commands.send_stdin(command.pid, "still here")
    await box.commands.close_stdin(command.pid)
    assert (await again.wait()).stdout == "still here"


async def test_large_output_and_input(box):
    assert len((await box.commands.run("head -c 20000000 /dev/zero")).stdout) == 20_000_000
    command = await box.commands.run("wc -c", background=True, stdin=True)
    await command.send_stdin(b"x" * 5_000_000)
    await command.close_stdin()
    assert (await command.wait()).stdout == "5000000\n"


async def test_many_commands_leave_no_descriptor(box, server, until):
    envd = envd_of(server, box)

    async def some(count: int) -> None:
        for _ in range(count):
            assert (await box.commands.run("echo $$ >&2; exit 0")).stdout == ""

    async def many(each: int) -> None:
        await asyncio.gather(*(some(each) for _ in range(8)))
        await until(lambda: not envd.processes._tasks)

    await many(1)
    before = _process_descriptors()
    await many(25)
    assert _process_descriptors() == before


def _process_descriptors() -> int:
    """Pipes, pidfds and namespaces; sockets come and go with the client's connections."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith(("pipe:", "anon_inode:[pidfd]", "mnt:", "uts:", "ipc:")) for link in links)
