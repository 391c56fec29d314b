"""Use E2B's own command line, the npm package @e2b/cli, against `me2b serve`: each command once, and what it shows.

    python tools/cli_suite.py [--cli 2.19.0]

E2B has no suite for it that would run here, so the steps are our own: one sandbox from its begin to
its end, a terminal in it, snapshots, and a template that is built, listed, used and deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from stand_ins import mirror
from suite import KEY, Group, Test, clean, first_line, npm_environment, report, server

CLI = "2.19.0"
COMMAND_SECONDS = 120
END_SECONDS = 30
"""In which a sandbox whose terminal has ended must be gone: the command line gives it one more second."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
DOCKERFILE = """FROM ubuntu:22.04
WORKDIR /srv
COPY greeting.txt greeting.txt
RUN cat greeting.txt > copied.txt
ENV GREETED=yes
"""


class Cli:
    """The installed program, with what points it at the server."""

    def __init__(self, program: Path, client: Mapping[str, str], home: Path) -> None:
        self._program = program
        # A home of its own: nobody's login is used, and the greetings of a first run are not kept for the next.
        self._environment = clean() | dict(client) | {"HOME": str(home), "NO_COLOR": "1", "CI": "1"}

    def run(self, *arguments: str, within: Path | None = None, given: str | None = None) -> str:
        """What it says. Raises AssertionError, with that, unless it ends well."""
        done = subprocess.run(
            [self._program, *arguments],
            cwd=within,
            env=self._environment,
            input=given if given is not None else "",
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        said = _ESCAPES.sub("", done.stdout + done.stderr)
        assert done.returncode == 0, f"e2b {' '.join(arguments)} ended with {done.returncode}: {said.strip()}"
        return said

    def read(self, *arguments: str) -> object:
        """The JSON that it prints."""
        said = self.run(*arguments, "--format", "json")
        return json.loads(said[min(place for place in (said.find("["), said.find("{")) if place >= 0) :])

    def lines(self, *arguments: str) -> list[dict[str, object]]:
        """The JSON objects that it prints, one a line."""
        said = self.run(*arguments, "--format", "json")
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    def terminal(self, *arguments: str, typed: Sequence[tuple[str, str]]) -> str:
        """All that it shows on a terminal of its own, where each text is typed once what comes before it is seen."""
        shown = ""
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(self._program, [str(self._program), *arguments], self._environment)
        deadline = time.monotonic() + COMMAND_SECONDS
        waiting = list(typed)
        try:
            while True:
                left = deadline - time.monotonic()
                assert left > 0, f"nothing more came: {shown!r}"
                if not select.select([terminal], [], [], left)[0]:
                    continue
                try:
                    data = os.read(terminal, 65536)
                except OSError:  # EIO: its other side is closed
                    break
                if not data:
                    break
                shown += data.decode(errors="replace")
                if waiting and waiting[0][0] in _ESCAPES.sub("", shown):
                    os.write(terminal, waiting.pop(0)[1].encode())
        finally:
            os.close(terminal)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"it ended with {status}: {shown!r}"
        return _ESCAPES.sub("", shown)


class Steps:
    """The steps, in order; each may use what one before it made. An AssertionError says what was not as expected."""

    def __init__(self, cli: Cli, place: Path) -> None:
        self._cli = cli
        self._place = place
        self._id = ""
        self._snapshot = ""

    def all(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "sandbox create --detach", self.create
        yield "sandbox list", self.list
        yield "sandbox info", self.info
        yield "sandbox exec", self.execute
        yield "sandbox exec, with input and failing", self.execute_more
        yield "sandbox connect, on a terminal", self.connect
        yield "sandbox create, on a terminal", self.create_on_terminal
        yield "sandbox metrics", self.metrics
        yield "sandbox logs", self.logs
        yield "sandbox snapshot create, list, delete", self.snapshots
        yield "sandbox pause, resume", self.pause
        yield "sandbox kill", self.kill
        yield "sandbox kill --all", self.kill_all
        yield "template init", self.init
        yield "template create", self.build
        yield "template list", self.list_templates
        yield "sandbox create, of the template", self.use_template
        yield "template publish, unpublish", self.publish
        yield "template delete", self.delete_template

    def _create(self, *arguments: str) -> str:
        said = self._cli.run("sandbox", "create", "--detach", *arguments)
        found = re.search(r"\b(i[a-z0-9]{20})\b", said)
        assert found is not None, said
        return found[1]

    def _listed(self, *arguments: str) -> list[str]:
        sandboxes = self._cli.read("sandbox", "list", *arguments)
        assert isinstance(sandboxes, list)
        return [one["sandboxId"] for one in sandboxes]

    def create(self) -> None:
        self._id = self._create("--timeout", "600")

    def list(self) -> None:
        assert self._id in self._listed(), self._listed()
        assert self._id in self._cli.run("sandbox", "list"), "not in the table"
        assert self._listed("--metadata", "no=such") == []

    def info(self) -> None:
        told = self._cli.read("sandbox", "info", self._id)
        assert isinstance(told, dict)
        assert (told["sandboxId"], told["state"]) == (self._id, "running"), told

    def execute(self) -> None:
        said = self._cli.run("sandbox", "exec", "-e", "WHO=me", "-c", "/tmp", self._id, "echo $WHO in $PWD")
        assert "me in /tmp" in said, said

    def execute_more(self) -> None:
        assert "READ" in self._cli.run("sandbox", "exec", self._id, "tr a-z A-Z", given="read\n")
        with contextlib.suppress(AssertionError):
            self._cli.run("sandbox", "exec", self._id, "exit 3")
            raise RuntimeError("a command that failed looks as if it had not")

    def connect(self) -> None:
        shown = self._cli.terminal(
            "sandbox", "connect", self._id, typed=[("$ ", "echo is $((6*7)) $(tty)\n"), ("is 42", "exit\n")]
        )
        assert "is 42 /dev/pts/" in shown, shown

    def create_on_terminal(self) -> None:
        before = set(self._listed())
        shown = self._cli.terminal("sandbox", "create", typed=[("$ ", "id -un\n"), ("user", "exit\n")])
        assert "user" in shown, shown
        deadline = time.monotonic() + END_SECONDS
        while set(self._listed()) != before:
            assert time.monotonic() < deadline, "it outlives its terminal"
            time.sleep(0.5)

    def metrics(self) -> None:
        samples = self._cli.lines("sandbox", "metrics", self._id)
        assert samples, "no sample"
        assert "CPU" in self._cli.run("sandbox", "metrics", self._id).upper()

    def logs(self) -> None:
        assert self._cli.lines("sandbox", "logs", self._id), "no entry"

    def snapshots(self) -> None:
        self._cli.run("sandbox", "snapshot", "create", "--name", "cli-kept", self._id)
        listed = self._cli.read("sandbox", "snapshot", "list", self._id)
        assert isinstance(listed, list)
        assert len(listed) == 1, listed
        identifier = listed[0]["snapshotId"]
        self._cli.run("sandbox", "snapshot", "delete", identifier)
        assert self._cli.read("sandbox", "snapshot", "list", self._id) == []

    def pause(self) -> None:
        self._cli.run("sandbox", "pause", self._id)
        assert self._id in self._listed("--state", "paused")
        self._cli.run("sandbox", "resume", self._id)
        assert self._id in self._listed("--state", "running")

    def kill(self) -> None:
        self._cli.run("sandbox", "kill", self._id)
        assert self._id not in self._listed()

    def kill_all(self) -> None:
        self._create()
        self._create()
        self._cli.run("sandbox", "kill", "--all")
        assert self._listed() == []

    def init(self) -> None:
        self._cli.run("template", "init", "--name", "cli-made", "--language", "python-sync", "--path", str(self._place))
        assert (self._place / "cli-made" / "template.py").is_file(), sorted(self._place.iterdir())

    def build(self) -> None:
        source = self._place / "source"
        source.mkdir()
        (source / "Dockerfile").write_text(DOCKERFILE)
        (source / "greeting.txt").write_text("hello\n")
        self._cli.run("template", "create", "cli-built", "--cpu-count", "1", "--memory-mb", "512", within=source)

    def list_templates(self) -> None:
        templates = self._cli.read("template", "list")
        assert isinstance(templates, list)
        assert any("cli-built" in str(one) for one in templates), templates

    def use_template(self) -> None:
        sandbox = self._create("cli-built")
        said = self._cli.run("sandbox", "exec", sandbox, "cat /srv/copied.txt; echo $GREETED")
        assert "hello\nyes" in said, said
        self._cli.run("sandbox", "kill", sandbox)

    def publish(self) -> None:
        self._cli.run("template", "publish", "--yes", "cli-built")
        self._cli.run("template", "unpublish", "--yes", "cli-built")

    def delete_template(self) -> None:
        self._cli.run("template", "delete", "--yes", "cli-built")
        templates = self._cli.read("template", "list")
        assert "cli-built" not in json.dumps(templates), templates


def install(cli: str = CLI) -> Path:
    """The program of this release; installed once."""
    return npm_environment("cli", {"@e2b/cli": cli}) / ".bin" / "e2b"


def run(cli: str = CLI) -> list[Group]:
    """All steps against a server of their own; one that fails does not stop the next."""
    program = install(cli)
    groups: dict[str, list[Test]] = {}
    with tempfile.TemporaryDirectory(prefix="me2b-cli-") as temporary:
        home, place = Path(temporary) / "home", Path(temporary) / "place"
        home.mkdir()
        place.mkdir()
        with mirror() as arguments, server(*arguments) as client:
            for name, step in Steps(Cli(program, client | {"E2B_API_KEY": KEY}, home), place).all():
                try:
                    step()
                    test = Test(f"e2b {name}", "passed")
                except (AssertionError, RuntimeError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
                    test = Test(f"e2b {name}", "failed", first_line(str(error)) or repr(error))
                groups.setdefault(name.split()[0], []).append(test)
    return [Group(name, tests) for name, tests in groups.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cli", default=CLI, help="the version of the npm package @e2b/cli")
    arguments = parser.parse_args()
    return 1 if report(f"E2B's command line, @e2b/cli {arguments.cli}", run(arguments.cli)) else 0


if __name__ == "__main__":
    sys.exit(main())
