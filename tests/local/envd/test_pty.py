"""Terminals."""

from __future__ import annotations

import asyncio

import pytest
from e2b import CommandExitException, NotFoundException
from e2b.sandbox.commands.command_handle import PtySize


async def test_a_terminal(sandbox):
    output = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=output.extend, envs={"ABC": "123"})
    await sandbox.pty.send_stdin(terminal.pid, b"tty; stty size; echo $ABC$TERM\nexit 7\n")
    with pytest.raises(CommandExitException) as raised:
        await terminal.wait()
    assert raised.value.exit_code == 7
    assert b"/dev/pts/" in output
    assert b"24 80" in output
    assert b"123xterm-256color" in output


async def test_resize(sandbox):
    output = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=output.extend)
    await sandbox.pty.resize(terminal.pid, PtySize(cols=100, rows=30))
    await sandbox.pty.send_stdin(terminal.pid, b"stty size\nexit\n")
    assert (await terminal.wait()).exit_code == 0
    assert b"30 100" in output


async def test_reconnect(sandbox):
    first, second = bytearray(), bytearray()
    ready = asyncio.Event()

    def hear(data: bytes) -> None:
        first.extend(data)
        if b"first-answer" in first:
            ready.set()

    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=hear, envs={"WORD": "answer"})
    await sandbox.pty.send_stdin(terminal.pid, b"echo first-$WORD\n")
    await ready.wait()
    await terminal.disconnect()
    again = await sandbox.pty.connect(terminal.pid, on_data=second.extend)
    await sandbox.pty.send_stdin(terminal.pid, b"echo second-$WORD\nexit\n")
    assert (await again.wait()).exit_code == 0
    assert again.pid == terminal.pid
    assert b"second-answer" in second
    assert b"first-answer" not in second


async def test_kill(sandbox):
    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=lambda data: None)
    assert await sandbox.pty.kill(terminal.pid)
    assert not await sandbox.pty.kill(terminal.pid)
    with pytest.raises(NotFoundException):
        await sandbox.pty.send_stdin(terminal.pid, b"x")


async def test_input_stream(sandbox):
    output = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=output.extend)
    async with sandbox.pty.stream_input(terminal.pid) as stream:
        await stream.send(b"echo one$((1+1))\n")
        await stream.send(b"exit\n")
    await terminal.wait()
    assert b"one2" in output


async def test_all_of_a_long_output_arrives(sandbox):
    output = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=output.extend)
    await sandbox.pty.send_stdin(terminal.pid, b"stty -echo; seq 1 200000; exit\n")
    await terminal.wait()
    assert b"\r\n199999\r\n200000\r\n" in output


async def test_what_a_terminal_refuses(wire):
    process = {"cmd": "/bin/sh"}
    async with wire.stream("Start", {"process": process, "pty": {"size": {"cols": 70000, "rows": 0}}}) as stream:
        select = {"process": {"pid": (await stream.event())["start"]["pid"]}}
        answer = await wire.call("SendInput", select | {"input": {"stdin": "eA=="}})
        assert (answer.status_code, answer.json()["code"]) == (500, "internal")
        answer = await wire.call("CloseStdin", select)
        assert "Ctrl+D" in answer.json()["message"]
    async with wire.start("sleep 1000") as stream:
        select = {"process": {"pid": stream.pid}}
        answer = await wire.call("Update", select | {"pty": {"size": {"cols": 10, "rows": 10}}})
        assert answer.json()["code"] == "internal"
        assert (await wire.call("Update", select)).status_code == 200
