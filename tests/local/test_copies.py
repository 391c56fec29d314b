"""Copies of real sandboxes, through the SDK: what is in them, what is not, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from e2b import AsyncSandbox, SandboxException, SandboxNotFoundException, SandboxNotRunningException, SandboxState

from managed_e2b.local.history import History, Subject
from managed_e2b.local.logbook import Level
from managed_e2b.local.model import SandboxSpec
from managed_e2b.local.server import LocalServer
from managed_e2b.local.templates import Settings

from ..places import server_at

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


@pytest.fixture(scope="module")
def data_dir() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="me2b-copies-"))
    yield place
    shutil.rmtree(place)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(data_dir: Path) -> AsyncIterator[LocalServer]:
    async with server_at(data_dir) as server:
        yield server


@pytest.fixture
def options(server: LocalServer) -> dict[str, Any]:
    return {"api_key": server.api_key, "api_url": server.url, "sandbox_url": server.url}


Make = Callable[..., Awaitable[AsyncSandbox]]


@pytest_asyncio.fixture(loop_scope="module")
async def make(server: LocalServer, options: dict[str, Any], data_dir: Path) -> AsyncIterator[Make]:
    """Makes sandboxes. After the test nothing of any is left: no sandbox, no guest's directory, no layer."""

    async def make(template: str = "base", **more: Any) -> AsyncSandbox:
        return await AsyncSandbox.create(template, **more, **options)

    yield make
    for sandbox in list(server.registry):
        await server.registry.kill(sandbox.sandbox_id)
    async with asyncio.timeout(20):
        while left := leftovers(data_dir):  # noqa: ASYNC110 -- what a layer's removal takes has no event
            await asyncio.sleep(0.01)
    assert left == []


def leftovers(data_dir: Path) -> list[str]:
    places = [place for name in ("guests", "layers") for place in data_dir.glob(f"sandboxes/*/{name}")]
    return [str(entry) for place in places for entry in place.iterdir()]


async def out(sandbox: AsyncSandbox, command: str, **more: Any) -> str:
    return (await sandbox.commands.run(command, **more)).stdout.strip()


async def test_a_fork_has_the_files_and_none_of_the_processes(make: Make) -> None:
    source = await make(envs={"GIVEN": "once"}, metadata={"run": "7"})
    await source.files.write("state", "before\n")
    await source.commands.run("mkdir d; ln -s ../state d/link; mkfifo pipe; chmod 640 state")
    await source.commands.run("touch /root/of-root", user="root")
    running = await source.commands.run("sleep 1000", background=True)
    results = await source.fork(count=2, timeout=60)
    forks = [fork for fork in results if isinstance(fork, AsyncSandbox)]
    assert len(forks) == 2
    assert len({box.sandbox_id for box in (source, *forks)}) == 3
    await forks[0].files.write("state", "of the first fork\n")
    for box, state in ((source, "before"), (forks[0], "of the first fork"), (forks[1], "before")):
        assert await out(box, "cat d/link; echo $GIVEN; stat -c %a state; stat -c %F pipe; pwd") == (
            f"{state}\nonce\n640\nfifo\n/home/user"
        )
        assert await out(box, "ls /root", user="root") == "of-root"
        assert (await box.get_info()).metadata == {"run": "7"}
    assert [process.pid for process in await source.commands.list()] == [running.pid]
    for fork in forks:
        assert await fork.commands.list() == []
        assert await out(fork, "pgrep -c sleep || true") == "0"
        assert await out(fork, BOOT_ID) != await out(source, BOOT_ID)
    await source.kill()
    assert await out(forks[1], "cat state") == "before", "a fork needs its source no more"


async def test_a_token_of_the_source_opens_no_fork(make: Make, options: dict[str, Any]) -> None:
    source = await make()
    (fork,) = await source.fork(timeout=60)
    assert isinstance(fork, AsyncSandbox)
    headers = {"E2b-Sandbox-Id": fork.sandbox_id, "E2b-Sandbox-Port": "49983"}
    async with httpx.AsyncClient(base_url=options["sandbox_url"], trust_env=False, headers=headers) as client:
        for box, status in ((source, 401), (fork, 200)):
            token = {"X-Access-Token": box._envd_access_token or ""}
            answer = await client.post("/process.Process/List", json={}, headers=token)
            assert answer.status_code == status


async def test_a_fork_of_a_fork(make: Make) -> None:
    box = await make()
    for number in range(3):
        await box.files.write(f"file-{number}", str(number))
        (fork,) = await box.fork(timeout=60)
        assert isinstance(fork, AsyncSandbox)
        await box.kill()
        box = fork
    assert await out(box, "cat file-*") == "012"


async def test_a_snapshot_outlives_its_sandbox_and_is_gone_when_deleted(make: Make, options: dict[str, Any]) -> None:
    source = await make()
    await source.files.write("state", "kept")
    made = await source.create_snapshot(name="of-a-test:v1")
    await source.files.write("state", "changed")
    await source.kill()
    restored = [await make(made.snapshot_id) for _ in range(2)]
    await restored[0].files.write("state", "of the first")
    assert await out(restored[1], "cat state") == "kept"
    with pytest.raises(SandboxException, match="there are running sandboxes using it"):
        await AsyncSandbox.delete_snapshot(made.snapshot_id, **options)
    for box in restored:
        await box.kill()
    assert await AsyncSandbox.delete_snapshot(made.snapshot_id, **options)
    with pytest.raises(SandboxException, match="not found"):
        await make(made.snapshot_id)


async def test_a_filesystem_pause_is_a_reboot(make: Make) -> None:
    box = await make(envs={"GIVEN": "once"})
    await box.files.write("state", "kept\n")
    boot = await out(box, BOOT_ID)
    running = await box.commands.run("sleep 1000", background=True)
    assert await box.pause(mode="filesystem")
    with pytest.raises(SandboxNotRunningException):
        await running.wait()
    assert (await box.get_info()).state == SandboxState.PAUSED
    await box.connect(timeout=60)
    assert await out(box, "cat state; echo $GIVEN") == "kept\nonce"
    assert await out(box, BOOT_ID) != boot
    assert await box.commands.list() == []
    for number in range(5):  # each time its own changes, and those before
        await box.files.write(f"round-{number}", "x")
        assert await box.pause(mode="filesystem")
        await box.connect(timeout=60)
    assert await out(box, "ls") == "\n".join([*(f"round-{number}" for number in range(5)), "state"])
    assert await box.kill()


async def test_what_the_template_starts_runs_in_each_copy_and_after_each_boot(
    make: Make, server: LocalServer, options: dict[str, Any]
) -> None:
    settings = Settings(start_cmd="echo x >> ~/starts; exec sleep 1000", ready_cmd="pgrep -x sleep")
    inside = await server.registry.create(SandboxSpec("base", "base", 60, settings=settings))
    box = await AsyncSandbox.connect(inside.sandbox_id, **options)
    (fork,) = await box.fork(timeout=60)
    assert isinstance(fork, AsyncSandbox)
    assert await box.pause(mode="filesystem")
    await box.connect(timeout=60)
    for each in (box, fork):
        assert await out(each, "wc -l < starts; pgrep -xc sleep") == "2\n1"
    assert await box.pause(mode="filesystem")
    inside.spec = replace(inside.spec, settings=replace(settings, start_cmd="exit 3"))
    await box.connect(timeout=60)
    assert await out(box, "wc -l < starts") == "2", "it runs, also when that fails"
    failure = next(line for line in inside.logbook if line.level is Level.ERROR)
    assert "did not get ready" in failure.message


async def test_a_full_pause_keeps_the_boot_and_a_reboot_gives_it_up(make: Make) -> None:
    box = await make()
    boot = await out(box, BOOT_ID)
    running = await box.commands.run("sleep 1000", background=True)
    await box.files.write("state", "kept\n")
    assert await box.pause()
    await box.connect(timeout=60)
    assert await out(box, BOOT_ID) == boot
    assert [process.pid for process in await box.commands.list()] == [running.pid]
    assert await box.pause()
    await box.connect(timeout=60, on_resume="reboot")
    assert await out(box, BOOT_ID) != boot
    assert await out(box, "cat state; pgrep -c sleep || true") == "kept\n0"


async def test_a_kill_at_any_moment_leaves_nothing(make: Make, server: LocalServer, options: dict[str, Any]) -> None:
    """While it is forked, snapshotted, put away, or boots anew; what was made of it in time is listed and lives."""
    for what in ("fork", "snapshot", "put away", "boot"):
        box = await make()
        await box.commands.run("head -c 3000000 /dev/urandom > data; mkdir d; touch d/{1..300}")
        work: Awaitable[Any]
        if what == "fork":
            work = box.fork(count=2, timeout=60)
        elif what == "snapshot":
            work = box.create_snapshot()
        elif what == "put away":
            work = box.pause(mode="filesystem")
        else:
            await box.pause(mode="filesystem")
            work = box.connect(timeout=60)
        task = asyncio.ensure_future(work)
        inside = server.registry.find(box.sandbox_id)
        assert inside is not None
        async with asyncio.timeout(20):
            while not inside.transition.locked() and not task.done():  # noqa: ASYNC110 -- a moment without an event
                await asyncio.sleep(0)
        await box.kill()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        assert not await box.is_running()
        assert not isinstance(result, BaseException) or isinstance(result, SandboxNotFoundException), what
        if what == "snapshot" and not isinstance(result, BaseException):
            assert await AsyncSandbox.delete_snapshot(result.snapshot_id, **options)
        if what == "fork" and not isinstance(result, BaseException):
            for fork in result:
                assert await out(fork, "ls d | wc -l; stat -c %s data") == "300\n3000000", "a copy is whole"


async def test_the_log_tells_what_ran(make: Make, server: LocalServer) -> None:
    box = await make()
    await box.commands.run("true")
    await box.pause()
    await box.kill()
    messages = [line.message for line in server.registry.logbook(box.sandbox_id)]
    assert messages[0] == "Sandbox created"
    assert messages[-2:] == ["Sandbox paused", "Sandbox ends"]
    assert any(message.endswith("started: true") for message in messages)


async def test_samples_are_of_the_sandbox_itself(make: Make, server: LocalServer) -> None:
    box = await make()
    subject = Subject(server.registry.find(box.sandbox_id).guest, History())
    usages = []
    for _ in range(2):
        usages.append((await subject.guest.usage()).disk_used)
        await box.commands.run("head -c 5000000 /dev/urandom > data")
    assert usages[1] - usages[0] >= 5_000_000
    (sample,) = await box.get_metrics()
    assert sample.disk_total > sample.disk_used
