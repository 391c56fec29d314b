"""Who may ask for faults, and how."""

from __future__ import annotations

import httpx
import pytest

from managed_e2b.local.server import LocalServer

from ..api.conftest import API_KEY, FakeEnvd, FakeRuntime
from .conftest import World, rule

PATHS = [
    ("GET", "/me2b/chaos"),
    ("PUT", "/me2b/chaos"),
    ("DELETE", "/me2b/chaos"),
    ("POST", "/me2b/chaos/rules"),
    ("DELETE", "/me2b/chaos/rules/1"),
    ("POST", "/me2b/chaos/release"),
    ("GET", "/me2b/chaos/journal"),
    ("DELETE", "/me2b/chaos/journal"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_without_the_key_nothing_is_changed_or_told(world: World, method: str, path: str) -> None:
    await world.play(rule("info").status(500))
    async with httpx.AsyncClient(base_url=world.server.url, trust_env=False) as anonymous:
        for headers in ({}, {"X-API-KEY": "e2b_" + "1" * 40}):
            answer = await anonymous.request(method, path, headers=headers, content=b"{}")
            assert answer.status_code == 401
    assert len((await world.api.get("/me2b/chaos")).json()["rules"]) == 1


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_a_server_without_chaos_knows_nothing_of_it(method: str, path: str) -> None:
    async with (
        LocalServer(api_key=API_KEY, runtime=FakeRuntime(), envd=FakeEnvd) as server,
        httpx.AsyncClient(base_url=server.url, headers={"X-API-KEY": API_KEY}, trust_env=False) as api,
    ):
        assert (await api.request(method, path, content=b"{}")).status_code == 404


async def test_a_request_without_the_key_meets_no_fault_and_moves_no_count(world: World) -> None:
    await world.play(rule("list").nth(1).pretend(200, []))
    async with httpx.AsyncClient(base_url=world.server.url, trust_env=False) as anonymous:
        assert (await anonymous.get("/v2/sandboxes")).status_code == 401
    assert await world.entries("list") == []
    assert (await world.api.get("/me2b/chaos")).json()["rules"][0]["seen"] == 0


async def test_rules_come_one_by_one_and_go(world: World) -> None:
    ids = []
    for made in (rule("info").status(500), rule("info").status(502)):
        answer = await world.api.post("/me2b/chaos/rules", content=made.model_dump_json())
        assert answer.status_code == 201
        ids.append(answer.json()["id"])
    assert (await world.api.get("/sandboxes/i1")).status_code == 500
    assert (await world.api.delete(f"/me2b/chaos/rules/{ids[0]}")).status_code == 204
    assert (await world.api.get("/sandboxes/i1")).status_code == 502
    assert (await world.api.delete(f"/me2b/chaos/rules/{ids[0]}")).status_code == 404
    shown = (await world.api.get("/me2b/chaos")).json()["rules"]
    assert [(item["id"], item["seen"], item["hits"]) for item in shown] == [(ids[1], 2, 1)]
    await world.api.delete("/me2b/chaos")
    assert (await world.api.get("/sandboxes/i1")).status_code == 404


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"rules": [{"ops": ["creat"], "fault": {"kind": "hang"}}]}', "no operation is called 'creat'"),
        ('{"rules": [{"ops": ["create"], "fault": {"kind": "hung"}}]}', "rules.0.fault"),
        ('{"rulez": []}', "rulez"),
        ("nonsense", "Invalid JSON"),
    ],
)
async def test_a_script_that_makes_no_sense_is_refused_and_the_old_one_stays(
    world: World, body: str, told: str
) -> None:
    await world.play(rule("info").status(500))
    answer = await world.api.put("/me2b/chaos", content=body)
    assert answer.status_code == 400
    assert told in answer.json()["message"]
    assert (await world.api.get("/sandboxes/i1")).status_code == 500


async def test_no_fault_touches_what_tests_ask_by(world: World) -> None:
    await world.play(rule("*").drop())
    assert (await world.api.get("/me2b/stats")).status_code == 200
    assert (await world.api.get("/health")).status_code == 204
    assert (await world.api.get("/me2b/chaos/journal")).json()["requests"] == []


async def test_the_journal_tells_whose_a_sandbox_was_even_when_it_is_gone(world: World) -> None:
    sandbox_id = await world.created(me2b_ticket="t1", me2b_owner="o1")
    for _ in range(2):
        await world.api.delete(f"/sandboxes/{sandbox_id}-local")
    told = [
        (entry["op"], entry["sandbox_id"], entry["ticket"], entry["owner"], entry["effect"])
        for entry in (await world.journal())["requests"]
    ]
    assert told == [
        ("create", sandbox_id, "t1", "o1", 201),
        ("kill", sandbox_id, "t1", "o1", 204),
        ("kill", sandbox_id, "t1", "o1", 404),
    ]
    wall = world.clock.read().wall.timestamp()
    assert all(0 <= wall - entry["at"] < 1 for entry in (await world.journal())["requests"])


async def test_peaks_are_counted_anew_with_the_journal(world: World) -> None:
    ids = [await world.created() for _ in range(3)]
    for sandbox_id in ids[:2]:
        await world.api.delete(f"/sandboxes/{sandbox_id}")
    journal = await world.journal()
    assert (journal["live"], journal["peak_live"], journal["peak_present"]) == (1, 3, 3)
    await world.api.delete("/me2b/chaos/journal")
    journal = await world.journal()
    assert (journal["requests"], journal["peak_live"], journal["peak_present"]) == ([], 1, 1)


async def test_one_that_is_being_killed_is_present_and_not_live(world: World) -> None:
    sandbox_id = await world.created()
    world.guest(sandbox_id).kill_gate.clear()
    killing = world.api.delete(f"/sandboxes/{sandbox_id}", timeout=0.1)
    with pytest.raises(httpx.ReadTimeout):
        await killing
    await world.created()
    journal = await world.journal()
    assert (journal["peak_live"], journal["peak_present"]) == (1, 2)
    world.guest(sandbox_id).kill_gate.set()
