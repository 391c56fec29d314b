"""What the conformance scripts share: the clone of E2B's repository, a server of their own, results and their table.

None of E2B's code is kept here: its tests are taken from a clone of the public repository and run unmodified, with the
released packages. `E2B_REPO` names the clone (a bare one will do):

    git clone --bare https://github.com/e2b-dev/E2B && export E2B_REPO=$PWD/E2B.git

`E2B_SUITE_CACHE` is where environments of npm and pip are kept between runs (`~/.cache/me2b-suites`), and
`E2B_SUITE_SERVE` has more arguments for `me2b serve` (a registry mirror, say).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ME2B = Path(sys.executable).with_name("me2b")
KEY = "e2b_" + "0" * 40
"""The server's key. It is no secret, has the form that older SDKs ask for, and is what the suites themselves fall back
on: what they expect to go without a key goes with it, too."""
CLIENT_VARIABLES = ("E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL", "E2B_DOMAIN", "E2B_DEBUG", "E2B_ACCESS_TOKEN")
STOP_SECONDS = 30


@dataclass(frozen=True)
class Test:
    """One test that ran: its name with its file, and how it ended."""

    name: str
    outcome: str
    """`passed`, `failed` or `skipped`."""
    reason: str = ""
    """The first line of what went wrong."""


@dataclass(frozen=True)
class Group:
    """The results of one group of tests."""

    name: str
    tests: Sequence[Test] = field(default_factory=tuple)

    @property
    def passed(self) -> int:
        """How many passed."""
        return sum(test.outcome == "passed" for test in self.tests)

    @property
    def ran(self) -> int:
        """How many ran: those that passed and those that failed."""
        return sum(test.outcome != "skipped" for test in self.tests)

    @property
    def failures(self) -> list[Test]:
        """Those that failed."""
        return [test for test in self.tests if test.outcome == "failed"]


def repository() -> Path:
    """The clone of E2B's repository. Exits with what to do when there is none."""
    given = os.environ.get("E2B_REPO", "")
    if not given or not Path(given).is_dir():
        sys.exit(
            "The suites are E2B's own and are not kept here. Get them, and say where they are:\n"
            "  git clone --bare https://github.com/e2b-dev/E2B && export E2B_REPO=$PWD/E2B.git"
        )
    return Path(given).resolve()


def checkout(paths: Sequence[str], into: Path) -> None:
    """Write these paths of the clone's HEAD (or `E2B_REVISION`) into a directory."""
    revision = os.environ.get("E2B_REVISION", "HEAD")
    archive = subprocess.run(
        ["git", "-C", repository(), "archive", revision, *paths], capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "x", "-C", into], input=archive, check=True)


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[dict[str, str]]:
    """`me2b serve --tls` on a free port, with a state of its own. Yields what `me2b env` says a client needs.

    The server's ending is waited for; one that does not end in 30 s is killed.
    """
    more = shlex.split(os.environ.get("E2B_SUITE_SERVE", ""))
    with tempfile.TemporaryDirectory(prefix="me2b-suite-") as directory:
        environment = clean() | {"XDG_STATE_HOME": directory, "E2B_API_KEY": KEY}
        log = Path(directory) / "server.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [ME2B, "serve", "--json", "--tls", "--port", "0", *more, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                sys.exit(f"me2b serve did not start: {log.read_text(errors='replace')}")
            answer = subprocess.run([ME2B, "env", "--json"], env=environment, capture_output=True, check=True)
            yield json.loads(answer.stdout)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if os.environ.get("E2B_SUITE_LOG"):
                shutil.copy(log, os.environ["E2B_SUITE_LOG"])


def clean() -> dict[str, str]:
    """This process's environment without what would point a client elsewhere."""
    return {name: value for name, value in os.environ.items() if name not in CLIENT_VARIABLES}


def cached(name: str, ingredients: object) -> tuple[Path, bool]:
    """A directory for an environment made of these ingredients, and whether it is complete (see `complete`)."""
    base = Path(os.environ.get("E2B_SUITE_CACHE") or Path.home() / ".cache" / "me2b-suites")
    mark = hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()[:12]
    directory = base / f"{name}-{mark}"
    if (directory / ".complete").exists():
        return directory, True
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory, False


def complete(directory: Path) -> None:
    """Mark what `cached` gave as made to its end, for the next run."""
    (directory / ".complete").touch()


def python_environment(name: str, requirements: Sequence[str], interpreter: str = sys.executable) -> Path:
    """The `bin` of a virtual environment with these requirements."""
    directory, ready = cached(name, [interpreter, *requirements])
    if not ready:
        subprocess.run([interpreter, "-m", "venv", directory], check=True)
        install: list[str | Path] = [directory / "bin" / "pip", "install", "-q", *requirements]
        installed = subprocess.run(install, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if installed.returncode:
            sys.exit(f"pip could not install {' '.join(requirements)}:\n{installed.stderr}")
        complete(directory)
    return directory / "bin"


def npm_environment(name: str, packages: Mapping[str, str]) -> Path:
    """The `node_modules` of a project with these packages."""
    if shutil.which("npm") is None:
        sys.exit("this suite needs Node.js and npm")
    directory, ready = cached(name, packages)
    if not ready:
        project = {"private": True, "type": "module", "dependencies": dict(packages)}
        (directory / "package.json").write_text(json.dumps(project))
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
        subprocess.run(install, cwd=directory, check=True)
        complete(directory)
    return directory / "node_modules"


def first_line(message: str) -> str:
    """What says most: the first line that is not a place in the code."""
    lines = [line.strip() for line in message.splitlines()]
    return next((line for line in lines if line and not line.startswith("at ")), message.strip())


def report(title: str, groups: Sequence[Group]) -> int:
    """Print the table of these groups and each failure below it. Returns how many failed."""
    print(f"\n{title}")
    width = max((len(group.name) for group in groups), default=0)
    for group in groups:
        skipped = len(group.tests) - group.ran
        print(f"  {group.name:<{width}}  {group.passed} of {group.ran}" + (f" ({skipped} skipped)" if skipped else ""))
        for test in group.failures:
            print(f"    FAILED {test.name}\n           {test.reason[:160]}")
    passed, ran = sum(group.passed for group in groups), sum(group.ran for group in groups)
    print(f"  {'all':<{width}}  {passed} of {ran}" + (f", {passed / ran:.1%}" if ran else ""))
    return ran - passed


def main_of(
    about: str | None, title: str, package: str, sdk: str, groups: Collection[str], run: Callable[..., Sequence[Group]]
) -> int:
    """The command line of a suite: the groups asked for, or all, with a release of a package. Its exit status."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of: {', '.join(groups)} (all)")
    parser.add_argument("--sdk", default=sdk, help=f"the version of the {package} package e2b")
    arguments = parser.parse_args()
    unknown = set(arguments.groups) - set(groups)
    if unknown:
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    failed = report(f"E2B's {title} suite, e2b {arguments.sdk}", run(arguments.groups or list(groups), arguments.sdk))
    return 1 if failed else 0
