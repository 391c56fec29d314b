"""`Idempotency-Key` on create: once, whatever is repeated, and however it is interleaved."""

from __future__ import annotations

import asyncio

import pytest

from managed_e2b.local.errors import ApiError
from managed_e2b.local.idempotency import IdempotencyStore

KEY = {"Idempotency-Key": "run-7-a"}
BODY = {"templateID": "base", "metadata": {"a": "b"}}


async def test_the_same_request_makes_one_sandbox(world):
    first = await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)
    second = await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)
    assert (second.status_code, second.json()) == (201, first.json())
    assert len(world.runtime.guests) == 1
    other = await world.api.post("/v2/sandboxes", json=BODY, headers={"Idempotency-Key": "another"})
    assert other.json()["sandboxID"] != first.json()["sandboxID"]


async def test_requests_at_once_share_one_outcome(world):
    world.runtime.create_gate.clear()
    requests = [asyncio.create_task(world.api.post("/v2/sandboxes", json=BODY, headers=KEY)) for _ in range(5)]
    await world.runtime.creating.wait()
    world.runtime.create_gate.set()
    answers = await asyncio.gather(*requests)
    assert {answer.json()["sandboxID"] for answer in answers} == {world.runtime.guests[0].sandbox_id}
    assert len(world.runtime.guests) == 1


async def test_a_client_that_hung_up_gets_its_sandbox_by_asking_again(world):
    world.runtime.create_gate.clear()
    request = asyncio.create_task(world.api.post("/v2/sandboxes", json=BODY, headers=KEY))
    await world.runtime.creating.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    world.runtime.create_gate.set()
    answer = await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)
    assert [answer.json()["sandboxID"]] == await world.listed()
    assert len(world.runtime.guests) == 1


async def test_the_answer_outlives_the_sandbox(world):
    first = await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)
    await world.api.delete(f"/sandboxes/{first.json()['sandboxID']}")
    again = await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)
    assert again.json() == first.json()
    assert await world.listed() == []


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v2/sandboxes", {**BODY, "timeout": 7}), ("/v2/sandboxes", {"templateID": "base"}), ("/sandboxes", BODY)],
)
async def test_another_request_with_the_same_key_is_refused(world, path, body):
    await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)
    answer = await world.api.post(path, json=body, headers=KEY)
    assert answer.status_code == 422
    assert answer.json()["error_code"] == "idempotency_request_mismatch"
    assert answer.headers["Should-Retry"] == "false"
    assert len(world.runtime.guests) == 1


async def test_what_failed_may_be_tried_again(world, runtime_unavailable):
    world.runtime.create_error = runtime_unavailable
    assert (await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)).status_code == 503
    world.runtime.create_error = None
    assert (await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)).status_code == 201


@pytest.mark.parametrize("key", ["", "UPPER", "a b", "a_b", "x" * 256, "\xe4"])
async def test_a_malformed_key(world, key):
    answer = await world.api.post("/v2/sandboxes", json=BODY, headers={b"Idempotency-Key": key.encode("latin-1")})
    assert (answer.status_code, answer.json()["code"]) == (400, 400)
    assert world.runtime.guests == []


async def test_answers_are_kept_for_a_day(world):
    first = await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)
    world.clock.step(24 * 3600 - 1)
    again = await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)
    assert again.json() == first.json()
    world.clock.step(1)
    later = await world.api.post("/v2/sandboxes", json=BODY, headers=KEY)
    assert later.json()["sandboxID"] != first.json()["sandboxID"]


class TestStore:
    async def test_it_holds_the_newest_only_but_never_drops_what_is_under_way(self, world):
        store: IdempotencyStore[int] = IdempotencyStore(world.clock, limit=3)
        gate = asyncio.Event()

        async def slow() -> int:
            await gate.wait()
            return -1

        under_way = asyncio.create_task(store.run("slow", "request", slow))
        await asyncio.sleep(0)
        for number in range(10):

            async def effect(number: int = number) -> int:
                return number

            assert await store.run(number, "request", effect) == number
        assert len(store) <= 4

        async def never() -> int:
            raise AssertionError("it is kept")

        shared = asyncio.create_task(store.run("slow", "request", never))
        gate.set()
        assert await under_way == await shared == -1
        assert await store.run(9, "request", never) == 9

    async def test_a_cancelled_caller_does_not_cancel_the_effect(self, world):
        store: IdempotencyStore[int] = IdempotencyStore(world.clock)
        gate = asyncio.Event()

        async def effect() -> int:
            await gate.wait()
            return 1

        caller = asyncio.create_task(store.run("key", "request", effect))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        gate.set()
        assert await store.run("key", "request", effect) == 1

    async def test_a_failure_reaches_all_who_wait_and_is_not_kept(self, world):
        store: IdempotencyStore[int] = IdempotencyStore(world.clock)

        async def fail() -> int:
            raise ApiError(503, "no")

        outcomes = await asyncio.gather(*(store.run("k", "r", fail) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ApiError] * 3
        assert len(store) == 0
