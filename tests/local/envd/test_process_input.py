"""Input for commands: single messages, an ordered stream, its end, and what happens when nobody reads it."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import sys
import termios

import pytest
from e2b import NotFoundException, SandboxException

BIG = 10 * 1024 * 1024


def stdin(data: bytes) -> dict[str, str]:
    return {"stdin": base64.b64encode(data).decode()}


async def test_input_and_its_end(sandbox):
    command = await sandbox.commands.run("cat", background=True, stdin=True)
    await command.send_stdin("Hello, ")
    await command.send_stdin(b"World \xc3\xa9!")
    await command.close_stdin()
    assert (await command.wait()).stdout == "Hello, World é!"


async def test_large_input_in_one_message(sandbox):
    command = await sandbox.commands.run("wc -c", background=True, stdin=True)
    await command.send_stdin(b"x" * BIG)
    await command.close_stdin()
    assert (await command.wait()).stdout.strip() == str(BIG)


async def test_an_ordered_stream_of_input(sandbox):
    command = await sandbox.commands.run("cat", background=True, stdin=True)
    async with sandbox.commands.stream_input(command.pid) as stream:
        for number in range(200):
            await stream.send(f"{number}\n")
    await command.close_stdin()
    assert (await command.wait()).stdout == "".join(f"{number}\n" for number in range(200))


async def test_both_ways_at_once(sandbox):
    """The command answers while it is still being fed, and neither side waits for the other to be done."""
    command = await sandbox.commands.run("cat", background=True, stdin=True)
    async with sandbox.commands.stream_input(command.pid) as stream:
        for _ in range(40):
            await stream.send(b"x" * 250_000)
    await command.close_stdin()
    assert len((await command.wait()).stdout) == 40 * 250_000


async def test_the_sync_sdk_streams_input_too(sync_sandbox):
    def feed() -> str:
        command = sync_sandbox.commands.run("cat", background=True, stdin=True)
        sync_sandbox.commands.stream_input(command.pid, ["one ", b"two"])
        command.close_stdin()
        return command.wait().stdout

    assert await asyncio.to_thread(feed) == "one two"


async def test_stdin_is_empty_unless_asked_for(sandbox):
    assert (await sandbox.commands.run("cat; echo end")).stdout == "end\n"
    command = await sandbox.commands.run("sleep 1000", background=True)
    with pytest.raises(SandboxException, match="stdin not enabled or closed"):
        await sandbox.commands.send_stdin(command.pid, "x")
    await sandbox.commands.close_stdin(command.pid)


async def test_closing_twice_is_fine(sandbox):
    command = await sandbox.commands.run("sleep 1000", background=True, stdin=True)
    await command.close_stdin()
    await command.close_stdin()
    with pytest.raises(SandboxException, match="stdin not enabled or closed"):
        await command.send_stdin("x")


async def test_old_clients_that_say_nothing_get_a_stdin(wire):
    process = {"cmd": "cat"}
    async with wire.stream("Start", {"process": process}) as stream:
        pid = (await stream.event())["start"]["pid"]
        await wire.call("SendInput", {"process": {"pid": pid}, "input": stdin(b"hello")})
        assert (await stream.event())["data"] == {"stdout": stdin(b"hello")["stdin"]}


async def test_input_for_a_command_that_does_not_read_disturbs_nobody(wire, served, until):
    """The pipe is full and the client gives up: nothing of it is left, and the command can be fed again."""
    async with wire.start("sleep 1000", {"stdin": True}) as stream:
        select = {"process": {"pid": stream.pid}}
        stuck = asyncio.create_task(wire.call("SendInput", select | {"input": stdin(b"x" * 1_000_000)}))
        await until(lambda: _unread(served) >= 64 * 1024)
        waiting = asyncio.create_task(wire.call("SendInput", select | {"input": stdin(b"y")}))
        await until(lambda: served.envd.open_calls == 3)
        assert (await wire.call("List", {})).status_code == 200
        stuck.cancel()
        waiting.cancel()
        await until(lambda: served.envd.open_calls == 1)
        await wire.call("SendSignal", select | {"signal": "SIGNAL_SIGKILL"})
        events, _ = await stream.rest()
    assert events[-1]["end"]["status"] == "signal: killed"


async def test_a_stream_of_input_whose_client_left_is_dropped(wire, served, until):
    async with wire.start("sleep 1000", {"stdin": True}) as stream:
        messages = [
            {"start": {"process": {"pid": stream.pid}}},
            {"data": {"input": stdin(b"x" * 100_000)}},
        ]
        bodies = [json.dumps(message).encode() for message in messages]

        async def feed():
            for body in bodies:
                yield b"\0" + len(body).to_bytes(4) + body
            await asyncio.Event().wait()

        feeding = asyncio.create_task(
            wire.http.post(
                "/process.Process/StreamInput", content=feed(), headers={"Content-Type": "application/connect+json"}
            )
        )
        await until(lambda: _unread(served) >= 64 * 1024)
        assert served.envd.open_calls == 2
        feeding.cancel()
        await until(lambda: served.envd.open_calls == 1)


def _unread(served) -> int:
    """Bytes in the stdin pipe of the one process."""
    size = fcntl.ioctl(served.guest.processes[0].stdin_fd, termios.FIONREAD, bytes(4))
    return int.from_bytes(size, sys.byteorder)


async def test_input_waiting_for_a_command_that_ends_fails(wire, served, until):
    async with wire.start("sleep 1000", {"stdin": True}) as stream:
        select = {"process": {"pid": stream.pid}}
        stuck = asyncio.create_task(wire.call("SendInput", select | {"input": stdin(b"x" * 1_000_000)}))
        await until(lambda: _unread(served) >= 64 * 1024)
        await wire.call("SendSignal", select | {"signal": "SIGNAL_SIGKILL"})
        assert (await stuck).json()["code"] == "internal"


async def test_input_of_the_wrong_kind(wire):
    async with wire.start("sleep 1000", {"stdin": True}) as stream:
        select = {"process": {"pid": stream.pid}}
        answer = await wire.call("SendInput", select | {"input": {"pty": "eA=="}})
        assert (answer.status_code, answer.json()["code"]) == (500, "internal")
        assert "tty not assigned" in answer.json()["message"]
        answer = await wire.call("SendInput", select)
        assert answer.json()["code"] == "unimplemented"


async def test_input_for_nobody(sandbox):
    for attempt in (
        lambda: sandbox.commands.send_stdin(999_999, "x"),
        lambda: sandbox.commands.close_stdin(999_999),
        lambda: _stream_to(sandbox, 999_999),
    ):
        with pytest.raises(NotFoundException, match="999999"):
            await attempt()


async def _stream_to(sandbox, pid: int) -> None:
    async with sandbox.commands.stream_input(pid) as stream:
        await stream.send("x")


async def test_a_stream_must_say_first_whom_it_feeds(wire):
    message = b'{"data":{"input":{"stdin":"eA=="}}}'
    answer = await wire.http.post(
        "/process.Process/StreamInput",
        content=b"\0" + len(message).to_bytes(4) + message,
        headers={"Content-Type": "application/connect+json"},
    )
    assert b"invalid_argument" in answer.content
