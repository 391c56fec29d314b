"""What commands print, how they end, and who hears of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
from pathlib import Path

import pytest
from e2b import CommandExitException

EVERY_BYTE = bytes(range(256))


def collected(events: list[dict], kind: str) -> bytes:
    return b"".join(base64.b64decode(event["data"][kind]) for event in events if kind in event.get("data", {}))


async def test_output_and_exit_code(sandbox):
    result = await sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)


async def test_a_failure_carries_everything(sandbox):
    with pytest.raises(CommandExitException) as raised:
        await sandbox.commands.run("echo out; echo err >&2; exit 3")
    assert (raised.value.stdout, raised.value.stderr, raised.value.exit_code) == ("out\n", "err\n", 3)
    assert raised.value.error == "exit status 3"


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("exit 0", {"exited": True, "status": "exit status 0"}),
        ("exit 3", {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}),
        ("kill -9 $$", {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}),
        ("kill -15 $$", {"exitCode": -1, "status": "signal: terminated", "error": "signal: terminated"}),
    ],
)
async def test_the_end_on_the_wire(wire, script, end):
    async with wire.start(script) as stream:
        events, trailer = await stream.rest()
    assert events == [{"end": end}]
    assert trailer == {}


async def test_bytes_pass_unharmed(wire, tmp_path):
    (tmp_path / "bytes").write_bytes(EVERY_BYTE * 1000)
    async with wire.start(f"cat {tmp_path}/bytes; cat {tmp_path}/bytes >&2") as stream:
        events, _ = await stream.rest()
    assert collected(events, "stdout") == EVERY_BYTE * 1000
    assert collected(events, "stderr") == EVERY_BYTE * 1000
    sizes = [len(base64.b64decode(text)) for event in events for text in event.get("data", {}).values()]
    assert max(sizes) <= 32 * 1024


async def test_broken_utf8_reaches_the_sdk(sandbox):
    result = await sandbox.commands.run("printf 'a\\xe2b\\xff'")
    assert result.stdout == "a\ufffdb\ufffd"


async def test_output_arrives_while_the_command_runs(wire, tmp_path):
    go = tmp_path / "go"
    os.mkfifo(go)
    async with wire.start(f"echo first; read line < {go}; echo $line") as stream:
        assert base64.b64decode((await stream.event())["data"]["stdout"]) == b"first\n"
        go.write_text("second\n")
        assert base64.b64decode((await stream.event())["data"]["stdout"]) == b"second\n"


async def test_a_slow_reader_holds_the_process_up_and_loses_nothing(wire, served, until, tmp_path):
    size = 50 * 1024 * 1024
    memory = _resident()
    async with wire.start(f"head -c {size} /dev/urandom | tee {tmp_path}/copy") as stream:
        [process] = served.envd.processes._processes.values()
        [mailbox] = process._mailboxes
        await until(lambda: mailbox.full)
        assert (await wire.call("List", {})).json()["processes"], "the process waits for its reader"
        seen, digest = 0, hashlib.sha256()
        while "end" not in (event := await stream.event()):
            data = base64.b64decode(event["data"]["stdout"])
            seen += len(data)
            digest.update(data)
    assert seen == size
    assert digest.digest() == hashlib.sha256((tmp_path / "copy").read_bytes()).digest()
    assert _resident() - memory < 100 * 1024 * 1024  # the test itself holds the copy once, for the digest


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_without_a_reader_output_is_dropped_and_the_process_goes_on(wire, until, tmp_path):
    async with wire.start(f"sleep 0.1; head -c 5000000 /dev/zero; touch {tmp_path}/done; sleep 1000"):
        pass  # the client leaves
    await until((tmp_path / "done").exists)
    assert len((await wire.call("List", {})).json()["processes"]) == 1


async def test_several_readers_hear_the_same(wire, tmp_path):
    go = tmp_path / "go"
    os.mkfifo(go)
    async with wire.start(f"read line < {go}; echo $line; exit 4") as first:
        select = {"process": {"pid": first.pid}}
        async with wire.stream("Connect", select) as second:
            assert await second.event() == {"start": {"pid": first.pid}}
            go.write_text("hello\n")
            heard, also_heard = await first.rest(), await second.rest()
    assert heard == also_heard
    assert collected(heard[0], "stdout") == b"hello\n"
    assert heard[0][-1]["end"]["exitCode"] == 4


async def test_a_late_reader_hears_only_what_comes_later(wire, tmp_path):
    go = tmp_path / "go"
    os.mkfifo(go)
    async with wire.start(f"echo early; read line < {go}; echo $line") as stream:
        await stream.event()
    async with wire.stream("Connect", {"process": {"pid": stream.pid}}) as stream:
        await stream.event()
        go.write_text("late\n")
        events, _ = await stream.rest()
    assert collected(events, "stdout") == b"late\n"


async def test_the_end_is_kept_for_a_reader_that_comes_too_late(wire, sandbox):
    async with wire.start("exit 5", {"tag": "mine"}) as stream:
        await stream.rest()
    for selector in ({"pid": stream.pid}, {"tag": "mine"}):
        async with wire.stream("Connect", {"process": selector}) as late:
            assert await late.event() == {"start": {"pid": stream.pid}}
            events, trailer = await late.rest()
        assert [event["end"]["exitCode"] for event in events] == [5]
        assert trailer == {}
    assert (await wire.call("List", {})).json() == {}
    assert not await sandbox.commands.kill(stream.pid), "it is not running"


async def test_the_end_is_not_kept_for_ever(wire, served, until, monkeypatch):
    monkeypatch.setattr("managed_e2b.local.envd.process.EXIT_RETENTION", 0)
    async with wire.start("exit 5") as stream:
        await stream.rest()
    await until(lambda: not served.envd.processes._processes)
    async with wire.stream("Connect", {"process": {"pid": stream.pid}}) as late:
        events, trailer = await late.rest()
    assert events == []
    assert trailer["error"]["code"] == "not_found"


async def test_a_child_that_keeps_the_output_open_does_not_keep_the_end(wire, tmp_path, until):
    script = f"(while [ ! -e {tmp_path}/go ]; do sleep 0.01; done; echo more; echo more >&2; touch {tmp_path}/alive) &"
    async with wire.start(f"{script} echo done") as stream:
        events, trailer = await stream.rest()
    assert collected(events, "stdout") == b"done\n"
    assert events[-1]["end"]["exited"]
    assert trailer == {}
    (tmp_path / "go").touch()
    await until((tmp_path / "alive").exists)  # writing to nobody has not killed it


async def test_what_a_child_writes_right_after_the_exit_is_not_lost(sandbox):
    result = await sandbox.commands.run("echo copied > >(cat)")
    assert result.stdout == "copied\n"


async def test_a_child_that_never_stops_writing_does_not_keep_the_end(wire, served):
    async with wire.start("yes & echo done") as stream:
        events, _ = await stream.rest()
    assert b"done\n" in collected(events, "stdout")
    assert events[-1]["end"]["exited"]
    assert (await wire.http.get("/health")).status_code == 204, "and the server has time for others"


async def test_keepalives_on_a_silent_stream(wire):
    async with wire.start("sleep 1000", Keepalive_Ping_Interval="0.05") as stream:
        assert [await stream.event() for _ in range(3)] == [{"keepalive": {}}] * 3


async def test_a_thousand_commands_leave_no_descriptor(wire, served, until):
    async def some(count: int) -> None:
        for _ in range(count):
            async with wire.start("exit 0") as stream:
                await stream.rest()

    async def many(each: int) -> None:
        await asyncio.gather(*(some(each) for _ in range(8)))

    await many(2)  # connections and whatever is made once
    await until(lambda: not served.envd.processes._tasks)
    before = _pipes()
    await many(125)
    await until(lambda: not served.envd.processes._tasks)
    assert _pipes() == before


def _pipes() -> int:
    """Open pipes and process descriptors; sockets come and go with the client's connections."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(link.startswith(("pipe:", "anon_inode:[pidfd]")) for link in links)
