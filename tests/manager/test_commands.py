"""Commands and files: the true result, as it was, and nothing of a command left after its timeout."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from managed_e2b import (
    AuthenticationError,
    BackendError,
    CommandError,
    CommandTimeoutError,
    StageError,
    ValidationError,
)

from .conftest import Face, settle


@pytest.fixture
async def handle(face: Face) -> AsyncIterator[Any]:
    async with face.entered(face.open().acquire()) as handle:
        yield handle


async def test_a_command_that_fails_is_a_result(handle: Any) -> None:
    result = await settle(handle.run("echo out; echo err >&2; exit 3"))
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert (result.ok, result.timed_out) == (False, False)
    assert result.duration > 0


async def test_check_raises_with_the_result(handle: Any) -> None:
    with pytest.raises(CommandError, match=r"exited with 3\nwhat went wrong") as caught:
        await settle(handle.run("echo what went wrong >&2; exit 3", check=True))
    assert caught.value.result.exit_code == 3
    assert (await settle(handle.run("true", check=True))).ok


async def test_a_command_killed_by_a_signal_is_a_result(handle: Any) -> None:
    result = await settle(handle.run("echo before; kill -9 $$"))
    assert (result.stdout, result.exit_code, result.timed_out) == ("before\n", -1, False)


async def test_a_command_past_its_timeout_is_killed_with_all_its_children(handle: Any) -> None:
    command = "echo before; sleep 1001 & (setsid sleep 1002 &); nohup sh -c 'sleep 1003; true' >/dev/null & sleep 1004"
    result = await settle(handle.run(command, timeout=1))
    assert (result.stdout, result.exit_code, result.timed_out) == ("before\n", -1, True)
    left = await settle(handle.run("pgrep -af 'sleep 100[1-4]' | grep -v pgrep"))
    assert left.stdout == ""


async def test_root_children_of_a_command_past_its_timeout_are_killed_too(handle: Any) -> None:
    result = await settle(handle.run("sudo env -i /bin/sleep 1005 & sudo sleep 1006", timeout=1))
    assert result.timed_out
    assert (await settle(handle.run("pgrep -af 'sleep 100[56]' | grep -v pgrep", user="root"))).stdout == ""


async def test_a_timeout_kills_only_its_own_command(handle: Any) -> None:
    await settle(handle.run("nohup sleep 2001 >/dev/null 2>&1 &"))
    await settle(handle.run("sleep 2002", timeout=1))
    assert "sleep 2001" in (await settle(handle.run("pgrep -af 'sleep 200[12]' | grep -v pgrep"))).stdout


async def test_check_tells_a_timeout_apart(handle: Any) -> None:
    with pytest.raises(CommandTimeoutError, match=r"ran past its timeout of 0\.5 s") as caught:
        await settle(handle.run("sleep 100", timeout=0.5, check=True))
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.result.timed_out


async def test_output_survives_as_bytes(handle: Any) -> None:
    result = await settle(handle.run(r"printf '\xff\xfe\x00\x80 \xc3\xa4'; printf '\xe2\x82' >&2"))
    assert result.stdout_bytes == b"\xff\xfe\x00\x80 \xc3\xa4"
    assert result.stderr_bytes == b"\xe2\x82"
    assert result.stdout.endswith(" ä")
    assert result.stderr == "\ufffd"


async def test_every_byte_of_much_output_arrives(handle: Any) -> None:
    result = await settle(handle.run("head -c 3000000 /dev/zero; head -c 3000000 /dev/zero | tr '\\0' x >&2"))
    assert result.stdout_bytes == bytes(3_000_000)
    assert result.stderr_bytes == b"x" * 3_000_000


async def test_callbacks_are_told_whole_characters_as_they_come(handle: Any) -> None:
    out: list[str] = []
    err: list[str] = []
    script = r"printf '\xe2\x82'; sleep 0.2; printf '\xac\n'; echo e >&2"
    await settle(handle.run(script, on_stdout=out.append, on_stderr=err.append))
    assert ("".join(out), "".join(err)) == ("€\n", "e\n")
    assert "\ufffd" not in "".join(out)


@pytest.mark.parametrize("kind", [LookupError, Exception])
async def test_an_exception_of_a_callback_comes_out_and_ends_the_command(handle: Any, kind: type[Exception]) -> None:
    error = kind("mine")

    def callback(_text: str) -> None:
        raise error

    with pytest.raises(kind) as caught:
        await settle(handle.run("echo x; exec sleep 4321", on_stdout=callback))
    assert caught.value is error
    assert not (await settle(handle.run("pgrep -f '[s]leep 4321'"))).ok
    assert (await settle(handle.run("echo still here"))).ok


async def test_environment_directory_and_user(handle: Any) -> None:
    result = await settle(handle.run('echo "$A|$PWD|$(id -un)"', envs={"A": "b c"}, cwd="/tmp", user="root"))
    assert result.stdout == "b c|/tmp|root\n"


@pytest.mark.parametrize(
    "stdin", ["text ä", b"\x00\xff bytes", "", "x" * 2_000_000], ids=["str", "bytes", "empty", "much"]
)
async def test_stdin(handle: Any, stdin: str | bytes) -> None:
    result = await settle(handle.run("cat", stdin=stdin))
    assert result.stdout_bytes == (stdin.encode() if isinstance(stdin, str) else stdin)
    assert (await settle(handle.run("ls -A /tmp"))).stdout == ""


async def test_a_user_that_is_not_there_is_not_a_refused_key(handle: Any) -> None:
    with pytest.raises(BackendError, match="nosuchuser") as caught:
        await settle(handle.run("true", user="nosuchuser"))
    assert not isinstance(caught.value, AuthenticationError)


async def test_without_stdin_a_command_reads_an_end(handle: Any) -> None:
    assert (await settle(handle.run("cat; echo done", timeout=10))).stdout == "done\n"


@pytest.mark.parametrize(
    ("command", "options"), [("", {}), ("a\0b", {}), (["ls"], {}), ("true", {"timeout": 0}), ("true", {"timeout": -1})]
)
async def test_what_cannot_be_run_is_refused(handle: Any, command: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        await settle(handle.run(command, **options))


async def test_files_go_in_and_come_out_as_they_are(handle: Any, tmp_path: Path) -> None:
    local = tmp_path / "local.bin"
    local.write_bytes(bytes(range(256)))
    files = {"a.txt": "tëxt", "deep/er/b.bin": b"\x00\xff", "c.bin": local, "/tmp/absolute": b"x"}
    await settle(handle.stage_in(files))
    found = await settle(handle.stage_out(files))
    assert found == {
        "a.txt": "tëxt".encode(),
        "deep/er/b.bin": b"\x00\xff",
        "c.bin": local.read_bytes(),
        "/tmp/absolute": b"x",
    }
    assert (await settle(handle.run("cat /task/a.txt"))).stdout == "tëxt"


async def test_a_script_runs_where_the_files_are_with_arguments_no_shell_touches(handle: Any) -> None:
    await settle(handle.stage_in({"show.py": "import sys, os; print(sys.argv[1:], os.getcwd())"}))
    arguments = ["--fast", "two words", "$HOME", "it's", 'q"q', "*"]
    result = await settle(handle.run_script("show.py", args=arguments))
    assert result.stdout == f"{arguments!r} /task\n"


@pytest.mark.parametrize(
    ("name", "source"), [("run.sh", "echo $BASH_VERSION $1"), ("tool", "#!/bin/sh\necho by its first line $1\n")]
)
async def test_the_interpreter_is_found(handle: Any, name: str, source: str) -> None:
    await settle(handle.stage_in({name: source}))
    result = await settle(handle.run_script(name, args=["x"]))
    assert (result.exit_code, result.stdout.split()[-1]) == (0, "x")


async def test_a_script_that_is_not_there_is_a_result(handle: Any) -> None:
    result = await settle(handle.run_script("none.py"))
    assert result.exit_code != 0


@pytest.mark.parametrize("face", ["async"], indirect=True)
async def test_a_slow_file_is_read_beside_the_event_loop(handle: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # as slow as its writer, which is this loop

    def opened() -> int | None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads it yet
                raise
            return None

    staging = asyncio.create_task(handle.stage_in({"slow.txt": pipe}))
    async with asyncio.timeout(20):
        while (writer := opened()) is None:
            assert not staging.done()
            await asyncio.to_thread(time.sleep, 0.01)
    os.write(writer, b"slow, and whole")
    os.close(writer)
    await staging
    assert await handle.stage_out(["slow.txt"]) == {"slow.txt": b"slow, and whole"}


async def test_a_file_that_is_not_there_is_named(handle: Any, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"'none\.txt'") as caught:
        await settle(handle.stage_out(["none.txt"]))
    assert caught.value.path == "none.txt"
    with pytest.raises(StageError, match="'x'"):
        await settle(handle.stage_in({"x": tmp_path / "none"}))


@pytest.mark.parametrize("name", ["../x", "a/../../b", "", "a\0b", "."])
async def test_paths_that_leave_the_task_are_refused_before_anything_is_written(handle: Any, name: str) -> None:
    with pytest.raises(ValidationError):
        await settle(handle.stage_in({"fine.txt": "x", name: "y"}))
    with pytest.raises(ValidationError):
        await settle(handle.stage_out([name]))
    assert (await settle(handle.run("test -e /task/fine.txt"))).exit_code == 1


async def test_one_string_is_not_a_list_of_paths(handle: Any) -> None:
    with pytest.raises(ValidationError, match="give a list"):
        await settle(handle.stage_out("abc"))
