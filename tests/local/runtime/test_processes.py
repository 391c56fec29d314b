"""Commands in sandboxes: how they start, end, are killed, and what remains of them: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from managed_e2b.local.runtime.base import Command, Exit, GuestError, GuestGone, PtySize

from .boxes import Box, eventually, file_text, first_output

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_exit_codes_and_signals(box: Box) -> None:
    assert (await box.run("exit 0")).exit == Exit(0, None)
    assert (await box.run("exit 7")).exit == Exit(7, None)
    assert (await box.run("kill -TERM $$")).exit == Exit(None, signal.SIGTERM)


async def test_output_is_apart_and_whole(box: Box) -> None:
    result = await box.run("head -c 300000 /dev/zero | tr '\\0' x; echo wrong >&2")
    assert result.out == "x" * 300000
    assert result.err == "wrong\n"


async def test_stdin_reaches_the_process_and_ends(box: Box) -> None:
    process = await box.start("cat; echo end", stdin=True)
    os.write(process.stdin_fd, b"hello\n")
    process.close_stdin()
    assert await process.wait() == Exit(0, None)
    assert os.read(process.stdout_fd, 100) == b"hello\nend\n"
    process.close()


async def test_without_stdin_it_is_empty(box: Box) -> None:
    assert (await box.run("wc -c")).out.strip() == "0"


async def test_the_program_is_looked_up_on_the_commands_own_path(box: Box) -> None:
    user = await box.guest.user("user")
    await box.run("mkdir /tmp/bin && printf '#!/bin/sh\\necho mine\\n' > /tmp/bin/tool && chmod +x /tmp/bin/tool")
    process = await box.guest.spawn(Command(["tool"], {"PATH": "/tmp/bin:/usr/bin:/bin"}, "/", user))
    assert await process.wait() == Exit(0, None)
    assert os.read(process.stdout_fd, 100) == b"mine\n"
    process.close()


@pytest.mark.parametrize(
    ("argv", "cwd", "number"),
    [
        (["/no/such/program"], "/", errno.ENOENT),
        (["no-such-program"], "/", errno.ENOENT),
        (["/etc/passwd"], "/", errno.EACCES),
        (["/bin/true"], "/no/such/directory", errno.ENOENT),
        (["/bin/true"], "/etc/passwd", errno.ENOTDIR),
        (["/bin/true", "x" * 200_000], "/", errno.E2BIG),
        ([], "/", errno.EINVAL),
        (["/bin/true"], "relative", errno.EINVAL),
        (["/bin/true", "nul\0"], "/", errno.EINVAL),
    ],
)
async def test_a_command_that_cannot_start_says_why(box: Box, argv: list[str], cwd: str, number: int) -> None:
    user = await box.guest.user("user")
    with pytest.raises(GuestError) as caught:
        await box.guest.spawn(Command(argv, {"PATH": "/usr/bin"}, cwd, user))
    assert caught.value.errno == number


async def test_arguments_that_are_not_utf8_arrive_as_they_are(box: Box) -> None:
    user = await box.guest.user("user")
    argv = ["/usr/bin/printf", "%s", os.fsdecode(b"caf\xe9 \xff")]
    process = await box.guest.spawn(Command(argv, {}, "/", user))
    await process.wait()
    assert os.read(process.stdout_fd, 100) == b"caf\xe9 \xff"
    process.close()


async def test_standard_descriptors_can_be_opened_by_name(box: Box) -> None:
    assert (await box.run("echo out > /dev/stdout; echo err > /dev/stderr")).out == "out\n"


async def test_nothing_is_inherited_but_the_standard_descriptors(box: Box) -> None:
    result = await box.run("ls /proc/self/fd; ulimit -c; umask; grep -E 'Sig(Blk|Ign)' /proc/self/status")
    lines = result.out.split("\n")
    assert lines[:4] == ["0", "1", "2", "3"]  # 3 is the directory that ls reads
    assert lines[4:6] == ["0", "0022"]
    libc_internal = 1 << 31 | 1 << 32  # posix_spawn ignores these two real-time signals, which are libc's own
    assert [int(line.split()[1], 16) & ~libc_internal for line in lines[6:8]] == [0, 0]


async def test_a_terminal(box: Box) -> None:
    process = await box.start("tty; stty size; read line; stty size; echo $line", pty=PtySize(cols=100, rows=30))
    loop = asyncio.get_running_loop()
    text = b""

    async def until(wanted: bytes) -> None:
        nonlocal text
        async with asyncio.timeout(30):
            while wanted not in text:
                ready = loop.create_future()
                loop.add_reader(process.pty_fd, ready.set_result, None)
                await ready
                loop.remove_reader(process.pty_fd)
                text += os.read(process.pty_fd, 4096)

    await until(b"30 100\r\n")
    assert text.startswith(b"/dev/pts/")
    process.resize(PtySize(cols=120, rows=40))
    os.write(process.pty_fd, b"typed\n")
    await until(b"40 120\r\ntyped\r\n")
    assert await process.wait() == Exit(0, None)
    process.close()


async def test_a_signal_reaches_the_process_or_its_group(box: Box) -> None:
    process = await box.start("trap 'echo got; exit 3' TERM; echo ready; while :; do sleep 0.01; done")
    await first_output(process)
    assert process.signal(signal.SIGTERM)
    assert await process.wait() == Exit(3, None)
    assert not process.signal(signal.SIGTERM)
    process.close()
    group = await box.start("(trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; done) & wait $!; exit 5")
    await first_output(group)
    assert group.signal(signal.SIGTERM, group=True)
    assert (await group.wait()).signal == signal.SIGTERM
    group.close()


TREE = """
setsid sh -c 'setsid sleep 1000 & setsid sh -c "sleep 1001 & sleep 1002" & sleep 1003' &
(sleep 1004 &)
(setsid sh -c 'sleep 1005 & exit' &)
echo ready
exec sleep 1006
"""


async def test_kill_tree_reaches_every_descendant_and_no_one_else(box: Box) -> None:
    """Those that left the session and whose parents have ended too."""
    other = await box.start("(setsid sleep 2000 &); echo ready; exec sleep 2001")
    await first_output(other)
    process = await box.start(TREE)
    await first_output(process)
    await box.prints("pgrep -fc '^sleep 100'", "7")
    process.kill_tree()
    assert await process.wait() == Exit(None, signal.SIGKILL)
    await box.prints("pgrep -fc '^sleep 100'", "0")
    assert (await box.run("pgrep -fc '^sleep 200'")).out.strip() == "2"
    process.close()
    other.kill_tree()
    other.close()


async def test_kill_tree_reaches_what_the_command_left_behind(box: Box) -> None:
    process = await box.start("(setsid sleep 3000 >/dev/null 2>&1 &)")
    assert await process.wait() == Exit(0, None)
    await box.prints("pgrep -fc '^sleep 3000'", "1")
    process.kill_tree()
    await box.prints("pgrep -fc '^sleep 3000'", "0")
    process.close()


async def test_kill_tree_catches_what_forks_all_the_time(box: Box) -> None:
    script = "f() { while :; do (setsid sh -c 'sleep 4000' &) ; sleep 0.005; done; }; f & f & echo ready; wait"
    process = await box.start(script)
    await first_output(process)
    process.kill_tree()
    await process.wait()
    await box.prints("pgrep -fc 'sleep 4000'", "0")
    process.close()


async def test_orphans_are_reaped(box: Box) -> None:
    await box.run("for i in $(seq 20); do (sh -c 'true &' &); done")
    await box.prints("ps -eo stat= | grep -c '^Z'", "0")


async def test_many_at_once(box: Box) -> None:
    results = await asyncio.gather(*(box.run(f"echo {number}; exit {number % 50}") for number in range(60)))
    assert [result.out for result in results] == [f"{number}\n" for number in range(60)]
    assert [result.code for result in results] == [number % 50 for number in range(60)]


async def test_no_descriptor_and_no_process_is_leaked(box: Box) -> None:
    spawner = box.runtime.spawner_link.pid

    def count() -> tuple[int, int, int]:
        children = Path(f"/proc/{spawner}/task/{spawner}/children").read_text().split()
        return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{spawner}/fd")), len(children)

    await box.run("true")
    before = count()
    for _ in range(20):
        await asyncio.gather(*(box.run("true") for _ in range(10)))
    for _ in range(5):
        with pytest.raises(GuestError):
            await box.run("true", cwd="/nowhere")
    await box.guest.usage()
    await eventually(lambda: count() == before)


async def test_a_spawn_that_is_cancelled_leaves_no_process(box: Box) -> None:
    user = await box.guest.user("user")
    for _ in range(20):
        task = asyncio.create_task(box.guest.spawn(Command(["/bin/sleep", "5000"], {}, "/", user)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await box.prints("pgrep -fc 'sleep 5000'", "0")


async def test_freeze_and_thaw(box: Box) -> None:
    process = await box.start("date +%s%N > /tmp/tick; echo ready; while :; do date +%s%N > /tmp/tick; done")
    await first_output(process)
    await box.guest.freeze()
    # The file agent is no process of the sandbox.
    first = await file_text(box, "/tmp/tick")
    assert await file_text(box, "/tmp/tick") == first
    await box.guest.thaw()

    async def moved() -> bool:
        return await file_text(box, "/tmp/tick") != first

    await eventually(moved)
    process.kill_tree()
    process.close()


async def test_what_is_stopped_by_its_own_shell_stays_so(box: Box, freezer: None) -> None:
    process = await box.start("echo ready; kill -STOP $BASHPID; echo went on")
    await first_output(process)
    await box.guest.freeze()
    await box.guest.thaw()
    stopped = await box.run(f"cut -d' ' -f3 /proc/{process.pid}/stat")
    assert stopped.out == "T\n"
    process.kill_tree()
    process.close()


async def test_a_frozen_sandbox_is_killed_with_a_command_on_its_way(make_box: Callable[..., Awaitable[Box]]) -> None:
    box = await make_box()
    process = await box.start("while :; do :; done")
    await box.guest.freeze()
    waiting = asyncio.create_task(box.run("echo late"))
    await asyncio.sleep(0)
    await box.guest.kill()
    process.close()
    with contextlib.suppress(GuestGone):  # where pauses are signals, it may have been quick
        await waiting


async def test_usage_counts_memory_cpu_and_disk(box: Box) -> None:
    before = await box.guest.usage()
    script = "head -c 5000000 /dev/urandom > /home/user/big; echo ready; x=$(head -c 8000000 /dev/zero | tr '\\0' x); "
    process = await box.start(script + "while :; do :; done")
    await first_output(process)
    usage = await box.guest.usage()
    assert usage.disk_used >= before.disk_used + 5_000_000
    assert usage.disk_total > usage.disk_used
    assert 0 < usage.mem_used < usage.mem_total

    async def busy() -> bool:
        return (await box.guest.usage()).cpu_used_pct > 0

    await eventually(busy)
    process.kill_tree()
    process.close()


async def test_a_command_leads_neither_its_session_nor_its_group(box: Box) -> None:
    """So `setsid program` is the program, and does not leave it behind: its exit status is the program's."""
    result = await box.run("exec setsid sh -c 'echo in it; exit 7'")
    assert (result.out, result.code) == ("in it\n", 7)


async def test_a_command_that_stops_its_group_at_once_has_started(box: Box) -> None:
    """What starts it is in that group for a moment, and must not stay stopped with it."""
    stops = Command(["/usr/bin/python3", "-ISc", "import os; os.kill(0, 19)"], {}, "/", await box.guest.user("user"))
    for _ in range(5):
        stopped = await box.guest.spawn(stops)
        stopped.kill_tree()
        assert (await stopped.wait()).signal == signal.SIGKILL
        stopped.close()


SUDO = [
    ("sudo id -u", "0\n", 0),
    ("sudo -u user id -un", "user\n", 0),
    ("sudo -n -H sh -c 'echo $HOME'", "/root\n", 0),
    ("sudo -- sh -c 'exit 9'", "", 9),
    ("sudo A=1 B='two words' sh -c 'echo $A-$B'", "1-two words\n", 0),
    ("X=kept sudo -E sh -c 'echo $X'", "kept\n", 0),
    ("X=lost sudo sh -c 'echo $X'", "\n", 0),
    ("sudo -i pwd", "/root\n", 0),
    ("sudo -s echo hi", "hi\n", 0),
    ("sudo -uroot echo 'a  b' \"c'd\"", "a  b c'd\n", 0),
    ("sudo sh -c 'echo $SUDO_USER'", "user\n", 0),
    ("sudo", "", 1),
    ("sudo -Z x", "", 1),
    ("sudo -u nobodyatall true", "", 1),
]


@pytest.mark.parametrize(("script", "out", "code"), SUDO)
async def test_sudo(box: Box, script: str, out: str, code: int) -> None:
    result = await box.run(script)
    if "not found" in result.err:
        pytest.skip("this host has no setpriv, of which sudo is made")
    assert (result.out, result.code) == (out, code)


async def test_sudo_writes_where_user_cannot(box: Box, two_ids: None) -> None:
    result = await box.run(
        "touch /usr/local/bin/tool /etc/tool; sudo touch /usr/local/bin/tool /etc/tool && ls /etc/tool"
    )
    assert result.out == "/etc/tool\n"
    assert "Permission denied" in result.err


async def test_root_inside_makes_and_removes_accounts(box: Box, two_ids: None) -> None:
    if (await box.run("command -v adduser")).code:
        pytest.skip("this host has no adduser")
    made = await box.run(
        "adduser --gecos 'Some One' --disabled-password some-one && su some-one -c 'id -un; echo ~'", user="root"
    )
    assert (made.out.splitlines()[-2:], made.code) == (["some-one", "/home/some-one"], 0), made.err
    assert (await box.run("userdel -r some-one && ! id some-one", user="root")).code == 0


async def test_the_account(box: Box) -> None:
    result = await box.run(
        "id -un; echo ~; cd; pwd; touch x; stat -c '%U %G %a' x; stat -c '%U %a' ~", cwd="/home/user"
    )
    assert result.out.split("\n")[:5] == ["user", "/home/user", "/home/user", "user user 644", "user 755"]


async def test_the_programs_that_users_expect(box: Box) -> None:
    result = await box.run("bash -lc 'python --version && python3 -c \"print(6 * 7)\" && git --version && echo $PATH'")
    if "not found" in result.err:
        pytest.skip(f"this host lacks one of them: {result.err.strip()}")
    assert "42" in result.out
    assert "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" in result.out


async def test_unknown_users_are_a_key_error(box: Box) -> None:
    with pytest.raises(KeyError):
        await box.guest.user("nobodyatall")


async def test_users_made_inside_are_found(box: Box, two_ids: None) -> None:
    await box.run("echo 'ann:x:1001:1001::/home/ann:/bin/sh' >> /etc/passwd", user="root")
    assert (await box.run("id -u", user="ann")).out == "1001\n"


async def test_a_dead_sandbox_says_so(make_box: Callable[[], Awaitable[Box]]) -> None:
    box = await make_box()
    user = await box.guest.user("user")
    process = await box.start("sleep 6000")
    await box.guest.kill()
    assert await process.wait() == Exit(None, signal.SIGKILL)
    process.kill_tree()
    process.close()
    for attempt in (
        box.guest.spawn(Command(["/bin/true"], {}, "/", user)),
        box.guest.call("stat", path="/"),
        box.guest.user("user"),
        box.guest.connect(80),
        box.guest.freeze(),
        box.guest.usage(),
    ):
        with pytest.raises(GuestGone):
            await attempt
