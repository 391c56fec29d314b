"""What envd writes into a sandbox's log: which programs ran and how they ended, and nothing that may be secret."""

from __future__ import annotations

import pytest
from e2b import CommandExitException
from e2b.envd.process.process_pb import ProcessConfig

from managed_e2b.local.envd.commands import program_of
from managed_e2b.local.logbook import Level


@pytest.mark.parametrize(
    ("cmd", "args", "told"),
    [
        ("/bin/bash", ["-l", "-c", "python3 train.py --key hunter2"], "python3"),
        ("/bin/bash", ["-l", "-c", "  /usr/bin/git clone https://me:hunter2@host/x"], "git"),
        ("/bin/bash", ["-c", "ls\nhunter2"], "ls"),
        ("sh", ["-c", "KEY=hunter2 ./run"], "a shell command"),
        ("/bin/bash", ["-l", "-c", "'hunter2'"], "a shell command"),
        ("/bin/bash", ["-l", "-c", "$(hunter2)"], "a shell command"),
        ("/bin/bash", ["-l", "-c", "h" * 65], "a shell command"),
        ("/bin/bash", ["-l", "-c", ""], "a shell command"),
        ("/bin/bash", ["-i", "-l"], "bash"),
        ("/usr/bin/env", ["KEY=hunter2", "x"], "env"),
        ("python3", ["-c", "hunter2"], "python3"),
    ],
)
def test_of_a_command_only_the_program_is_told(cmd, args, told):
    assert program_of(ProcessConfig(cmd=cmd, args=args)) == told


async def test_starts_and_ends_are_written_down(served, sandbox, until):
    logbook = served.envd._ctx.logbook
    await sandbox.commands.run("echo hunter2", envs={"KEY": "hunter2"})
    with pytest.raises(CommandExitException):
        await sandbox.commands.run("exit 3")
    handle = await sandbox.commands.run("sleep 60", background=True)
    await handle.kill()
    await until(lambda: len(list(logbook)) == 6)
    lines = list(logbook)
    assert [(line.fields["event_type"], line.fields["program"], line.level) for line in lines] == [
        ("process_started", "echo", Level.INFO),
        ("process_ended", "echo", Level.INFO),
        ("process_started", "exit", Level.INFO),
        ("process_ended", "exit", Level.WARN),
        ("process_started", "sleep", Level.INFO),
        ("process_ended", "sleep", Level.WARN),
    ]
    assert (lines[3].fields["exit_code"], lines[5].fields["signal"]) == ("3", "9")
    assert lines[4].message == f"Process {handle.pid} started: sleep"
    assert (lines[0].logger, lines[0].fields["user"]) == ("process", "user")
    assert "hunter2" not in repr(lines)
