"""Faults between a client and its sandbox: in front of an envd that only answers, then with real commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import e2b
import httpx
import pytest

from managed_e2b.testing import Chaos, TestServer

from .conftest import World, rule, until


async def to_envd(world: World, sandbox_id: str, path: str = "/health", **options: Any) -> httpx.Response:
    headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "49983"}
    return await world.api.request(options.pop("method", "GET"), path, headers=headers, **options)


async def test_a_status_before_and_one_after(world: World) -> None:
    sandbox_id = await world.created()
    await world.play(rule("health").nth(1).status(502), rule("health").nth(2).after().status(503))
    assert [(await to_envd(world, sandbox_id)).status_code for _ in range(3)] == [502, 503, 204]
    entries = await world.entries("health")
    assert [(entry["effect"], entry["status"]) for entry in entries] == [(None, 502), (204, 503), (204, 204)]
    assert {entry["sandbox_id"] for entry in entries} == {sandbox_id}


async def test_a_large_upload_is_read_before_it_is_refused(world: World) -> None:
    sandbox_id = await world.created()
    await world.play(rule("files.write").status(429, retry_after=3))
    answer = await to_envd(world, sandbox_id, "/files", method="POST", content=b"x" * 3_000_000)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"


async def test_what_hangs_goes_on_with_its_whole_request(world: World) -> None:
    sandbox_id = await world.created()
    await world.play(rule("files.*").hang())
    asking = asyncio.create_task(to_envd(world, sandbox_id, "/files", method="POST", content=b"x" * 1_000_000))

    async def hangs() -> bool:
        return any(entry["state"] == "hanging" for entry in await world.entries("files.write"))

    await until(hangs)
    assert (await world.api.post("/me2b/chaos/release")).json() == {"released": 1}
    answer = await asking
    assert (answer.status_code, answer.json()["path"]) == (200, "/files")


@pytest.mark.parametrize("after", [False, True])
async def test_a_dropped_connection(world: World, after: bool) -> None:
    sandbox_id = await world.created()
    on = rule("files.read").after() if after else rule("files.read")
    await world.play(on.drop())
    with pytest.raises(httpx.ReadError):
        await to_envd(world, sandbox_id, "/files")
    (entry,) = await world.entries("files.read")
    assert (entry["effect"], entry["status"], entry["state"]) == (200 if after else None, None, "dropped")


async def test_a_stream_without_faults_passes_and_its_end_is_told(world: World) -> None:
    sandbox_id = await world.created()
    asking = asyncio.create_task(to_envd(world, sandbox_id, "/stream"))

    async def streams() -> bool:
        return any(entry["effect"] == 200 for entry in await world.entries("envd"))

    await until(streams)
    assert (await world.api.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
    assert b"first" in (await asking).content
    assert [entry["state"] for entry in await world.entries("envd")] == ["answered"]


async def test_a_sandbox_that_is_not_there_is_told_as_ever(world: World) -> None:
    answer = await to_envd(world, "inone")
    assert (answer.status_code, answer.json()["message"]) == (502, "The sandbox was not found")


# --- real sandboxes


@pytest.fixture
def sandbox(me2b_server: TestServer, me2b_chaos: Chaos) -> Iterator[e2b.Sandbox]:
    made = e2b.Sandbox.create(
        api_key=me2b_server.api_key, api_url=me2b_server.url, sandbox_url=me2b_server.url, timeout=120
    )
    yield made
    me2b_chaos.calm()
    made.kill()


@pytest.mark.parametrize("how", ["reset", "close", "end", "truncated", "unavailable"])
def test_a_command_whose_end_is_cut_off_has_run_and_its_exit_is_kept(
    sandbox: e2b.Sandbox, me2b_chaos: Chaos, how: Any
) -> None:
    me2b_chaos.on("process.start").nth(1).cut(how)
    seen: list[str] = []
    handle = sandbox.commands.run("echo hello; echo ran >> count; exit 3", background=True)
    with pytest.raises(Exception) as caught:  # noqa: PT011 -- each cut is another of the SDK's errors
        handle.wait(on_stdout=seen.append)
    assert not isinstance(caught.value, e2b.CommandExitException)
    assert "".join(seen) == "hello\n"
    with pytest.raises(e2b.CommandExitException) as ended:
        sandbox.commands.connect(handle.pid).wait()
    assert ended.value.exit_code == 3
    assert sandbox.files.read("count") == "ran\n"
    assert me2b_chaos.journal().count("process.start") == 1


def test_a_command_whose_stream_is_cut_early_runs_on(sandbox: e2b.Sandbox, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("process.start").nth(1).cut("reset", after_events=2)
    handle = sandbox.commands.run("echo hello; sleep 60", background=True)
    with pytest.raises(Exception, match=r"(?i)reset|connection"):
        handle.wait()
    assert [process.pid for process in sandbox.commands.list()] == [handle.pid]
    assert handle.kill()


def test_a_process_that_is_forgotten(sandbox: e2b.Sandbox, me2b_chaos: Chaos) -> None:
    handle = sandbox.commands.run("sleep 60", background=True)
    me2b_chaos.on("process.connect").status(404, message="process with pid 7 not found")
    with pytest.raises(e2b.NotFoundException):
        sandbox.commands.connect(handle.pid)
    assert handle.kill()


async def test_a_client_that_leaves_a_stream_with_chaos_leaves_nothing_open(
    sandbox: e2b.Sandbox, me2b_server: TestServer, me2b_chaos: Chaos
) -> None:
    me2b_chaos.on("process.start").cut("reset")  # never reached: there is no end
    body = json.dumps({"process": {"cmd": "/bin/sleep", "args": ["60"]}}).encode()
    envelope = b"\x00" + len(body).to_bytes(4, "big") + body
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": str(sandbox._envd_access_token),
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
    }
    async with httpx.AsyncClient(base_url=me2b_server.url, trust_env=False, timeout=20) as client:

        async def first() -> bytes:
            async with client.stream("POST", "/process.Process/Start", headers=headers, content=envelope) as answer:
                chunks: AsyncIterator[bytes] = answer.aiter_raw()
                return await anext(chunks)

        assert b"start" in await first()
    found = await asyncio.to_thread(me2b_chaos.wait_for, "process.start", state="dropped")
    assert len(found) == 1
