"""From create to kill, and what is left when a server dies without a word: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from managed_e2b.local.runtime import storage
from managed_e2b.local.runtime.base import GuestGone, GuestSpec, RuntimeUnavailable
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime
from managed_e2b.local.runtime.deaths import MOST
from managed_e2b.local.runtime.link import OperationFailed

from .boxes import Box, eventually, first_output, pid_namespace, processes_in

pytestmark = pytest.mark.asyncio(loop_scope="module")


def proc(pid: int | str, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def directories(runtime: BubblewrapRuntime) -> set[str]:
    return {path.name for path in runtime.guests_directory.iterdir()}


async def test_a_kill_leaves_no_process_no_mount_and_no_directory(make_box: Callable[[], Awaitable[Box]]) -> None:
    box = await make_box()
    namespace = pid_namespace(box.guest)
    process = await box.start("(setsid sleep 1000 &); mkdir -p deep/er; echo ready; exec sleep 1001", cwd="/home/user")
    await first_output(process)
    assert len(processes_in(namespace)) >= 3
    name = os.path.basename(box.guest.directory)
    assert name in directories(box.runtime)
    await box.guest.kill()
    process.close()
    assert box.guest.dead.is_set()
    assert processes_in(namespace) == []
    assert name not in directories(box.runtime)
    assert name not in proc("self", "mountinfo")
    assert name not in proc(box.runtime.spawner_link.pid, "mountinfo")
    await box.guest.kill()  # again: nothing


async def test_changes_can_be_kept_in_memory(runtime: BubblewrapRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no directory of the host can hold an overlay."""
    monkeypatch.setattr(runtime._ground, "overlay", False)
    guest = await runtime.create("memory")
    box = Box(guest, runtime)
    before = await guest.usage()
    result = await box.run("head -c 3000000 /dev/zero > ~/big; sudo touch /etc/x /usr/x; ls /etc/x /usr/x")
    assert result.out == "/etc/x\n/usr/x\n"
    assert (await guest.usage()).disk_used >= before.disk_used + 3_000_000
    await guest.kill()
    assert os.path.basename(guest.directory) not in directories(runtime)


async def test_kills_at_once_are_one(make_box: Callable[[], Awaitable[Box]]) -> None:
    box = await make_box()
    await asyncio.gather(*(box.guest.kill() for _ in range(5)))
    assert box.guest.dead.is_set()


async def test_files_of_any_depth_and_kind_are_removed(make_box: Callable[[], Awaitable[Box]], tmp_path: Path) -> None:
    keep = tmp_path / "of-the-host"
    keep.mkdir()
    (keep / "file").write_text("stays")
    box = await make_box()
    script = f"""
    ln -s {keep} link; ln -s {keep}/file link2; mkfifo pipe; touch "$(printf 'new\\nline')"
    mkdir -p $(printf 'd/%.0s' $(seq 1200)) && mkdir locked && touch locked/x && chmod 0 locked
    """
    await box.run(script, cwd="/home/user")
    await box.guest.kill()
    assert os.path.basename(box.guest.directory) not in directories(box.runtime)
    assert (keep / "file").read_text() == "stays"


async def test_the_death_of_the_first_process_is_noticed(make_box: Callable[[], Awaitable[Box]]) -> None:
    box = await make_box()
    namespace = pid_namespace(box.guest)
    process = await box.start("sleep 1000")
    os.kill(box.guest.host_pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await box.guest.dead.wait()
        await process.wait()
    process.close()
    await box.guest.kill()
    assert processes_in(namespace) == []


async def test_root_inside_cannot_end_the_first_process(make_box: Callable[[], Awaitable[Box]]) -> None:
    box = await make_box()
    await box.run("kill -9 1; kill -TERM 1; kill -INT 1; kill -HUP 1", user="root")
    assert (await box.run("echo alive")).out == "alive\n"


async def test_a_create_that_is_cancelled_leaves_nothing(runtime: BubblewrapRuntime) -> None:
    task = asyncio.create_task(runtime.create("cancelled"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: runtime.live_sandboxes == 0 and not directories(runtime))


async def test_a_launch_that_fails_leaves_nothing(runtime: BubblewrapRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    from managed_e2b.local.runtime import bwrap

    def broken(*args: object, **options: object) -> list[str]:
        return [real(*args, **options)[0], "--nonsense"]

    real = bwrap.arguments
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(bwrap, "arguments", broken)
    with pytest.raises(RuntimeUnavailable, match="nonsense"):
        await runtime.create("broken")
    assert runtime.live_sandboxes == 0
    assert directories(runtime) == set()
    assert set(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    await (await runtime.create("broken")).kill()  # the name is free again


async def test_unknown_images_and_bad_ids(runtime: BubblewrapRuntime) -> None:
    with pytest.raises(KeyError):
        await runtime.create("x", GuestSpec("no-such-image"))
    for name in ("", "../up", "a/b", "-x", "x" * 100):
        with pytest.raises(ValueError, match="sandbox id"):
            await runtime.create(name)


async def test_many_sandboxes_at_once(runtime: BubblewrapRuntime) -> None:
    guests = await asyncio.gather(*(runtime.create(f"many{number}") for number in range(20)))
    assert runtime.live_sandboxes == 20
    results = await asyncio.gather(*(Box(guest, runtime).run("echo ok > ~/f; cat ~/f") for guest in guests))
    assert {result.out for result in results} == {"ok\n"}
    await asyncio.gather(*(guest.kill() for guest in guests))
    assert runtime.live_sandboxes == 0


LAYOUT = {"home": "/no/such/directory", "sandbox": "half", "root": [], "usr": [], "memory": False}


async def test_the_spawner_survives_bad_requests(runtime: BubblewrapRuntime, box: Box) -> None:
    link = runtime.spawner_link
    bad = [
        ("no-such-op", {}),
        ("spawn", {}),
        ("spawn", {"sandbox": "nobody"}),
        ("spawn", {"sandbox": box.guest.sandbox_id, "argv": "text", "env": [], "cwd": 1}),
        ("launch", {"sandbox": 1, "argv": None, "layout": None}),
        ("launch", {"sandbox": box.guest.sandbox_id, "argv": [], "layout": LAYOUT}),
        ("launch", {"sandbox": "half", "argv": ["/no/such/bwrap"], "layout": LAYOUT}),
        ("freeze", {"sandbox": "nobody", "frozen": True}),
        ("dial", {"sandbox": box.guest.sandbox_id, "port": 70000}),
        ("kill_marked", {"sandbox": box.guest.sandbox_id}),
        ("usage", {"sandbox": box.guest.sandbox_id, "directories": 5}),
        ("bury", {"sandbox": [], "directory": "/nowhere"}),
        ("view", {"directory": "/no/such/directory"}),
        ("configure", {"uids": "x"}),
    ]
    for op, args in bad:
        with pytest.raises(OperationFailed):
            await link.call(op, **args)
    assert (await box.run("echo alive")).out == "alive\n"


async def test_the_spawner_gets_neither_key_nor_environment(runtime: BubblewrapRuntime) -> None:
    environment = proc(runtime.spawner_link.pid, "environ")
    assert {part.split("=")[0] for part in environment.split("\0") if part} == {"PATH"}


def left_in(place: Path) -> list[str]:
    """What servers left there but layers for the next one."""
    return [path.name for path in (place / "sandboxes").iterdir() if not path.name.startswith("layers-")]


SERVER = """
    import asyncio, sys
    from managed_e2b.local.runtime.base import Command
    from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime

    async def main():
        runtime = BubblewrapRuntime(sys.argv[1])
        await runtime.start()
        for number in range(3):
            guest = await runtime.create(f"s{number}")
            user = await guest.user("user")
            script = "(setsid sleep 1000 &); exec sleep 1001"
            await guest.spawn(Command(["/bin/bash", "-c", script], {"PATH": "/usr/bin:/bin"}, "/", user))
            print(guest.host_pid, flush=True)
        print(runtime.spawner_link.pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


async def test_sigkill_of_the_server_leaves_no_process_and_the_next_start_no_file(
    runtime: BubblewrapRuntime, data_dir: Path
) -> None:
    place = data_dir / "killed"
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(SERVER),
        str(place),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert server.stdout is not None
    try:
        async with asyncio.timeout(60):
            *guests, spawner = [int(await server.stdout.readline()) for _ in range(4)]
        namespaces = [os.stat(f"/proc/{pid}/ns/pid").st_ino for pid in guests]
        await eventually(lambda: all(len(processes_in(namespace)) >= 3 for namespace in namespaces))
    finally:
        server.kill()
        await server.wait()
    await eventually(lambda: not any(processes_in(namespace) for namespace in namespaces))
    await eventually(lambda: not os.path.exists(f"/proc/{spawner}"))
    left = list(place.rglob("s[0-9]"))
    second = BubblewrapRuntime(place)
    await second.start()
    try:
        assert not any(path.exists() for path in left)
        guest = await second.create("s0")  # it works
        await guest.kill()
    finally:
        await second.close()
    assert left_in(place) == []


async def test_the_death_of_the_spawner_takes_its_sandboxes_and_the_next_one_makes_new_ones(
    data_dir: Path, runtime: BubblewrapRuntime
) -> None:
    second = BubblewrapRuntime(data_dir / "spawner")
    await second.start()
    guest = await second.create("s")
    namespace = pid_namespace(guest)
    process = await Box(guest, second).start("touch ~/file; sleep 1000")
    os.kill(second.spawner_link.pid, signal.SIGKILL)
    new = await second.create("t")  # with its spawner just dead, or not even noticed to be
    async with asyncio.timeout(30):
        await guest.dead.wait()
        assert (await process.wait()).signal == signal.SIGKILL
    process.close()
    await eventually(lambda: processes_in(namespace) == [])  # the host's init reaps them
    with pytest.raises(GuestGone):
        await Box(guest, second).run("true")
    assert (await Box(new, second).run("echo new")).out == "new\n"
    await eventually(lambda: directories(second) == {os.path.basename(new.directory)})
    assert second.live_sandboxes == 1
    await second.close()
    assert left_in(data_dir / "spawner") == []


async def test_a_spawner_that_is_killed_again_and_again_is_given_up(data_dir: Path, runtime: BubblewrapRuntime) -> None:
    second = BubblewrapRuntime(data_dir / "given-up")
    await second.start()
    failed = asyncio.create_task(second.failed())
    for turn in range(MOST + 1):
        assert not failed.done()
        guest = await second.create(f"s{turn}")
        os.kill(second.spawner_link.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await guest.dead.wait()
    async with asyncio.timeout(30):
        assert "died more than" in str(await failed)
    with pytest.raises(RuntimeUnavailable, match="died more than"):
        await second.create("t")
    await second.close()
    third = BubblewrapRuntime(data_dir / "given-up")  # removes what the second could not
    await third.start()
    await third.close()
    assert left_in(data_dir / "given-up") == []


async def test_a_living_servers_directory_is_not_taken_for_abandoned(
    data_dir: Path, runtime: BubblewrapRuntime
) -> None:
    place = data_dir / "shared"
    first, second = BubblewrapRuntime(place), BubblewrapRuntime(place)
    await first.start()
    guest = await first.create("s")
    await second.start()
    assert (await Box(guest, first).run("echo alive")).out == "alive\n"
    await second.close()
    await first.close()
    assert left_in(place) == []


async def test_a_place_that_others_can_write_to_is_refused(tmp_path: Path, runtime: BubblewrapRuntime) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(RuntimeUnavailable, match="only you can write"):
        storage.claim(place, runtime.ids)


async def test_nothing_is_made_where_somebody_elses_link_leads(tmp_path: Path, runtime: BubblewrapRuntime) -> None:
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "place"
    elsewhere.mkdir()
    place.symlink_to(elsewhere)
    with pytest.raises(RuntimeUnavailable, match="only you can write"):
        storage.claim(place, runtime.ids)
    assert list(elsewhere.iterdir()) == []
