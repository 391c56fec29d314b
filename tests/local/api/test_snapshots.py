"""Snapshots: the control plane's side, with guests that are Python objects."""

from __future__ import annotations

import asyncio

import pytest
from e2b import AsyncSandbox


def path_of(sandbox, rest=""):
    return f"/sandboxes/{sandbox['sandboxID']}{rest}"


def copies(world):
    return [image for image in world.runtime.images if image.startswith("copy-")]


@pytest.fixture
def options(world):
    return {"api_key": world.server.api_key, "api_url": world.server.url, "sandbox_url": world.server.url}


async def snapshot_of(world, sandbox, **body):
    answer = await world.api.post(path_of(sandbox, "/snapshots"), json=body)
    assert answer.status_code == 201, answer.text
    world.clock.step(0.001)
    return answer.json()


async def snapshots(world, **params):
    answer = await world.api.get("/snapshots", params=params)
    assert answer.status_code == 200, answer.text
    return [item["snapshotID"] for item in answer.json()]


async def test_a_snapshot_outlives_its_sandbox(world):
    source = await world.create(metadata={"run": "7"}, envVars={"A": "b"})
    world.guest(source).files = "changed"
    made = await snapshot_of(world, source)
    assert (made["names"], made["snapshotID"].endswith(":default")) == ([], True)
    world.guest(source).files = "changed again"
    await world.api.delete(path_of(source))
    assert await snapshots(world) == [made["snapshotID"]]
    restored = await world.create(templateID=made["snapshotID"])
    assert world.guest(restored).files == "changed"
    box = world.server.registry.find(restored["sandboxID"])
    assert (box.envd.ctx.env_vars, box.metadata) == ({"A": "b"}, {})
    assert restored["templateID"] == made["snapshotID"].partition(":")[0]
    assert await world.listed(template=restored["templateID"]) == [restored["sandboxID"]]


async def test_without_memory_the_environment_is_forgotten(world):
    source = await world.create(envVars={"A": "b"})
    made = await snapshot_of(world, source, memory=False)
    restored = await world.create(templateID=made["snapshotID"], envVars={"C": "d"})
    assert world.server.registry.find(restored["sandboxID"]).envd.ctx.env_vars == {"C": "d"}


async def test_names_and_tags(world):
    source = await world.create()
    world.guest(source).files = "one"
    first = await snapshot_of(world, source, name="My-Snap")
    assert first == {"snapshotID": "my-snap:default", "names": ["my-snap"]}
    world.guest(source).files = "two"
    assert (await snapshot_of(world, source, name="my-snap:v2"))["snapshotID"] == "my-snap:v2"
    other = await snapshot_of(world, source, name="team/other")
    assert other == {"snapshotID": "team/other:default", "names": ["team/other"]}
    for reference, files in [("my-snap", "one"), ("my-snap:v2", "two"), ("team/other", "two")]:
        assert world.guest(await world.create(templateID=reference)).files == files
    assert await snapshots(world, name="my-snap") == ["my-snap:v2", "my-snap:default"]
    assert await snapshots(world, name="my-snap:v2") == ["my-snap:v2"]
    assert await snapshots(world, name="my-snap:default") == ["my-snap:default"]
    assert await snapshots(world, name="nowhere") == []
    assert len(copies(world)) == 3
    world.guest(source).files = "three"
    await snapshot_of(world, source, name="my-snap")
    assert len(copies(world)) == 3, "what a tag named before is forgotten"
    assert world.guest(await world.create(templateID="my-snap")).files == "three"
    assert await snapshots(world, name="my-snap") == ["my-snap:default", "my-snap:v2"], "the newest first"


async def test_lists_of_snapshots(world):
    sources = [await world.create() for _ in range(2)]
    made = [(await snapshot_of(world, sources[number % 2]))["snapshotID"] for number in range(5)]
    assert await snapshots(world) == made[::-1]
    assert await snapshots(world, sandboxID=sources[1]["sandboxID"]) == [made[3], made[1]]
    assert await snapshots(world, sandboxID=f"{sources[1]['sandboxID']}-local") == [made[3], made[1]]
    assert await snapshots(world, sandboxID="inowhere") == []
    assert await snapshots(world, name=made[2]) == [made[2]], "an id is as good as a name"
    seen, token = [], {}
    for _ in range(3):
        answer = await world.api.get("/snapshots", params={"limit": 2, **token})
        seen += [item["snapshotID"] for item in answer.json()]
        token = {"nextToken": answer.headers.get("X-Next-Token")}
    assert (seen, token) == (made[::-1], {"nextToken": None})
    templates = [item["templateID"] for item in (await world.api.get("/templates")).json()]
    assert "base" in templates
    assert not {snapshot.partition(":")[0] for snapshot in made} & set(templates), "a snapshot is no template"


async def test_deleting_snapshots(world):
    source = await world.create()
    made = (await snapshot_of(world, source))["snapshotID"]
    user = await world.create(templateID=made)
    for state in ("running", "paused"):
        answer = await world.api.delete(f"/templates/{made}")
        assert answer.status_code == 400
        assert answer.json()["message"].endswith(f"because there are {state} sandboxes using it")
        await world.api.post(path_of(user, "/pause"))
    await world.api.delete(path_of(user))
    assert (await world.api.delete(f"/templates/{made}")).status_code == 204
    assert (await world.api.delete(f"/templates/{made}")).status_code == 404
    assert (await world.api.post("/v2/sandboxes", json={"templateID": made})).status_code == 404
    assert await snapshots(world) == copies(world) == []
    await snapshot_of(world, source, name="team/named:v1")
    assert (await world.api.delete("/templates/team%2Fnamed%3Av1")).status_code == 204
    assert copies(world) == []


async def test_what_cannot_be_deleted_or_named(world):
    source = await world.create()
    assert (await world.api.delete("/templates/base")).status_code == 403
    assert (await world.api.delete("/templates/nowhere")).status_code == 404
    assert (await world.api.delete("/templates/no%20name")).status_code == 400
    bad = [
        "",
        "no name",
        "../x",
        "a:b:c",
        "a:",
        ":a",
        "x" * 600,
        "ü",
        "base",
        "base:v2",
        f"a:{'0' * 8}-0000-0000-0000-{'0' * 12}",
    ]
    for name in bad:
        answer = await world.api.post(path_of(source, "/snapshots"), json={"name": name})
        assert (answer.status_code, answer.json()["code"]) == (400, 400), name
    for query in ("limit=0", "limit=101", "limit=x", "nextToken=x", "name=no%20name"):
        assert (await world.api.get(f"/snapshots?{query}")).status_code == 400, query
    assert copies(world) == []
    assert not world.guest(source).committing.is_set(), "bad names cost nothing"


async def test_two_snapshots_of_one_name_at_once(world):
    source = await world.create()
    guest = world.guest(source)
    guest.commit_gate.clear()
    both = [asyncio.create_task(snapshot_of(world, source, name="same")) for _ in range(2)]
    await guest.committing.wait()
    guest.commit_gate.set()
    assert [made["snapshotID"] for made in await asyncio.gather(*both)] == ["same:default"] * 2
    assert len(copies(world)) == len(await snapshots(world)) == 1


async def test_the_sdk(world, options):
    sandbox = await AsyncSandbox.create("base", **options)
    (fork,) = await sandbox.fork(timeout=30)
    assert await fork.is_running()
    made = await sandbox.create_snapshot(name="kept")
    assert (made.snapshot_id, made.names) == ("kept:default", ["kept"])
    assert [item.snapshot_id for item in await sandbox.list_snapshots().next_items()] == ["kept:default"]
    restored = await AsyncSandbox.create(made.snapshot_id, **options)
    assert await restored.kill()
    assert await AsyncSandbox.delete_snapshot(made.snapshot_id, **options)
    assert not await AsyncSandbox.delete_snapshot(made.snapshot_id, **options)
    assert await sandbox.pause(mode="filesystem")
    await sandbox.connect(on_resume="reboot")
    assert await sandbox.is_running()
