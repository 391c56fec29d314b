"""What a sandbox may use is all that it can use; who uses too much hurts itself only."""

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

from managed_e2b.local.runtime.base import GuestError, GuestSpec
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime
from managed_e2b.local.runtime.limits import Limits

from .boxes import Box, eventually, first_output, pid_namespace, processes_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

MB = 1024 * 1024
MakeBox = Callable[..., Awaitable[Box]]


@pytest.fixture
def memory(runtime: BubblewrapRuntime) -> None:
    need(runtime, "memory")


@pytest.fixture
def pids(runtime: BubblewrapRuntime) -> None:
    need(runtime, "pids")


@pytest.fixture
def cpu(runtime: BubblewrapRuntime) -> None:
    need(runtime, "cpu")


def need(runtime: BubblewrapRuntime, controller: str) -> None:
    if controller not in runtime.enforced.controllers:
        pytest.skip(f"this host has no control groups for {controller}: {'; '.join(runtime.enforced.missing)}")


def groups_of(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/cgroup").read_text().splitlines())


def directories(name: str) -> list[Path]:
    """What there is of one server's trees."""
    return list(Path("/sys/fs/cgroup").rglob(name))


async def test_every_process_is_in_the_groups_of_its_sandbox(
    runtime: BubblewrapRuntime, make_box: MakeBox, groups: None
) -> None:
    boxes = [await make_box(), await make_box()]
    seen: list[set[str]] = []
    for box in boxes:
        scripts = ("echo ready; sleep 1000 & (setsid sleep 1000 &) ; wait", "echo ready; sleep 1000")
        processes = [await box.start(script) for script in scripts]
        for process in processes:
            await first_output(process)
        namespace = pid_namespace(box.guest)
        await eventually(lambda namespace=namespace: len(processes_in(namespace)) >= 5)
        (own,) = {frozenset(groups_of(pid)) for pid in processes_in(namespace)}
        assert own != groups_of(os.getpid())
        seen.append({line for line in own if "/me2b-" in line})
        for process in processes:
            process.kill_tree()
            process.close()
    assert len(seen[0]) >= len(runtime.enforced.controllers)
    assert not seen[0] & seen[1]


async def test_no_path_of_the_groups_is_seen_inside(box: Box) -> None:
    result = await box.run("cat /proc/self/cgroup /proc/1/cgroup; ls /sys/fs/cgroup", user="root")
    assert "me2b" not in result.out


async def test_a_memory_hog_is_killed_and_nothing_else(make_box: MakeBox, memory: None) -> None:
    box, other = await make_box(GuestSpec(limits=Limits(memory=100 * MB))), await make_box()
    bystander = await box.start("echo ready; sleep 1000")
    await first_output(bystander)
    result = await box.run("x=$(tr '\\0' x < /dev/zero)")
    assert result.exit.signal == signal.SIGKILL
    assert (await other.run("echo unhurt")).out == "unhurt\n"
    assert (await box.run("echo still")).out == "still\n"
    assert bystander.signal(0)
    bystander.kill_tree()
    bystander.close()


async def test_shared_memory_cannot_take_all_of_it(make_box: MakeBox, memory: None) -> None:
    box = await make_box(GuestSpec(limits=Limits(memory=100 * MB)))
    result = await box.run("head -c 300M /dev/zero > /dev/shm/x; stat -c %s /dev/shm/x")
    assert result.out == f"{50 * MB}\n"
    assert "No space left" in result.err


async def test_files_are_not_memory(make_box: MakeBox, memory: None) -> None:
    box = await make_box(GuestSpec(limits=Limits(memory=64 * MB)))
    result = await box.run("head -c 200M /dev/zero > ~/big && stat -c %s ~/big; rm ~/big")
    assert result.out == f"{200 * MB}\n"


BOMB = "bomb() { bomb & bomb & wait; }; echo ready; bomb"


@pytest.mark.parametrize("most", [60, None])
async def test_a_fork_bomb_hurts_itself_only(make_box: MakeBox, pids: None, most: int | None) -> None:
    limits = Limits(pids=most or 400, memory=512 * MB)
    box, other = await make_box(GuestSpec(limits=limits)), await make_box()
    process = await box.start(f"{{ {BOMB}; }} 2>/dev/null")
    await first_output(process)
    namespace = pid_namespace(box.guest)

    async def full() -> bool:
        try:
            await box.run("true")
        except GuestError:
            return True
        return False

    await eventually(full)
    assert len(processes_in(namespace)) <= limits.pids + 1
    assert (await other.run("echo unhurt")).out == "unhurt\n"
    await box.guest.kill()
    process.close()
    assert processes_in(namespace) == []


async def test_cpu_time_is_held_back(make_box: MakeBox, cpu: None) -> None:
    box = await make_box(GuestSpec(limits=Limits(cpus=0.2)))
    process = await box.start("echo ready; while :; do :; done")
    await first_output(process)
    candidates = [cpu_directory(line) for line in groups_of(box.guest.host_pid)]
    found = [path for path in candidates if path is not None and (path / "cpu.stat").exists()]

    def throttled() -> bool:
        stat = (found[0] / "cpu.stat").read_text().splitlines()
        return any(line.startswith("nr_throttled ") and line.split()[1] != "0" for line in stat)

    await eventually(throttled)
    assert (await box.guest.usage()).cpu_count == 1
    process.kill_tree()
    process.close()


def cpu_directory(line: str) -> Path | None:
    _, names, path = line.split(":", 2)
    if "cpu" in names.split(","):
        return next(top for top in Path("/sys/fs/cgroup").iterdir() if "cpu" in top.name.split(",")) / path.strip("/")
    return None if names else Path("/sys/fs/cgroup") / path.strip("/")


async def test_usage_tells_of_the_limits(make_box: MakeBox, memory: None) -> None:
    box = await make_box(GuestSpec(limits=Limits(memory=200 * MB)))
    before = await box.guest.usage()
    assert before.mem_total == 200 * MB
    await box.run("head -c 20M /dev/zero > ~/file; cat ~/file > /dev/null")
    process = await box.start("x=$(head -c 30M /dev/zero | tr '\\0' x); echo ready; sleep 1000; :")
    await first_output(process)
    after = await box.guest.usage()
    assert after.mem_used >= before.mem_used + 25 * MB
    assert after.mem_cache >= before.mem_cache + 15 * MB
    assert after.mem_used + after.mem_cache <= after.mem_total
    process.kill_tree()
    process.close()


async def test_no_file_is_larger_than_the_disk(make_box: MakeBox) -> None:
    box = await make_box(GuestSpec(limits=Limits(file=5 * MB)))
    result = await box.run("trap '' XFSZ; head -c 6M /dev/zero > ~/big; stat -c %s ~/big; echo fine > ~/small")
    assert result.out == f"{5 * MB}\n"
    assert "too large" in result.err


async def test_processes_are_bounded_without_control_groups_too(make_box: MakeBox) -> None:
    box = await make_box(GuestSpec(limits=Limits(pids=50)))
    assert (await box.run("ulimit -u")).out == "50\n"


async def test_a_command_larger_than_a_spare_takes_runs_all_the_same(box: Box) -> None:
    await box.run("true")
    result = await box.run("echo ${#LARGE}", env={"LARGE": "x" * 100_000})
    assert result.out == "100000\n"


def members(wanted: set[str]) -> set[int]:
    """Who is in these groups."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if groups_of(int(name)) == wanted:
                    found.add(int(name))
            except OSError:
                continue
    return found


async def test_forks_made_ahead_do_not_stay(make_box: MakeBox, groups: None) -> None:
    box, busy = await make_box(), await make_box()
    await box.run("true")

    async def alone() -> bool:
        await busy.run("true")
        return len(members(groups_of(box.guest.host_pid))) == 2  # bubblewrap and the first process

    await eventually(alone)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


async def kill_all(found: Callable[[], set[int]]) -> None:
    """Kill those that are there once some are, and wait for their end."""
    await eventually(lambda: bool(found()))
    killed = found()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in killed))


async def test_forks_made_ahead_that_are_killed_cost_nothing(
    runtime: BubblewrapRuntime, make_box: MakeBox, groups: None
) -> None:
    box = await make_box()
    inside = set(processes_in(pid_namespace(box.guest)))
    bubblewrap = parent_of(box.guest.host_pid)

    def spares() -> set[int]:
        return members(groups_of(box.guest.host_pid)) - inside - {bubblewrap}

    await kill_all(spares)
    assert (await box.run("echo all the same")).out == "all the same\n"

    def seeds() -> set[int]:
        spawner = runtime.spawner_link.pid
        forks = Path(f"/proc/{spawner}/task/{spawner}/children").read_text().split()
        others = {int(pid) for pid in forks} - members(groups_of(box.guest.host_pid))
        return {pid for pid in others if any("/me2b-" in line for line in groups_of(pid))}

    await kill_all(seeds)
    assert (await (await make_box()).run("echo made")).out == "made\n"


@pytest.fixture
def groups(runtime: BubblewrapRuntime) -> None:
    if not runtime.enforced.controllers:
        pytest.skip(f"no control groups: {'; '.join(runtime.enforced.missing)}")


async def test_groups_go_with_their_sandbox_and_trees_with_their_server(data_dir: Path, groups: None) -> None:
    runtime = BubblewrapRuntime(data_dir)
    await runtime.start()
    guest = await runtime.create("one")
    name = next(line for line in groups_of(guest.host_pid) if "/me2b-" in line).split("/me2b-")[1].split("/")[0]
    own = {line.rpartition("/")[2] for line in groups_of(guest.host_pid) if "/me2b-" in line}
    assert len(own) == 1
    assert any(path.joinpath(*own).exists() for path in directories(f"me2b-{name}"))
    await guest.kill()
    assert not any(path.joinpath(*own).exists() for path in directories(f"me2b-{name}"))
    await runtime.close()
    assert directories(f"me2b-{name}") == []


SERVER = """
    import asyncio, sys
    from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime

    async def main():
        runtime = BubblewrapRuntime(sys.argv[1])
        await runtime.start()
        guest = await runtime.create("frozen")
        await guest.freeze()
        print(runtime.spawner_link.pid, guest.host_pid, runtime._ground._group, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


@pytest.mark.parametrize("both", [False, True])
async def test_after_a_crash_nothing_stands_still_and_no_group_stays(
    data_dir: Path, groups: None, freezer: None, both: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the server alone, and of the server and its spawner at once."""
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(SERVER),
        str(data_dir),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert server.stdout is not None
    spawner, inside, group = (await asyncio.wait_for(server.stdout.readline(), 60)).decode().split()
    namespace = os.stat(f"/proc/{inside}/ns/pid").st_ino
    assert processes_in(namespace)
    if both:
        os.kill(int(spawner), signal.SIGSTOP)  # so that it cannot clean up before it is killed
    server.kill()
    await server.wait()
    if both:
        os.kill(int(spawner), signal.SIGKILL)
    await eventually(lambda: not os.path.exists(f"/proc/{spawner}"))
    second = BubblewrapRuntime(data_dir)
    await second.start()
    try:
        await eventually(lambda: not processes_in(namespace))
        assert directories(group) == []
        assert "left by a server that died" in caplog.text
    finally:
        await second.close()
