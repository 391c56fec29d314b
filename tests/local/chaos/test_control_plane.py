"""Faults at the control plane, as a client on a real connection meets them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from .conftest import World, rule, until


async def hanging(world: World, op: str, count: int = 1) -> list[dict[str, Any]]:
    """Wait until so many requests hang."""
    found: list[dict[str, Any]] = []

    async def come() -> bool:
        found[:] = [entry for entry in await world.entries(op) if entry["state"] == "hanging"]
        return len(found) >= count

    await until(come)
    return found


async def test_before_the_effect_nothing_happens_and_after_it_all_has(world: World) -> None:
    await world.play(rule("create").nth(1).status(503), rule("create").nth(3).after().status(504, retry=False))
    assert [(await world.create()).status_code for _ in range(4)] == [503, 201, 504, 201]
    assert len(world.alive) == 3
    told = [(entry["effect"], entry["status"], entry["faults"]) for entry in await world.entries("create")]
    assert told == [
        (None, 503, ["status 503 before"]),
        (201, 201, []),
        (201, 504, ["status 504 after"]),
        (201, 201, []),
    ]


@pytest.mark.parametrize("status", [400, 401, 404, 409, 429, 500, 502, 503, 504])
async def test_any_status_is_the_apis_own_error(world: World, status: int) -> None:
    await world.play(rule("info").status(status, message="so it is"))
    answer = await world.api.get("/sandboxes/i1")
    assert answer.status_code == status
    assert answer.json() == {"code": status, "message": "so it is"}


@pytest.mark.parametrize("value", ["3", "0", "-1", "abc", "", "1.5", "Wed, 21 Oct 2015 07:28:00 GMT", None])
async def test_retry_after_is_sent_as_it_was_given(world: World, value: str | None) -> None:
    await world.play(rule("list").status(429, retry_after=value))
    answer = await world.api.get("/v2/sandboxes")
    assert answer.status_code == 429
    assert answer.headers.get("retry-after") == value


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_connection_that_ends_before_the_effect_or_after_it(world: World, how: Any) -> None:
    await world.play(rule("create").nth(1).drop(how), rule("create").nth(2).after().drop(how))
    for alive in (0, 1):
        with pytest.raises(httpx.ReadError if how == "reset" else httpx.RemoteProtocolError):
            await world.create()
        assert len(world.alive) == alive
    entries = await world.entries("create")
    assert [(entry["effect"], entry["status"], entry["state"]) for entry in entries] == [
        (None, None, "dropped"),
        (201, None, "dropped"),
    ]
    assert entries[1]["sandbox_id"] == world.alive[0]
    await world.created()


async def test_a_kill_that_says_done_and_does_nothing(world: World) -> None:
    sandbox_id = await world.created()
    await world.play(rule("kill").first(2).pretend())
    for _ in range(2):
        assert (await world.api.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
        assert world.alive == [sandbox_id]
    assert (await world.api.delete(f"/sandboxes/{sandbox_id}")).status_code == 204
    assert world.alive == []
    assert [entry["effect"] for entry in await world.entries("kill")] == [None, None, 204]


async def test_whoever_hangs_up_during_a_delay_changes_nothing(world: World) -> None:
    await world.play(rule("create").delay(0.2))
    with pytest.raises(httpx.ReadTimeout):
        await world.api.post("/v2/sandboxes", json={"templateID": "base"}, timeout=0.05)
    await until(lambda: world.alive)


@pytest.mark.parametrize(("after", "alive"), [(False, 0), (True, 1)])
async def test_a_request_that_hangs_is_never_answered_and_ends_with_its_client(
    world: World, caplog: pytest.LogCaptureFixture, after: bool, alive: int
) -> None:
    on = rule("create").after() if after else rule("create")
    await world.play(on.hang())
    asking = asyncio.create_task(world.create())
    (entry,) = await hanging(world, "create")
    assert entry["effect"] == (201 if after else None)
    assert len(world.alive) == alive
    asking.cancel()

    async def dropped() -> bool:
        return (await world.entries("create"))[0]["state"] == "dropped"

    await until(dropped)
    assert len(world.alive) == alive
    assert not caplog.records, "a client that leaves is no error of the server's"


async def test_a_request_that_is_released_goes_on_as_if_nothing_had_been(world: World) -> None:
    await world.play(rule("create").hang(), rule("create").after().hang())
    asking = asyncio.create_task(world.create())
    for alive in (0, 1):
        await hanging(world, "create")
        assert len(world.alive) == alive
        assert (await world.api.post("/me2b/chaos/release")).json() == {"released": 1}
        if alive == 0:
            await until(lambda: world.alive)
    assert (await asking).status_code == 201


async def test_calm_drops_what_hangs(world: World) -> None:
    await world.play(rule("create").hang())
    asking = asyncio.create_task(world.create())
    await hanging(world, "create")
    await world.api.delete("/me2b/chaos")
    with pytest.raises(httpx.ReadError):
        await asking
    assert world.alive == []
    await world.created()


@pytest.mark.parametrize(("after", "effect"), [(False, None), (True, 201)])
async def test_calm_drops_what_is_late_also_when_its_client_has_left(
    world: World, after: bool, effect: int | None
) -> None:
    """A create that a test had left behind came a minute later, in the midst of another test."""
    await world.play((rule("create").after() if after else rule("create")).delay(3600))
    asking, leaving = asyncio.create_task(world.create()), asyncio.create_task(world.create())

    async def come() -> bool:
        return [entry["effect"] for entry in await world.entries("create")] == [effect] * 2

    await until(come)
    leaving.cancel()
    await world.api.delete("/me2b/chaos")
    with pytest.raises(httpx.ReadError):
        await asking

    async def dropped() -> bool:
        return [entry["state"] for entry in await world.entries("create")] == ["dropped"] * 2

    await until(dropped)
    assert len(world.alive) == (2 if after else 0)


async def test_a_sandbox_dies_early(world: World) -> None:
    await world.play(rule("create").nth(1).dies_at(0.05))
    first, second = await world.created(), await world.created()
    await until(lambda: world.alive == [second])
    assert (await world.api.get(f"/sandboxes/{first}")).status_code == 404
    assert world.server.registry.counters.ended["died"] == 1


async def test_a_sandbox_that_was_killed_before_its_early_death_is_no_trouble(world: World) -> None:
    await world.play(rule("create").nth(1).dies_at(1.0), rule("create").nth(2).dies_at(1.1))
    first, second = await world.created(), await world.created()
    await world.api.delete(f"/sandboxes/{first}")
    await until(lambda: not world.alive)
    assert world.guest(second).kills >= 1
    assert world.guest(first).kills == 1


async def test_a_cap_holds_for_creates_that_come_at_once(world: World) -> None:
    await world.play(rule("create").cap(3))
    world.runtime.create_gate.clear()
    asking = [asyncio.create_task(world.create()) for _ in range(8)]
    await until(lambda: sum(task.done() for task in asking) == 5)
    world.runtime.create_gate.set()
    answers = await asyncio.gather(*asking)
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [429] * 5
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "maximum number of concurrent sandboxes (3)" in refused.json()["message"]
    assert (await world.journal())["peak_live"] == 3
    await world.api.delete(f"/sandboxes/{world.alive[0]}")
    assert (await world.create()).status_code == 201


async def test_a_create_that_waits_holds_its_place_under_a_cap(world: World) -> None:
    await world.play(rule("create").nth(1).hang(), rule("create").cap(1))
    asking = asyncio.create_task(world.create())
    await hanging(world, "create")
    assert (await world.create()).status_code == 429
    await world.api.post("/me2b/chaos/release")
    assert (await asking).status_code == 201
    assert (await world.create()).status_code == 429


async def test_a_create_counts_once_between_its_effect_and_its_answer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.play(rule("create").cap(2))
    registry, done, answer = world.server.registry, asyncio.Event(), asyncio.Event()
    create = registry.create

    async def held_back(spec: Any) -> Any:
        made = await create(spec)
        done.set()
        await answer.wait()
        return made

    monkeypatch.setattr(registry, "create", held_back)
    asking = asyncio.create_task(world.create())
    await done.wait()
    monkeypatch.undo()
    assert [(await world.create()).status_code for _ in range(2)] == [201, 429]
    answer.set()
    assert (await asking).status_code == 201
    assert (await world.create()).status_code == 429


async def test_a_create_that_is_repeated_while_it_is_done_is_one_sandbox_for_a_cap(world: World) -> None:
    await world.play(rule("create").cap(2))
    world.runtime.create_gate.clear()
    ask: dict[str, Any] = {"json": {"templateID": "base"}, "headers": {"Idempotency-Key": "k1"}}
    same = [asyncio.create_task(world.api.post("/v2/sandboxes", **ask)) for _ in range(3)]

    async def seen() -> bool:
        return len(await world.entries("create")) == 3

    await until(seen)
    other = asyncio.create_task(world.create())
    world.runtime.create_gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*same, other)] == [201] * 4
    assert len(world.alive) == 2


async def test_a_create_that_came_to_nothing_gives_its_place_back(world: World) -> None:
    await world.play(rule("create").nth(1).hang(), rule("create").nth(2).status(500), rule("create").cap(1))
    asking = asyncio.create_task(world.create())
    await hanging(world, "create")
    asking.cancel()
    assert (await world.create()).status_code == 500

    async def dropped() -> bool:
        return (await world.entries("create"))[0]["state"] == "dropped"

    await until(dropped)
    assert (await world.create()).status_code == 201


async def test_a_create_repeated_by_its_key_dies_once(world: World) -> None:
    await world.play(rule("create").dies_at(0.05))
    ask: dict[str, Any] = {"json": {"templateID": "base"}, "headers": {"Idempotency-Key": "k1"}}
    answers = [await world.api.post("/v2/sandboxes", **ask) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    await until(lambda: not world.alive)
    assert world.server.registry.counters.created == 1


async def test_a_cap_counts_no_paused_sandboxes(world: World) -> None:
    await world.play(rule("create").cap(1))
    sandbox_id = await world.created()
    assert (await world.create()).status_code == 429
    assert (await world.api.post(f"/sandboxes/{sandbox_id}/pause")).status_code == 204
    assert (await world.create()).status_code == 201


async def test_a_create_that_is_repeated_by_its_key_is_no_more_sandbox_for_a_cap(world: World) -> None:
    await world.play(rule("create").cap(1), rule("create").nth(1).after().status(503))
    ask: dict[str, Any] = {"json": {"templateID": "base"}, "headers": {"Idempotency-Key": "k1"}}
    assert (await world.api.post("/v2/sandboxes", **ask)).status_code == 503
    assert (await world.api.post("/v2/sandboxes", **ask)).status_code == 201
    assert len(world.alive) == 1


async def test_a_rate_refuses_what_is_too_much_until_time_has_passed(world: World) -> None:
    await world.play(rule("create").rate(2, retry_after="auto"))
    answers = [await world.create() for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 201, 429]
    assert answers[2].headers["retry-after"] == "1"
    world.clock.step(1)
    assert (await world.create()).status_code == 201


async def test_rules_by_metadata_find_a_create_by_its_body_and_the_rest_by_its_sandbox(world: World) -> None:
    await world.play(rule("create", "info").where(run="7").status(500))
    assert (await world.create(run="7")).status_code == 500
    other = await world.created(run="8")
    assert (await world.api.get(f"/sandboxes/{other}")).status_code == 200
    await world.play()
    mine = await world.created(run="7")
    await world.play(rule("create", "info").where(run="7").status(500))
    assert (await world.api.get(f"/sandboxes/{mine}")).status_code == 500


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[1]", b'{"metadata": 7}', b"[" * 100_000, b'{"metadata": {"a": "b"}']
)
async def test_a_create_whose_body_is_nonsense_is_the_control_planes_to_refuse(world: World, body: bytes) -> None:
    await world.play(rule("create").where(run="7").status(500))
    answer = await world.api.post("/v2/sandboxes", content=body)
    assert answer.status_code == 400, answer.text


async def test_a_body_that_is_too_large_is_refused_all_the_same(world: World) -> None:
    answer = await world.api.post("/v2/sandboxes", content=b" " * (3 * 1024 * 1024))
    assert answer.status_code == 413


async def test_the_answers_of_the_server_come_whole(world: World) -> None:
    sandbox_id = await world.created(run="7")
    answer = await world.list(limit=1)
    assert answer.headers["x-total-running"] == "1"
    assert [item["sandboxID"] for item in answer.json()] == [sandbox_id]
    assert (await world.api.delete(f"/sandboxes/{sandbox_id}")).content == b""
    assert (await world.api.get("/nowhere")).status_code == 404
