"""Starting, finding, ending: who runs what, where and with which environment, for how long, and how it is killed."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest
from e2b import (
    AuthenticationException,
    InvalidArgumentException,
    NotFoundException,
    SandboxException,
    SandboxNotRunningException,
    TimeoutException,
)
from e2b.sandbox.commands.command_handle import PtySize


async def test_environment(sandbox, tmp_path):
    result = await sandbox.commands.run("env", envs={"OF_THE_COMMAND": "1", "LOGNAME": "other"})
    env = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    assert {
        "HOME": str(tmp_path),
        "USER": "user",
        "LOGNAME": "other",
        "E2B_SANDBOX": "true",
        "E2B_SANDBOX_ID": "i0123456789abcdefghij",
        "OF_THE_SANDBOX": "yes",
        "OF_THE_COMMAND": "1",
    }.items() <= env.items()
    assert "PATH" in env
    assert "PYTEST_CURRENT_TEST" not in env, "nothing of the server's own environment"


async def test_users(sandbox):
    assert (await sandbox.commands.run("echo $USER", user="root")).stdout == "root\n"
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-here'"):
        await sandbox.commands.run("true", user="nobody-here")


async def test_working_directory(sandbox, tmp_path):
    (tmp_path / "inner" / "deeper").mkdir(parents=True)
    for cwd, expected in (
        (None, tmp_path),
        ("~", tmp_path),
        ("~/inner", tmp_path / "inner"),
        ("inner", tmp_path / "inner"),
        (f"{tmp_path}/inner/deeper/..", tmp_path / "inner"),
        ("//", "/"),
    ):
        assert (await sandbox.commands.run("pwd", cwd=cwd)).stdout == f"{expected}\n"
    with pytest.raises(InvalidArgumentException, match="cwd '/no/such' does not exist"):
        await sandbox.commands.run("pwd", cwd="/no/such")
    with pytest.raises(InvalidArgumentException, match="cannot expand user-specific home dir"):
        await sandbox.commands.run("pwd", cwd="~other/x")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentException, match="Not a directory"):
        await sandbox.commands.run("pwd", cwd="file")


async def test_the_default_working_directory_of_a_sandbox(served, sandbox, tmp_path):
    (tmp_path / "work").mkdir()
    served.envd._ctx.default_workdir = str(tmp_path / "work")
    assert (await sandbox.commands.run("pwd")).stdout == f"{tmp_path}/work\n"


@pytest.mark.parametrize(
    ("process", "message"),
    [
        ({"cmd": ""}, "no command given"),
        (None, "no command given"),
        ({"cmd": "/no/such/program", "args": ["x"]}, "error starting process '/no/such/program x'"),
        ({"cmd": "echo", "args": ["a\0b"]}, "zero byte"),
        ({"cmd": "echo", "envs": {"A": "a\0b"}}, "zero byte"),
        ({"cmd": "echo", "envs": {"A=B": "c"}}, "environment variable's name"),
        ({"cmd": "echo", "cwd": "/tmp/\0"}, "invalid characters"),
        ({"cmd": "echo", "args": ["x" * 1_000_000]}, "error starting process"),
    ],
)
async def test_what_cannot_be_started(wire, process, message):
    async with wire.stream("Start", {"process": process} if process is not None else {}) as stream:
        events, trailer = await stream.rest()
    assert events == []
    assert trailer["error"]["code"] == "invalid_argument"
    assert message in trailer["error"]["message"]
    assert (await wire.call("List", {})).json() == {}


async def test_a_time_limit_that_is_no_number(wire):
    async with wire.http.stream(
        "POST",
        "/process.Process/Start",
        headers={"Content-Type": "application/connect+json", "Connect-Timeout-Ms": "x"},
    ) as response:
        assert b"invalid_argument" in await response.aread()


async def test_list_tells_what_runs(wire, sandbox):
    async with wire.start("sleep 1000", {"tag": "mine"}) as stream, wire.start("exit 0") as ended:
        await ended.rest()
        [listed] = await sandbox.commands.list()
    assert (listed.pid, listed.tag, listed.cmd, listed.args) == (stream.pid, "mine", "/bin/bash", ["-c", "sleep 1000"])
    assert listed.cwd is None


async def test_a_tag_means_the_newest_that_runs(wire):
    async with wire.start("sleep 1000", {"tag": "t"}), wire.start("sleep 1000", {"tag": "t"}) as newest:
        async with wire.start("exit 0", {"tag": "t"}) as ended:
            await ended.rest()
        async with wire.stream("Connect", {"process": {"tag": "t"}}) as stream:
            assert await stream.event() == {"start": {"pid": newest.pid}}


async def test_nobody_is_found(wire, sandbox):
    assert not await sandbox.commands.kill(999_999)
    with pytest.raises(NotFoundException):
        await sandbox.commands.connect(999_999)
    for selector, code in (({"tag": "none"}, "not_found"), ({"pid": 0}, "not_found"), ({}, "unimplemented")):
        answer = await wire.call("SendSignal", {"process": selector, "signal": "SIGNAL_SIGKILL"})
        assert answer.json()["code"] == code


async def test_kill_is_done_when_it_returns_and_takes_the_children_too(wire, sandbox, until):
    async with wire.start("sleep 1000 & echo $!; wait") as stream:
        child = int(base64.b64decode((await stream.event())["data"]["stdout"]))
        assert await sandbox.commands.kill(stream.pid)
        assert not _works(stream.pid)
        await until(lambda: not _works(child))
        events, _ = await stream.rest()
    assert events[-1]["end"] == {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}


def _works(pid: int) -> bool:
    """Whether the process is there and no zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_terminate_reaches_the_group(wire):
    async with wire.start("trap 'exit 9' TERM; echo ready; sleep 1000 & wait; wait") as stream:
        await stream.event()
        answer = await wire.call("SendSignal", {"process": {"pid": stream.pid}, "signal": "SIGNAL_SIGTERM"})
        assert answer.status_code == 200
        events, _ = await stream.rest()
    assert events[-1]["end"]["exitCode"] == 9


async def test_other_signals_are_not_offered(wire):
    async with wire.start("sleep 1000") as stream:
        answer = await wire.call("SendSignal", {"process": {"pid": stream.pid}})
        assert answer.json()["code"] == "unimplemented"


async def test_a_command_that_runs_too_long_is_killed(sandbox, served, until):
    with pytest.raises(TimeoutException):
        await sandbox.commands.run("sleep 1000", timeout=0.2)
    await until(lambda: served.guest.processes[0].signal(0) is False)
    assert await sandbox.commands.list() == []


async def test_too_long_on_the_wire(wire):
    """The stream that started it tells of the deadline, another one of the kill."""
    async with (
        wire.start("sleep 1000", {"tag": "it"}, Connect_Timeout_Ms="50") as stream,
        wire.stream("Connect", {"process": {"tag": "it"}}) as other,
    ):
        await other.event()
        events, trailer = await stream.rest()
        assert events == []
        assert trailer["error"]["code"] == "deadline_exceeded"
        events, trailer = await other.rest()
        assert events[-1]["end"]["status"] == "signal: killed"


async def test_no_time_limit(wire, served):
    async with wire.start("sleep 0.5; exit 6", Connect_Timeout_Ms="0") as stream:
        events, _ = await stream.rest()
    assert events[-1]["end"]["exitCode"] == 6


async def test_the_deadline_of_a_reader_is_not_the_process_s(wire):
    async with wire.start("sleep 1000") as stream:
        async with wire.stream("Connect", {"process": {"pid": stream.pid}}, Connect_Timeout_Ms="50") as other:
            await other.event()
            _, trailer = await other.rest()
            assert trailer["error"]["code"] == "deadline_exceeded"
        assert (await wire.call("List", {})).json()["processes"]


async def test_a_client_that_leaves_a_silent_stream_is_noticed_and_the_process_lives(sandbox, served, until):
    command = await sandbox.commands.run("sleep 1000", background=True)
    assert served.envd.processes.readers == 1
    await command.disconnect()
    await until(lambda: served.envd.processes.readers == 0)
    await until(lambda: served.envd.open_calls == 0)
    assert [process.pid for process in await sandbox.commands.list()] == [command.pid]
    again = await sandbox.commands.connect(command.pid)
    assert await again.kill()


async def test_a_cancelled_run_leaves_its_process(sandbox, served, until):
    running = asyncio.create_task(sandbox.commands.run("sleep 1000"))
    await until(lambda: served.envd.processes.readers == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: served.envd.processes.readers == 0)
    assert len(await sandbox.commands.list()) == 1


@pytest.mark.parametrize("how", ["killed", "died by itself"])
async def test_the_sandbox_goes_while_commands_run(sandbox, sync_sandbox, served, until, how):
    one = await sandbox.commands.run("sleep 1000", background=True)
    terminal = await sandbox.pty.create(PtySize(rows=1, cols=1), on_data=lambda data: None)
    other = asyncio.create_task(asyncio.to_thread(sync_sandbox.commands.run, "sleep 1000"))
    await until(lambda: served.envd.processes.readers == 3)
    await (served.kill() if how == "killed" else served.guest.kill())
    for waiting in (one.wait(), terminal.wait(), other):
        with pytest.raises(SandboxNotRunningException, match="was killed or reached its end of life"):
            await waiting
    with pytest.raises(SandboxNotRunningException):
        await sandbox.commands.run("true")
    await until(lambda: served.envd.processes.readers == 0)


async def test_going_ends_no_stream_cleanly(wire, served):
    async with wire.start("sleep 1000") as stream:
        await served.kill()
        events, trailer = await stream.rest()
    assert events == []
    assert trailer["error"] == {
        "code": "unavailable",
        "message": "the connection to sandbox i0123456789abcdefghij ended before the stream completed",
    }


async def test_a_sandbox_that_goes_while_input_streams(sandbox, served, until):
    command = await sandbox.commands.run("sleep 1000", background=True, stdin=True)
    stream = sandbox.commands.stream_input(command.pid)
    await stream.send(b"x")
    await served.kill()
    with pytest.raises((SandboxException, TimeoutException)):
        await stream.close()
    await until(lambda: served.envd.open_calls == 0)


async def test_after_a_pause_everything_goes_on(sandbox, served, until):
    """Aborting ends streams, not processes: who comes back finds them."""
    command = await sandbox.commands.run("cat", background=True, stdin=True)
    await served.envd.abort("the sandbox is paused")
    await until(lambda: served.envd.processes.readers == 0)
    again = await sandbox.commands.connect(command.pid)
    await sandbox.commands.send_stdin(command.pid, "hello")
    await sandbox.commands.close_stdin(command.pid)
    assert (await again.wait()).stdout == "hello"
