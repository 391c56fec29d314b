"""Samples and log lines: what is kept of them, and how it is asked for."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest

from managed_e2b.local.history import INTERVAL, KEPT_SAMPLES, History, Sampler, Subject
from managed_e2b.local.logbook import KEPT_LINES, Level, Line, Logbook, LogQuery, select
from managed_e2b.local.runtime.base import GuestError, Usage

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
USAGE = Usage(2, 12.5, 1000, 2000, 0, 3000, 4000)


class TestHistory:
    def test_a_second_has_one_sample(self):
        history = History()
        for milliseconds in (0, 400, 999, 1000):
            history.add(EPOCH + timedelta(milliseconds=milliseconds), USAGE)
        assert [sample.at for sample in history.between(None, None)] == [EPOCH, EPOCH + timedelta(seconds=1)]
        assert history.last.second == int(EPOCH.timestamp()) + 1

    def test_the_bounds_are_included(self):
        history, start = History(), int(EPOCH.timestamp())
        for second in range(10):
            history.add(EPOCH + timedelta(seconds=second), USAGE)
        assert [s.second - start for s in history.between(start + 3, start + 5)] == [3, 4, 5]
        assert [s.second - start for s in history.between(start + 8, None)] == [8, 9]
        assert history.between(None, start - 1) == []

    def test_the_oldest_go(self):
        history = History(size=3)
        for second in range(5):
            history.add(EPOCH + timedelta(seconds=second), USAGE)
        assert [sample.at.second for sample in history.between(None, None)] == [2, 3, 4]
        assert History().between(None, None) == []
        assert KEPT_SAMPLES * INTERVAL == 3600


class StubGuest:
    def __init__(self, asked: asyncio.Queue[str], sandbox_id: str, error: Exception | None = None) -> None:
        self.sandbox_id = sandbox_id
        self.asked = asked
        self.error = error

    async def usage(self) -> Usage:
        self.asked.put_nowait(self.sandbox_id)
        if self.error is not None:
            raise self.error
        return USAGE


class TestSampler:
    async def test_it_goes_round_and_sleeps_while_there_is_nobody(self, world, until):
        asked: asyncio.Queue[str] = asyncio.Queue()
        guests = [StubGuest(asked, "a", GuestError(5, "no")), StubGuest(asked, "b")]
        subjects = [Subject(guest, History()) for guest in guests]
        there = []
        sampler = Sampler(lambda: there, world.clock, interval=0.001, share=0.5)
        running = asyncio.create_task(sampler.run())
        sampler.wake()
        await until(lambda: not sampler._wanted.is_set())
        assert asked.empty()
        there += subjects
        sampler.wake()
        assert [await asked.get() for _ in range(4)] == ["a", "b", "a", "b"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (subjects[0].history.last, subjects[1].history.last.usage) == (None, USAGE)


class TestLogbook:
    def test_lines_are_bounded_and_hold_text_only(self, world):
        logbook = Logbook(world.clock)
        for number in range(KEPT_LINES + 5):
            logbook.add("process", "Process started", pid=number, tag=None)
        lines = list(logbook)
        assert len(lines) == KEPT_LINES
        assert (lines[0].fields, lines[0].at) == ({"pid": "5"}, world.clock.read().wall)

    @pytest.mark.parametrize(
        ("query", "found"),
        [
            (LogQuery(), "abcd"),
            (LogQuery(limit=2), "ab"),
            (LogQuery(limit=0), ""),
            (LogQuery(backward=True), "dcba"),
            (LogQuery(backward=True, limit=2), "dc"),
            (LogQuery(level=Level.WARN), "c"),
            (LogQuery(search="b"), "b"),
            (LogQuery(start=1), "bcd"),
            (LogQuery(end=1), "ab"),
            (LogQuery(start=3, end=1), ""),
        ],
    )
    def test_queries(self, query, found):
        lines = [
            Line(datetime.fromtimestamp(number / 1000, UTC), Level.WARN if name == "c" else Level.INFO, "x", name)
            for number, name in enumerate("abcd")
        ]
        assert "".join(line.message for line in select(lines, query)) == found


async def test_metrics(world):
    sandbox = await world.create()
    path = f"/sandboxes/{sandbox['sandboxID']}/metrics"
    (sample,) = (await world.api.get(path)).json()
    assert (sample["cpuUsedPct"], sample["memUsed"], sample["diskTotal"]) == (12.5, 1000, 4000)
    now = sample["timestampUnix"]
    assert datetime.fromisoformat(sample["timestamp"]).timestamp() == now
    world.clock.step(INTERVAL + 1)
    assert [s["timestampUnix"] - now for s in (await world.api.get(path)).json()] == [0, INTERVAL + 1]
    assert len((await world.api.get(path, params={"start": now, "end": now})).json()) == 1
    assert (await world.api.get(path, params={"start": now - 100, "end": now - 50})).json() == []
    many = await world.api.get("/sandboxes/metrics", params={"sandbox_ids": f"{sandbox['sandboxID']},unknown"})
    assert list(many.json()["sandboxes"]) == [sandbox["sandboxID"]]
    assert many.json()["sandboxes"][sandbox["sandboxID"]]["timestampUnix"] == now + INTERVAL + 1


async def test_what_is_paused_gets_no_samples_but_keeps_them(world):
    sandbox = await world.create()
    path = f"/sandboxes/{sandbox['sandboxID']}/metrics"
    before = (await world.api.get(path)).json()
    await world.api.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    world.clock.step(100)
    assert (await world.api.get(path)).json() == before
    assert list(world.server.registry._subjects()) == []


async def test_logs_tell_a_life(world):
    sandbox = await world.create(envVars={"SECRET": "hunter2"})
    path = f"/sandboxes/{sandbox['sandboxID']}"
    await world.api.post(f"{path}/pause")
    await world.api.post(f"{path}/connect", json={"timeout": 9})
    await world.api.post(f"{path}/pause", json={"memory": False})
    answer = (await world.api.get(f"{path}/logs")).json()
    assert [json.loads(item["line"])["message"] for item in answer["logs"]] == [
        "Sandbox created",
        "Sandbox paused",
        "Sandbox resumed",
        "Sandbox paused",
    ]
    assert json.loads(answer["logs"][3]["line"])["mode"] == "filesystem"
    assert {json.loads(item["line"])["level"] for item in answer["logs"]} == {"info"}
    assert answer["logEntries"][0]["fields"]["template"] == "base"
    assert [item["timestamp"] for item in answer["logs"]] == [item["timestamp"] for item in answer["logEntries"]]
    newest = (await world.api.get(f"/v2{path}/logs", params={"limit": 1})).json()["logs"]
    assert newest == answer["logEntries"][3:]
    assert (await world.api.get(f"/v2{path}/logs", params={"level": "warn"})).json() == {"logs": []}
    assert (await world.api.get(f"{path}/logs", params={"start": 10**14})).json() == {"logs": [], "logEntries": []}
    await world.api.delete(path)
    after = await world.api.get(f"{path}/logs")
    assert json.loads(after.json()["logs"][-1]["line"])["reason"] == "killed", "the end can be read after it"
    assert not any(secret in after.text for secret in ("hunter2", sandbox["envdAccessToken"]))


async def test_only_so_many_lives_are_remembered(world, monkeypatch):
    monkeypatch.setattr("managed_e2b.local.sandboxes.KEPT_LOGBOOKS", 2)
    made = [await world.create() for _ in range(3)]
    for sandbox in made:
        await world.api.delete(f"/sandboxes/{sandbox['sandboxID']}")
    statuses = [(await world.api.get(f"/sandboxes/{box['sandboxID']}/logs")).status_code for box in made]
    assert statuses == [404, 200, 200]


@pytest.mark.parametrize(
    "query",
    [
        "metrics?start=x",
        "metrics?end=-1",
        "metrics?end=" + "9" * 5000,
        "logs?start=-1",
        "logs?limit=1001",
        "logs?limit=x",
    ],
)
async def test_bad_questions(world, query):
    sandbox = await world.create()
    answer = await world.api.get(f"/sandboxes/{sandbox['sandboxID']}/{query}")
    assert (answer.status_code, answer.json()["code"]) == (400, 400)


@pytest.mark.parametrize("query", ["direction=up", "level=fatal", "search=" + "x" * 257, "cursor=1.5"])
async def test_bad_questions_of_the_second_version(world, query):
    sandbox = await world.create()
    answer = await world.api.get(f"/v2/sandboxes/{sandbox['sandboxID']}/logs?{query}")
    assert (answer.status_code, answer.json()["code"]) == (400, 400)


async def test_of_what_never_was_nothing_is_told(world):
    for path in ("/sandboxes/iunknown/logs", "/v2/sandboxes/iunknown/logs", "/sandboxes/iunknown/metrics"):
        assert (await world.api.get(path)).status_code == 404
