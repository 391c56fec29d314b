"""Run the live tests of E2B's Python SDK, with a released package, against `me2b serve`.

    python tools/python_suite.py [--sdk 2.63.0] [GROUP ...]

Images come from a registry of stand-ins, where this host has one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stand_ins import mirror
from suite import Group, Test, checkout, clean, first_line, main_of, python_environment, server

SDK = "2.63.0"
TOOLS = ("e2b-code-interpreter", "pytest", "pytest-asyncio", "pytest-xdist", "pytest-timeout", "pytest-dotenv")
WORKERS = 3
TEST_SECONDS = 60


def both(directory: str, *names: str) -> Iterable[str]:
    """The sync and the async file of each name."""
    for name in names:
        for kind in ("sync", "async"):
            yield f"tests/{kind}/sandbox_{kind}/{directory}{name}"


GROUPS: Mapping[str, Sequence[str]] = {
    "API": (
        "tests/sync/api_sync",
        "tests/async/api_async",
        *both("", "test_kill.py", "test_timeout.py", "test_secure.py", "test_connect.py"),
    ),
    "commands": tuple(both("", "commands")),
    "files": tuple(
        both(
            "files/",
            *("test_exists.py", "test_make_dir.py", "test_remove.py", "test_rename.py", "test_read.py"),
            *("test_write.py", "test_files_list.py", "test_info.py", "test_content_encoding.py"),
        )
    ),
    "files, more": tuple(both("files/", "test_metadata.py", "test_watch.py", "test_secured.py")),
    "terminals": tuple(both("", "pty")),
    "lifecycle": tuple(
        both("", "test_create.py", "test_snapshot.py", "test_snapshot_filesystem_only.py", "test_metrics.py")
    ),
    "git": ("tests/shared/git",),
    "copies": tuple(both("", "test_fork.py", "test_snapshot_api.py")),
    "ports": tuple(both("", "test_host.py")),
    "network": tuple(both("", "test_network.py", "test_internet_access.py")),
    "templates": tuple(
        f"tests/{kind}/template_{kind}/{name}"
        for kind in ("sync", "async")
        for name in (
            *("methods/test_make_symlink.py", "methods/test_run_cmd.py", "test_background_build.py"),
            *("test_build.py", "test_exists.py", "test_tags.py"),
        )
    ),
}


def run_group(
    name: str, paths: Sequence[str], directory: Path, programs: Path, environment: Mapping[str, str]
) -> Group:
    """Run the files of one group that this revision of the suite has."""
    output = directory / "results.xml"
    output.unlink(missing_ok=True)
    present = [path for path in paths if (directory / path).exists()]
    options = [
        "-q",
        "-n",
        str(WORKERS),
        "--timeout",
        str(TEST_SECONDS),
        "-p",
        "no:cacheprovider",
        f"--junitxml={output}",
    ]
    ended = subprocess.run(
        [programs / "pytest", *options, *present],
        cwd=directory,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if not output.exists():
        return Group(name, [Test("pytest", "failed", (ended.stderr or ended.stdout).strip()[-400:])])
    return Group(name, outcomes(ET.parse(output).getroot()))


def outcomes(results: ET.Element) -> list[Test]:
    """The tests in what pytest wrote as JUnit's XML."""
    found: list[Test] = []
    for case in results.iter("testcase"):
        where = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        name = f"{where}::{case.get('name')}"
        wrong = next((child for child in case if child.tag in ("failure", "error")), None)
        if wrong is not None:
            found.append(Test(name, "failed", first_line(wrong.get("message", ""))))
        else:
            found.append(Test(name, "skipped" if case.find("skipped") is not None else "passed"))
    return found


def install(sdk: str = SDK) -> Path:
    """The programs of an environment with this release; made once."""
    return python_environment(f"python-{sdk}", [f"e2b=={sdk}", *TOOLS])


def run(wanted: Sequence[str], sdk: str = SDK) -> list[Group]:
    """Run these groups against a server of their own."""
    programs = install(sdk)
    with tempfile.TemporaryDirectory(prefix="me2b-python-") as temporary:
        checkout(["packages/python-sdk/tests", "packages/python-sdk/pytest.ini"], Path(temporary))
        directory = Path(temporary) / "packages" / "python-sdk"
        with mirror() as arguments, server(*arguments) as client:
            environment = clean() | client
            return [run_group(name, GROUPS[name], directory, programs, environment) for name in wanted]


if __name__ == "__main__":
    sys.exit(main_of(__doc__, "Python", "PyPI", SDK, GROUPS, run))
