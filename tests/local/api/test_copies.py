"""Forks, and pauses of the filesystem only: the control plane's side, with guests that are Python objects."""

from __future__ import annotations

import asyncio
import errno

import pytest

from managed_e2b.local.model import State
from managed_e2b.local.runtime.base import GuestError, GuestGone


def path_of(sandbox, rest=""):
    return f"/sandboxes/{sandbox['sandboxID']}{rest}"


async def state_of(world, sandbox):
    return (await world.api.get(path_of(sandbox))).json()["state"]


def copies(world):
    return [image for image in world.runtime.images if image.startswith("copy-")]


# --- forks


async def test_forks_are_like_their_source_and_apart_from_it(world):
    source = await world.create(
        timeout=50, metadata={"run": "7"}, envVars={"A": "b"}, autoPause=True, network={"allowPublicTraffic": False}
    )
    world.guest(source).files = "changed"
    answer = await world.api.post(path_of(source, "/fork"), json={"count": 3, "timeout": 20})
    assert answer.status_code == 201
    forks = [item["sandbox"] for item in answer.json()]
    everyone = [source, *forks]
    for field in ("sandboxID", "envdAccessToken", "trafficAccessToken"):
        assert len({box[field] for box in everyone}) == 4, field
    registry = world.server.registry
    for fork in forks:
        box = registry.find(fork["sandboxID"])
        assert (box.metadata, box.spec.env_vars, box.spec.auto_pause) == ({"run": "7"}, {"A": "b"}, True)
        assert box.envd.ctx.env_vars == {"A": "b"}
        assert world.guest(fork).files == "changed"
        info = (await world.api.get(path_of(fork))).json()
        assert (info["templateID"], info["alias"], info["state"]) == ("base", "base", "running")
    assert copies(world) == [], "the image is used up"
    assert await state_of(world, source) == "running"
    assert (await world.api.get("/me2b/stats")).json()["forked"] == 3
    await world.expire(21)
    for fork in forks:
        assert (await world.api.get(path_of(fork))).json()["state"] == "paused"


async def test_a_fork_has_a_short_life_when_none_is_said(world):
    source = await world.create(timeout=50)
    (fork,) = (await world.api.post(path_of(source, "/fork"))).json()
    await world.expire(15.5)
    assert (await world.api.get(path_of(fork["sandbox"]))).status_code == 404
    assert await state_of(world, source) == "running"


async def test_each_fork_fails_alone(world):
    source = await world.create()
    create, errors = world.runtime.create, iter([None, GuestGone("x"), KeyError("gone"), None])

    async def unreliable(sandbox_id, spec):
        if error := next(errors):
            raise error
        return await create(sandbox_id, spec)

    world.runtime.create = unreliable
    results = (await world.api.post(path_of(source, "/fork"), json={"count": 4})).json()
    assert [list(result) for result in results] == [["sandbox"], ["error"], ["error"], ["sandbox"]]
    assert [result["error"]["code"] for result in results[1:3]] == [500, 404]
    assert results[1]["error"]["message"] == "Internal server error"
    assert copies(world) == []
    assert len(await world.listed()) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"count": 0}, "Count must be at least 1"),
        ({"count": -1}, "Count must be at least 1"),
        ({"count": 21}, "Count cannot be greater than 20"),
        ({"timeout": 0}, "Timeout must be greater than 0"),
        ({"timeout": 90_000}, "Timeout cannot be greater than 24 hours"),
        ({"count": "1"}, "Invalid request body: count: Input should be a valid integer"),
        ({"count": 2**31}, "Invalid request body: count: Input should be less than or equal to 2147483647"),
    ],
)
async def test_bad_forks(world, body, message):
    source = await world.create()
    answer = await world.api.post(path_of(source, "/fork"), json=body)
    assert answer.json() == {"code": 400, "message": message}
    assert len(world.runtime.guests) == 1


async def test_only_what_runs_is_forked_or_snapshotted(world):
    source = await world.create()
    await world.api.post(path_of(source, "/pause"))
    for what, verb in (("/fork", "forked"), ("/snapshots", "snapshotted")):
        answer = await world.api.post(path_of(source, what), json={})
        message = f"Sandbox '{source['sandboxID']}' is paused and cannot be {verb}; resume it first"
        assert answer.json() == {"code": 409, "message": message}
        assert (await world.api.post(f"/sandboxes/inowhere{what}", json={})).status_code == 404
    await world.api.delete(path_of(source))
    for what in ("/fork", "/snapshots"):
        assert (await world.api.post(path_of(source, what), json={})).status_code == 404
    assert copies(world) == []


@pytest.mark.parametrize("error", [None, GuestError(errno.EIO, "cp: cannot stat")])
async def test_a_kill_while_the_files_are_copied(world, error):
    source = await world.create()
    guest = world.guest(source)
    guest.commit_gate.clear()
    guest.commit_error = error
    fork = asyncio.create_task(world.api.post(path_of(source, "/fork"), json={"count": 2}))
    await guest.committing.wait()
    assert (await world.api.delete(path_of(source))).status_code == 204
    guest.dead.clear()  # the copy is made all the same, of files that were being removed
    guest.commit_gate.set()
    assert (await fork).status_code == 404
    guest.dead.set()
    assert copies(world) == []
    assert world.runtime.alive == []


async def test_a_client_that_goes_leaves_nothing_unlisted(world, until):
    source = await world.create()
    guest = world.guest(source)
    guest.commit_gate.clear()
    registry = world.server.registry
    fork = asyncio.create_task(registry.fork(source["sandboxID"], 30, 3))
    await guest.committing.wait()
    fork.cancel()
    await asyncio.gather(fork, return_exceptions=True)
    guest.commit_gate.set()
    await until(lambda: copies(world) == [] and registry.counters.forked == 3)
    assert sorted(await world.listed()) == sorted(guest.sandbox_id for guest in world.runtime.alive)
    assert len(world.runtime.alive) == 4


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 507), (errno.EMLINK, 400), (errno.EOPNOTSUPP, 501), (errno.EIO, 500)]
)
async def test_files_that_cannot_be_copied(world, number, status):
    source = await world.create()
    guest = world.guest(source)
    guest.commit_error = GuestError(number, "cp: /host/path: failed")
    for what, body in (("/fork", {}), ("/snapshots", {}), ("/pause", {"memory": False})):
        answer = await world.api.post(path_of(source, what), json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, status), what
        assert answer.headers["Should-Retry"] == "false"
        assert "/host" not in answer.text
        assert await state_of(world, source) == "running"
        assert not guest.frozen
    assert not world.server.registry.find(source["sandboxID"]).envd.aborted.is_set(), "its streams go on"
    guest.commit_error = None
    assert (await world.api.post(path_of(source, "/pause"), json={"memory": False})).status_code == 204


# --- pauses of the filesystem only


async def test_a_filesystem_pause_ends_the_processes_and_a_resume_boots_anew(world):
    sandbox = await world.create(timeout=40)
    old = world.guest(sandbox)
    old.files = "changed"
    assert (await world.api.post(path_of(sandbox, "/pause"), json={"memory": False})).status_code == 204
    assert old.dead.is_set()
    info = (await world.api.get(path_of(sandbox))).json()
    assert (info["state"], info["pauseMode"]) == ("paused", "filesystem")
    assert (await world.api.post(path_of(sandbox, "/pause"))).status_code == 409
    headers = {**world.envd_headers(sandbox), "X-Access-Token": sandbox["envdAccessToken"]}
    assert (await world.anonymous.get("/health", headers=headers)).status_code == 502
    answer = await world.api.post(path_of(sandbox, "/connect"), json={"timeout": 30})
    assert answer.status_code == 201
    same = {name: answer.json()[name] for name in ("sandboxID", "envdAccessToken", "trafficAccessToken", "domain")}
    assert same == {name: sandbox[name] for name in same}
    new = world.guest(sandbox)
    assert new is not old
    assert new.files == "changed"
    assert copies(world) == [], "the image is used up"
    assert (await world.anonymous.get("/health", headers=headers)).status_code == 204
    assert "pauseMode" not in (await world.api.get(path_of(sandbox))).json()
    assert (await world.api.get("/me2b/stats")).json()["ended"]["died"] == 0


async def test_full_pauses_are_told_apart(world):
    sandbox = await world.create()
    await world.api.post(path_of(sandbox, "/pause"), json={"memory": True})
    assert (await world.api.get(path_of(sandbox))).json()["pauseMode"] == "full"
    assert not world.guest(sandbox).dead.is_set()
    await world.api.post(path_of(sandbox, "/connect"), json={"timeout": 30})
    assert len(world.runtime.guests) == 1


@pytest.mark.parametrize("path", ["connect", "resume"])
async def test_a_resume_may_give_the_memory_up(world, path):
    sandbox = await world.create()
    old = world.guest(sandbox)
    old.files = "changed"
    await world.api.post(path_of(sandbox, "/pause"))
    answer = await world.api.post(path_of(sandbox, f"/{path}"), json={"timeout": 30, "memory": False})
    assert answer.status_code == 201
    new = world.guest(sandbox)
    assert (old.dead.is_set(), new is not old, new.files) == (True, True, "changed")
    assert (await world.api.post(path_of(sandbox, "/connect"), json={"timeout": 3, "memory": False})).status_code == 200
    assert world.guest(sandbox) is new, "what runs is only told to live on"
    assert copies(world) == []


async def test_when_no_boot_is_possible_it_stays_paused_with_its_files(world, runtime_unavailable):
    sandbox = await world.create()
    world.guest(sandbox).files = "changed"
    await world.api.post(path_of(sandbox, "/pause"))
    world.runtime.create_error = runtime_unavailable
    for memory in (False, True):
        answer = await world.api.post(path_of(sandbox, "/connect"), json={"timeout": 30, "memory": memory})
        assert (answer.status_code, answer.json()["message"]) == (503, str(runtime_unavailable))
        assert (await world.api.get(path_of(sandbox))).json()["pauseMode"] == "filesystem"
    world.runtime.create_error = None
    assert (await world.api.post(path_of(sandbox, "/connect"), json={"timeout": 30})).status_code == 201
    assert world.guest(sandbox).files == "changed"


async def test_a_copy_that_fails_leaves_what_is_paused_as_it_is(world):
    sandbox = await world.create()
    await world.api.post(path_of(sandbox, "/pause"))
    world.guest(sandbox).commit_error = GuestError(errno.ENOSPC, "full")
    answer = await world.api.post(path_of(sandbox, "/connect"), json={"timeout": 30, "memory": False})
    assert answer.status_code == 507
    assert (await world.api.get(path_of(sandbox))).json()["pauseMode"] == "full"
    assert world.guest(sandbox).frozen


async def test_a_kill_of_what_is_put_away_takes_its_files(world):
    sandbox = await world.create()
    await world.api.post(path_of(sandbox, "/pause"), json={"memory": False})
    assert len(copies(world)) == 1
    assert (await world.api.delete(path_of(sandbox))).status_code == 204
    assert copies(world) == []
    assert (await world.api.get(path_of(sandbox))).status_code == 404


async def test_a_kill_while_it_is_put_away(world):
    sandbox = await world.create()
    guest = world.guest(sandbox)
    guest.kill_gate.clear()
    pausing = asyncio.create_task(world.api.post(path_of(sandbox, "/pause"), json={"memory": False}))
    await guest.killing.wait()
    guest.killing.clear()
    kill = asyncio.create_task(world.api.delete(path_of(sandbox)))
    await guest.killing.wait()
    guest.kill_gate.set()
    assert [(await pausing).status_code, (await kill).status_code] == [404, 204]
    assert copies(world) == []
    assert world.runtime.alive == []


async def test_a_kill_while_it_boots_anew_waits_and_takes_the_new_guest(world, until):
    sandbox = await world.create()
    await world.api.post(path_of(sandbox, "/pause"), json={"memory": False})
    world.runtime.creating.clear()
    world.runtime.create_gate.clear()
    resume = asyncio.create_task(world.api.post(path_of(sandbox, "/connect"), json={"timeout": 30}))
    await world.runtime.creating.wait()
    box = world.server.registry.find(sandbox["sandboxID"])
    kill = asyncio.create_task(world.api.delete(path_of(sandbox)))
    await until(lambda: box.is_in(State.ENDING))
    world.runtime.create_gate.set()
    assert [(await resume).status_code, (await kill).status_code] == [404, 204]
    assert len(world.runtime.guests) == 2
    assert world.runtime.alive == []
    assert copies(world) == []


async def test_a_kill_while_the_memory_is_given_up_leaves_no_new_guest(world):
    sandbox = await world.create()
    await world.api.post(path_of(sandbox, "/pause"))
    guest = world.guest(sandbox)
    guest.kill_gate.clear()
    body = {"timeout": 30, "memory": False}
    resume = asyncio.create_task(world.api.post(path_of(sandbox, "/connect"), json=body))
    await guest.killing.wait()
    guest.killing.clear()
    kill = asyncio.create_task(world.api.delete(path_of(sandbox)))
    await guest.killing.wait()
    guest.kill_gate.set()
    assert [(await resume).status_code, (await kill).status_code] == [404, 204]
    assert len(world.runtime.guests) == 1
    assert copies(world) == []


async def test_a_guest_that_cannot_be_ended_runs_on(world):
    sandbox = await world.create()
    guest = world.guest(sandbox)
    guest.kill_error = RuntimeError("it will not die")
    assert (await world.api.post(path_of(sandbox, "/pause"), json={"memory": False})).status_code == 500
    assert await state_of(world, sandbox) == "running"
    assert not guest.frozen
    assert copies(world) == []
    guest.kill_error = None
    assert (await world.api.post(path_of(sandbox, "/pause"), json={"memory": False})).status_code == 204


async def test_an_auto_pause_may_keep_the_filesystem_only(world, until):
    sandbox = await world.create(timeout=10, autoPause=True, autoPauseMemory=False)
    guest = world.guest(sandbox)
    box = world.server.registry.find(sandbox["sandboxID"])
    await world.expire(10)
    await until(lambda: box.is_in(State.PAUSED))
    assert guest.dead.is_set()
    info = (await world.api.get(path_of(sandbox))).json()
    assert (info["pauseMode"], info["lifecycle"]["onTimeout"]) == ("filesystem", "pause")


async def test_an_auto_pause_that_fails_is_tried_again_later(world, until):
    sandbox = await world.create(timeout=10, autoPause=True, autoPauseMemory=False)
    guest = world.guest(sandbox)
    guest.commit_error = GuestError(errno.ENOSPC, "full")
    box = world.server.registry.find(sandbox["sandboxID"])
    await world.expire(10)
    await until(lambda: guest.committing.is_set() and box.is_in(State.RUNNING) and not box.transition.locked())
    guest.commit_error = None
    await world.expire(10)
    await until(lambda: box.is_in(State.PAUSED))


async def test_traffic_wakes_only_what_kept_its_memory(world):
    sandbox = await world.create(timeout=10, autoPause=True, autoResume={"enabled": True})
    headers = {**world.envd_headers(sandbox), "X-Access-Token": sandbox["envdAccessToken"]}
    await world.api.post(path_of(sandbox, "/pause"), json={"memory": False})
    assert (await world.anonymous.get("/health", headers=headers)).status_code == 502
    assert await state_of(world, sandbox) == "paused"
    await world.api.post(path_of(sandbox, "/connect"), json={"timeout": 30})
    await world.api.post(path_of(sandbox, "/pause"))
    assert (await world.anonymous.get("/health", headers=headers)).status_code == 204
