"""Sandboxes over the REST API: create, list, info, kill, timeouts, pause and connect."""

from __future__ import annotations

import asyncio
from datetime import datetime

import httpx
import pytest


def seconds_left(info):
    return (datetime.fromisoformat(info["endAt"]) - datetime.fromisoformat(info["startedAt"])).total_seconds()


async def info_of(world, sandbox):
    answer = await world.api.get(f"/sandboxes/{sandbox['sandboxID']}")
    return answer.json() if answer.status_code == 200 else None


async def test_a_sandbox_lives_and_dies(world):
    sandbox = await world.create(metadata={"run": "7"}, timeout=60)
    assert sandbox["templateID"] == "base"
    assert sandbox["envdVersion"] == "0.6.13"
    assert len(sandbox["envdAccessToken"]) == 64
    info = await info_of(world, sandbox)
    assert info["state"] == "running"
    assert info["metadata"] == {"run": "7"}
    assert seconds_left(info) == 60
    assert await world.listed() == [sandbox["sandboxID"]]
    assert (await world.api.delete(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 204
    assert await world.listed() == []
    gone = await world.api.get(f"/sandboxes/{sandbox['sandboxID']}")
    assert gone.status_code == 404
    message = f"Sandbox \"{sandbox['sandboxID']}\" doesn't exist or you don't have access to it"
    assert gone.json() == {"code": 404, "message": message}
    assert (await world.api.delete(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 404


async def test_the_defaults_of_v1_and_v2(world):
    first, second = await world.create("/sandboxes"), await world.create("/v2/sandboxes")
    assert seconds_left(await info_of(world, first)) == 15
    assert seconds_left(await info_of(world, second)) == 300
    assert "envdAccessToken" not in first
    assert "envdAccessToken" in second
    assert "envdAccessToken" in await world.create("/sandboxes", secure=True)


async def test_an_id_may_carry_the_client_id_of_old_clients(world):
    sandbox = await world.create()
    answer = await world.api.get(f"/sandboxes/{sandbox['sandboxID']}-{sandbox['clientID']}")
    assert answer.json()["sandboxID"] == sandbox["sandboxID"]


async def test_an_unknown_template(world):
    answer = await world.api.post("/v2/sandboxes", json={"templateID": "nowhere"})
    assert (answer.status_code, answer.json()) == (404, {"code": 404, "message": "template 'nowhere' not found"})
    answer = await world.api.post("/v2/sandboxes", json={"templateID": "base:v9"})
    assert answer.json() == {"code": 404, "message": "tag 'v9' does not exist for template 'base'"}
    assert world.runtime.guests == []


async def test_a_host_that_cannot_run_sandboxes_says_so_and_is_not_asked_again(world, runtime_unavailable):
    world.runtime.create_error = runtime_unavailable
    answer = await world.api.post("/v2/sandboxes", json={"templateID": "base"})
    assert answer.status_code == 503
    assert answer.json() == {"code": 503, "message": str(runtime_unavailable)}
    assert answer.headers["Should-Retry"] == "false"


async def test_a_create_that_fails_unexpectedly_tells_nothing_of_the_inside(world, caplog):
    world.runtime.create_error = ValueError("secret path")
    answer = await world.api.post("/v2/sandboxes", json={"templateID": "base"})
    assert (answer.status_code, answer.json()) == (500, {"code": 500, "message": "Internal server error"})
    assert world.server.registry.counters.as_dict()["live"] == 0


async def test_a_create_whose_client_hung_up_makes_a_sandbox_that_is_listed_and_expires(world, until):
    world.runtime.create_gate.clear()
    request = asyncio.create_task(world.api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 30}))
    await world.runtime.creating.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert await world.listed() == []
    world.runtime.create_gate.set()
    await until(lambda: any(True for _ in world.server.registry))
    assert len(await world.listed()) == 1
    await world.expire(30)
    assert await world.listed() == []
    await until(lambda: not world.runtime.alive)


# --- the end


async def test_a_kill_hides_at_once_and_answers_when_nothing_is_left(world, until):
    sandbox = await world.create()
    guest = world.guest(sandbox)
    guest.kill_gate.clear()
    path = f"/sandboxes/{sandbox['sandboxID']}"
    kill = asyncio.create_task(world.api.delete(path))
    await guest.killing.wait()
    assert await world.listed() == []
    again, info = asyncio.create_task(world.api.delete(path)), asyncio.create_task(world.api.get(path))
    gateway = await world.anonymous.get("/health", headers=world.envd_headers(sandbox))
    assert gateway.status_code == 502
    assert not kill.done()
    assert not again.done()
    assert not info.done()
    guest.kill_gate.set()
    assert [(await answer).status_code for answer in (kill, again, info)] == [204, 404, 404]
    assert guest.kills == 1


async def test_a_kill_that_failed_is_told_and_tried_again_until_it_works(world, until, caplog, monkeypatch):
    monkeypatch.setattr("managed_e2b.local.sandboxes.RETRY_DELAY", 0.01)
    sandbox = await world.create()
    guest = world.guest(sandbox)
    guest.kill_error = OSError("busy")
    assert (await world.api.delete(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 500
    await until(lambda: guest.kills > 2)
    assert "busy" in caplog.text
    guest.kill_error = None
    await until(lambda: guest.dead.is_set())
    assert (await world.api.get(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 404
    assert world.server.registry.counters.kill_failed > 0


async def test_a_sandbox_that_dies_by_itself_is_cleaned_up_and_its_streams_break_off(world, until):
    sandbox = await world.create()
    guest = world.guest(sandbox)
    envd = world.server.registry.find(sandbox["sandboxID"]).envd
    async with world.anonymous.stream("GET", "/stream", headers=world.envd_headers(sandbox)) as stream:
        chunks = stream.aiter_text()
        assert await anext(chunks) == "first"
        guest.dead.set()
        assert await anext(chunks) == envd.abort_message
    assert envd.abort_message == f"the connection to sandbox {sandbox['sandboxID']} ended before the stream completed"
    await until(lambda: guest.kills == 1)
    assert await world.listed() == []
    assert world.server.registry.counters.ended["died"] == 1


async def test_streams_break_off_before_the_processes_die(world):
    sandbox = await world.create()
    guest = world.guest(sandbox)
    guest.kill_gate.clear()
    envd = world.server.registry.find(sandbox["sandboxID"]).envd
    kill = asyncio.create_task(world.api.delete(f"/sandboxes/{sandbox['sandboxID']}"))
    await guest.killing.wait()
    assert envd.aborted.is_set()
    guest.kill_gate.set()
    assert (await kill).status_code == 204


async def test_many_kills_of_one_sandbox_have_one_winner(world):
    sandbox = await world.create()
    answers = await asyncio.gather(*(world.api.delete(f"/sandboxes/{sandbox['sandboxID']}") for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [204] + [404] * 19
    assert world.guest(sandbox).kills == 1


# --- time


async def test_the_end_comes_by_itself_on_the_hosts_own_clock(serve, until):
    world = await serve(clock=None)
    sandbox = (await world.api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 1})).json()
    await until(lambda: world.guest(sandbox).dead.is_set())
    assert world.server.registry.counters.ended["expired"] == 1


async def test_nothing_ends_before_its_time(world, until):
    short, long = await world.create(timeout=10), await world.create(timeout=20)
    await world.expire(9.9)
    assert len(await world.listed()) == 2
    await world.expire(0.1)
    assert await world.listed() == [long["sandboxID"]]
    await until(lambda: world.guest(short).dead.is_set())


async def test_set_timeout_shortens_lengthens_and_ends_at_zero(world):
    sandbox = await world.create(timeout=100)
    path = f"/sandboxes/{sandbox['sandboxID']}/timeout"
    assert (await world.api.post(path, json={"timeout": 5})).status_code == 204
    await world.expire(4)
    assert (await world.api.post(path, json={"timeout": 10})).status_code == 204
    await world.expire(9)
    assert await world.listed() == [sandbox["sandboxID"]]
    assert (await world.api.post(path, json={"timeout": 0})).status_code == 204
    assert await world.listed() == []


async def test_connect_only_extends(world):
    sandbox = await world.create(timeout=300)
    before = await info_of(world, sandbox)
    path = f"/v2/sandboxes/{sandbox['sandboxID']}/connect"
    answer = await world.api.post(path, json={"timeout": 10})
    assert answer.status_code == 200
    assert answer.json() == sandbox
    assert (await info_of(world, sandbox))["endAt"] == before["endAt"]
    assert (await world.api.post(path, json={"timeout": 600})).status_code == 200
    assert seconds_left(await info_of(world, sandbox)) == pytest.approx(600, abs=0.01)
    assert (await world.api.post(path)).status_code == 200  # an empty body is fine


async def test_refreshes_extend_by_fifteen_seconds_at_least(world):
    sandbox = await world.create(timeout=5)
    path = f"/sandboxes/{sandbox['sandboxID']}/refreshes"
    assert (await world.api.post(path, json={"duration": 1})).status_code == 204
    assert seconds_left(await info_of(world, sandbox)) == pytest.approx(15, abs=0.01)


# --- pause and resume


async def test_pause_and_connect(world):
    sandbox = await world.create(timeout=100)
    guest = world.guest(sandbox)
    path = f"/sandboxes/{sandbox['sandboxID']}"
    world.clock.step(10)
    assert (await world.api.post(f"{path}/pause")).status_code == 204
    assert guest.frozen
    paused = await info_of(world, sandbox)
    assert paused["state"] == "paused"
    assert paused["domain"] is None
    assert seconds_left(paused) == pytest.approx(10, abs=0.01)
    assert (await world.anonymous.get("/health", headers=world.envd_headers(sandbox))).status_code == 502
    again = await world.api.post(f"{path}/pause")
    assert again.status_code == 409
    assert again.json()["message"] == f"Error pausing sandbox - sandbox '{sandbox['sandboxID']}' is already paused"
    assert (await world.api.post(f"{path}/timeout", json={"timeout": 5})).status_code == 404
    await world.expire(1000)  # a paused sandbox has no end
    connected = await world.api.post(f"/v2{path}/connect", json={"timeout": 50})
    assert (connected.status_code, connected.json()) == (201, sandbox)
    assert not guest.frozen
    assert seconds_left(await info_of(world, sandbox)) == 50
    assert (await world.anonymous.get("/health", headers=world.envd_headers(sandbox))).status_code == 204


async def test_a_paused_sandbox_can_be_killed(world):
    sandbox = await world.create()
    await world.api.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    assert (await world.api.delete(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 204
    assert not world.runtime.alive


async def test_a_kill_does_not_wait_for_a_pause_that_hangs(world):
    sandbox = await world.create()
    guest = world.guest(sandbox)
    guest.freeze_gate.clear()
    pause = asyncio.create_task(world.api.post(f"/sandboxes/{sandbox['sandboxID']}/pause"))
    await guest.freezing.wait()
    assert await world.listed(state="paused") == [sandbox["sandboxID"]]
    conflict = await world.api.post(f"/sandboxes/{sandbox['sandboxID']}/timeout", json={"timeout": 5})
    assert conflict.status_code == 409
    assert (await world.api.delete(f"/sandboxes/{sandbox['sandboxID']}")).status_code == 204
    guest.freeze_gate.set()
    assert (await pause).status_code == 404


async def test_a_pause_that_fails_leaves_a_running_sandbox_that_still_ends(world, caplog, until):
    sandbox = await world.create(timeout=60)
    guest = world.guest(sandbox)
    guest.freeze_error = OSError("no")
    assert (await world.api.post(f"/sandboxes/{sandbox['sandboxID']}/pause")).status_code == 500
    assert (await info_of(world, sandbox))["state"] == "running"
    await world.expire(61)
    await until(lambda: guest.dead.is_set())


async def test_connect_during_a_pause_waits_and_resumes(world):
    sandbox = await world.create()
    guest = world.guest(sandbox)
    guest.freeze_gate.clear()
    path = f"/sandboxes/{sandbox['sandboxID']}"
    pause = asyncio.create_task(world.api.post(f"{path}/pause"))
    await guest.freezing.wait()
    connect = asyncio.create_task(world.api.post(f"/v2{path}/connect", json={}))
    await world.listed()  # a round trip, so that the connect has arrived
    guest.freeze_gate.set()
    assert (await pause).status_code == 204
    assert (await connect).status_code == 201
    assert not guest.frozen
    assert (await info_of(world, sandbox))["state"] == "running"


async def test_auto_pause_at_the_end_of_the_time(world, until):
    sandbox = await world.create(timeout=10, autoPause=True)
    await world.expire(10)
    await until(lambda: world.guest(sandbox).frozen)
    info = await info_of(world, sandbox)
    assert info["state"] == "paused"
    assert info["lifecycle"] == {"autoResume": False, "onTimeout": "pause"}
    assert (await world.anonymous.get("/health", headers=world.envd_headers(sandbox))).status_code == 502


async def test_auto_resume_by_traffic_needs_the_token(world):
    sandbox = await world.create(timeout=10, autoPause=True, autoResume={"enabled": True})
    await world.api.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    headers = world.envd_headers(sandbox)
    for token in ("", "wrong"):
        refused = await world.anonymous.get("/health", headers={**headers, "X-Access-Token": token})
        assert (refused.status_code, refused.json()["code"]) == (403, 403)
    assert (await info_of(world, sandbox))["state"] == "paused"
    headers["X-Access-Token"] = sandbox["envdAccessToken"]
    assert (await world.anonymous.get("/health", headers=headers)).status_code == 204
    info = await info_of(world, sandbox)
    assert info["state"] == "running"
    assert seconds_left(info) == 10


async def test_two_requests_wake_it_once(world):
    sandbox = await world.create(timeout=10, autoPause=True, autoResume={"enabled": True})
    guest = world.guest(sandbox)
    pausing = asyncio.create_task(world.api.post(f"/sandboxes/{sandbox['sandboxID']}/pause"))
    guest.freeze_gate.clear()
    await guest.freezing.wait()
    headers = {**world.envd_headers(sandbox), "X-Access-Token": sandbox["envdAccessToken"]}
    requests = [asyncio.create_task(world.anonymous.get("/health", headers=headers)) for _ in range(3)]
    guest.freeze_gate.set()
    assert (await pausing).status_code == 204
    assert [answer.status_code for answer in await asyncio.gather(*requests)] == [204] * 3
    stats = (await world.api.get("/me2b/stats")).json()
    assert (stats["paused"], stats["resumed"]) == (1, 1)
    assert seconds_left(await info_of(world, sandbox)) == 10


async def test_resume_is_connect_for_paused_ones_only(world):
    sandbox = await world.create()
    path = f"/sandboxes/{sandbox['sandboxID']}"
    assert (await world.api.post(f"{path}/resume", json={})).status_code == 409
    await world.api.post(f"{path}/pause")
    assert (await world.api.post(f"{path}/resume", json={"timeout": 20})).status_code == 201


# --- lists


async def test_list_filters_order_and_pages(world):
    boxes = [await world.create(metadata={"n": str(n), "all": "yes"}) for n in range(5)]
    ids = [box["sandboxID"] for box in boxes]
    await world.api.post(f"/sandboxes/{ids[0]}/pause")
    assert await world.listed() == ids[::-1]
    assert await world.listed(order="asc") == ids
    assert await world.listed(state="paused") == ids[:1]
    assert await world.listed(state="running") == ids[:0:-1]
    assert await world.listed(metadata="n=3&all=yes") == [ids[3]]
    assert await world.listed(template="base") == ids[::-1]
    assert await world.listed(template="other") == []
    started = (await info_of(world, boxes[3]))["startedAt"]
    assert await world.listed(startedAfter=started) == [ids[4], ids[3]]

    first = await world.api.get("/v2/sandboxes", params={"limit": 2})
    assert first.headers["X-Total-Running"] == "4"
    await world.api.delete(f"/sandboxes/{first.json()[-1]['sandboxID']}")  # the token outlives the item it names
    second = await world.api.get("/v2/sandboxes", params={"limit": 2, "nextToken": first.headers["X-Next-Token"]})
    third = await world.api.get("/v2/sandboxes", params={"limit": 2, "nextToken": second.headers["X-Next-Token"]})
    assert [box["sandboxID"] for page in (first, second, third) for box in page.json()] == ids[::-1]
    assert "X-Next-Token" not in third.headers
    wrong = {"nextToken": first.headers["X-Next-Token"], "order": "asc"}
    assert (await world.api.get("/v2/sandboxes", params=wrong)).json() == {"code": 400, "message": "Invalid next token"}


async def test_metadata_is_quoted_three_times(world):
    sandbox = await world.create(metadata={"a b": "c&d", "ü": "=+%"})
    url = httpx.URL(world.server.url + "/v2/sandboxes").copy_with(query=b"metadata=a%252520b%3Dc%252526d")
    assert [box["sandboxID"] for box in (await world.api.get(url)).json()] == [sandbox["sandboxID"]]
    assert await world.listed(metadata="%25C3%25BC=%253D%252B%2525") == [sandbox["sandboxID"]]


async def test_v1_list_shows_running_ones_without_paging(world):
    ids = [(await world.create(metadata={"k": "v"}))["sandboxID"] for _ in range(102)]
    await world.api.post(f"/sandboxes/{ids[0]}/pause")
    answer = await world.api.get("/sandboxes", params={"metadata": "k=v"})
    assert [box["sandboxID"] for box in answer.json()] == ids[:0:-1]


# --- what is beside


async def test_what_the_server_counts(world, until):
    boxes = [await world.create() for _ in range(3)]
    await world.api.delete(f"/sandboxes/{boxes[0]['sandboxID']}")
    await world.api.post(f"/sandboxes/{boxes[1]['sandboxID']}/pause")
    stats = (await world.api.get("/me2b/stats")).json()
    assert stats["live"] == 2
    assert stats["peak_live"] == 3
    assert stats["created"] == 3
    assert stats["ended"]["killed"] == 1
    assert stats["paused"] == 1
    text = (await world.api.get("/me2b/metrics")).text
    assert "me2b_sandboxes_live_peak 3.0" in text
    assert 'me2b_sandboxes_ended_total{reason="killed"} 1.0' in text
    assert (await world.anonymous.get("/me2b/stats")).status_code == 401


async def test_closing_the_server_waits_for_a_create_under_way_and_leaves_nothing(world):
    world.runtime.create_gate.clear()
    request = asyncio.create_task(world.api.post("/v2/sandboxes", json={"templateID": "base"}))
    await world.runtime.creating.wait()
    close = asyncio.create_task(world.server.close())
    refused = await world.api.post("/v2/sandboxes", json={"templateID": "base"})
    assert refused.status_code == 503
    world.runtime.create_gate.set()
    assert (await request).status_code == 503
    await close
    assert len(world.runtime.guests) == 1
    assert world.runtime.guests[0].kills == 1
