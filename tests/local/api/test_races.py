"""Anything at once: whatever clients do to the same sandboxes, each ends exactly once and none is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from managed_e2b.local.errors import ApiError
from managed_e2b.local.model import SandboxSpec, State
from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.sandboxes import SandboxRegistry


def slow_down(guest, dice):
    """Let a guest's operations take a random number of turns of the event loop."""

    def slowly(operation):
        async def slow(*arguments):
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            await operation(*arguments)

        return slow

    for name in ("freeze", "thaw", "kill", "commit"):
        setattr(guest, name, slowly(getattr(guest, name)))


ACTIONS = [
    *("create", "create", "kill", "pause", "put_away", "connect", "reboot"),
    *("fork", "snapshot", "timeout", "expire", "die", "get", "wake"),
]


@pytest.mark.parametrize("seed", range(40))
async def test_random_clients(world, seed):
    dice = random.Random(seed)
    runtime, clock = world.runtime, world.clock
    create = runtime.create

    async def slow_create(sandbox_id, spec):
        for _ in range(dice.randrange(6)):
            await asyncio.sleep(0)
        if dice.random() < 0.05:
            raise RuntimeUnavailable("not this time")
        guest = await create(sandbox_id, spec)
        slow_down(guest, dice)
        return guest

    runtime.create = slow_create
    registry = SandboxRegistry(runtime, world.envd, clock=clock)
    ids = []
    images = []
    refusals = set()

    def keep(_, image):
        images.append(image)

    async def client():
        for _ in range(20):
            action = dice.choice(ACTIONS)
            target = dice.choice(ids) if ids else "inone"
            try:
                if action == "create":
                    image, auto_pause = dice.choice(["base", *images]), dice.random() < 0.4
                    spec = SandboxSpec(
                        "base",
                        "base",
                        dice.choice([5, 50]),
                        image=image,
                        auto_pause=auto_pause,
                        auto_pause_memory=not auto_pause or dice.random() < 0.5,
                        auto_resume=dice.random() < 0.5,
                    )
                    ids.append((await registry.create(spec)).sandbox_id)
                elif action == "kill":
                    await registry.kill(target)
                    assert registry.find(target) is None
                elif action in ("pause", "put_away"):
                    await registry.pause(target, memory=action == "pause")
                elif action in ("connect", "reboot"):
                    box, _ = await registry.connect(target, dice.choice([1, 60]), memory=action == "connect")
                    assert box.sandbox_id == target
                elif action == "fork":
                    made = await registry.fork(target, dice.choice([1, 60]), dice.choice([1, 3]))
                    ids.extend(box.sandbox_id for box in made if not isinstance(box, ApiError))
                elif action == "snapshot":
                    await registry.commit(target, keep)
                elif action == "wake":
                    await registry.wake(await registry.get(target))
                elif action == "timeout":
                    await registry.set_timeout(target, dice.choice([0, 3, 80]))
                elif action == "expire":
                    clock.step(dice.choice([1, 10]))
                    registry.expire_due()
                elif action == "die":
                    for guest in runtime.guests:
                        if guest.sandbox_id == target:
                            guest.dead.set()
                else:
                    await registry.get(target)
            except ApiError as error:
                refusals.add(error.status)

    async with asyncio.timeout(30):
        await asyncio.gather(*(client() for _ in range(6)))
        for box in list(registry):
            if box.transition.locked():
                continue
            if box.kept is not None:
                assert (box.state, box.guest.dead.is_set(), box.kept in runtime.images) == (State.PAUSED, True, True)
            elif not box.guest.dead.is_set():
                assert box.guest.frozen == (box.state is State.PAUSED)
        await registry.close()
    assert refusals <= {404, 409, 503}
    assert not list(registry)
    assert not runtime.alive
    assert all(guest.kills for guest in runtime.guests)
    assert sorted(runtime.images) == sorted(["base", *images]), "a copy is forgotten with who needed it"
    counters = registry.counters
    assert counters.created == sum(counters.ended.values()) <= len(runtime.guests)
    assert (counters.live, counters.ending) == (0, 0)


async def test_a_cancelled_kill_or_pause_is_finished_all_the_same(world, until):
    registry = world.server.registry
    box = registry.find((await world.create())["sandboxID"])
    box.guest.freeze_gate.clear()
    pause = asyncio.create_task(registry.pause(box.sandbox_id))
    await box.guest.freezing.wait()
    pause.cancel()
    await asyncio.gather(pause, return_exceptions=True)
    box.guest.freeze_gate.set()
    await until(lambda: box.is_in(State.PAUSED))
    box.guest.kill_gate.clear()
    kill = asyncio.create_task(registry.kill(box.sandbox_id))
    await box.guest.killing.wait()
    kill.cancel()
    await asyncio.gather(kill, return_exceptions=True)
    box.guest.kill_gate.set()
    await until(lambda: not world.runtime.alive)
    assert registry.find(box.sandbox_id) is None
