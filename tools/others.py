"""Tools of others that speak E2B, unmodified, against `me2b serve`: each with the checks that its own people publish.

    python tools/others.py [inspect] [langchain] [harbor] [pydantic]

- inspect: the `e2b` provider of inspect-sandboxes, through inspect's self-check of providers
- langchain: langchain-e2b, through the standard integration tests of langchain-tests
- harbor: harbor's own e2b environment, a task solved by the oracle agent
- pydantic: the e2b backend of pydantic-ai-harness, through pydantic-ai's conformance suite

Each gets an environment of its own with Python 3.12 or newer, which most of them need; without one it is said and left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from python_suite import outcomes
from stand_ins import mirror
from suite import Group, Test, clean, python_environment, report, server

RUN_SECONDS = 1200
NEWEST_FIRST = ("python3.14", "python3.13", "python3.12")

INSPECT = """
import pytest_asyncio
from inspect_ai.util._sandbox.self_check import *
from inspect_sandboxes.e2b._e2b import E2BSandboxEnvironment

@pytest_asyncio.fixture
async def sandbox_env():
    await E2BSandboxEnvironment.task_init("self_check", None)
    environments = await E2BSandboxEnvironment.sample_init("self_check", None, {})
    yield environments["default"]
    await E2BSandboxEnvironment.sample_cleanup("self_check", None, environments, False)
"""

LANGCHAIN = """
import pytest
from e2b import Sandbox
from langchain_e2b import E2BSandbox
from langchain_tests.integration_tests import SandboxIntegrationTests

class TestE2B(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self):
        sandbox = Sandbox.create(timeout=900)
        try:
            yield E2BSandbox(sandbox=sandbox)
        finally:
            sandbox.kill()
"""

PYDANTIC = """
import e2b
import pytest
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite
from pydantic_ai_harness.e2b_sandbox import E2BSandboxBackend

@pytest.fixture
def anyio_backend():
    return "asyncio"

async def kill(backend):
    if backend.ref is not None:
        await e2b.AsyncSandbox.kill(backend.ref.id)

class TestE2B(WorkspaceBackendSuite):
    @pytest.fixture
    async def backend(self):
        backend = E2BSandboxBackend(sandbox_timeout=300)
        yield backend
        await kill(backend)

    @pytest.fixture
    def has_real_posix_shell(self):
        return True

    @pytest.fixture
    def can_detect_exit_with_inherited_output_pipes(self):
        return False  # E2B reports an exit at the end of the pipes, as this suite says of it

    @pytest.fixture
    def filesystem_honors_shell_permissions(self):
        return False  # E2B reads and writes files as root

    @pytest.fixture
    def fresh_backend(self):
        return lambda: E2BSandboxBackend(sandbox_timeout=300)

    @pytest.fixture
    def attach_backend(self):
        return lambda ref: E2BSandboxBackend(ref=ref)

    @pytest.fixture
    def destroy_environment(self):
        return kill
"""

HARBOR_TASK: Mapping[str, str] = {
    "task.toml": """schema_version = "1.1"
[task]
name = "me2b/hello"
[environment]
build_timeout_sec = 120
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 60
""",
    "instruction.md": "Write `hello` into /app/greeting.\n",
    "environment/Dockerfile": "FROM ubuntu:22.04\nWORKDIR /app\n",
    "solution/solve.sh": "#!/bin/sh\nmkdir -p /app && echo hello > /app/greeting\n",
    "tests/test.sh": "#!/bin/sh\n[ \"$(cat /app/greeting)\" = hello ] && echo 1 > /logs/verifier/reward.txt"
    " || echo 0 > /logs/verifier/reward.txt\n",
}  # fmt: skip


def interpreter() -> str | None:
    """A Python that is new enough for all of them, if this host has one on its PATH or below pyenv."""
    for name in NEWEST_FIRST:
        found = shutil.which(name)
        # pyenv leaves a program of every version on the PATH that only says that another is chosen.
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
        for place in sorted(Path.home().glob(f".pyenv/versions/*/bin/{name}")):
            return str(place)
    return None


def tests_of(module: str, requirements: Sequence[str], *options: str) -> Callable[[str, Mapping[str, str]], list[Test]]:
    """A run of this test module by pytest."""

    def run(name: str, client: Mapping[str, str]) -> list[Test]:
        programs = environment(name, [*requirements, "pytest"])
        with tempfile.TemporaryDirectory(prefix="me2b-others-") as temporary:
            (Path(temporary) / f"test_{name}.py").write_text(module)
            output = Path(temporary) / "results.xml"
            command: list[str | Path] = [
                programs / "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--junitxml={output}",
                *options,
            ]
            ended = subprocess.run(
                command, cwd=temporary, env={**clean(), **client}, capture_output=True, text=True, timeout=RUN_SECONDS
            )
            if not output.exists():
                return [Test("pytest", "failed", (ended.stderr or ended.stdout).strip()[-400:])]
            return outcomes(ET.parse(output).getroot())

    return run


def harbor(name: str, client: Mapping[str, str]) -> list[Test]:
    """A task in the template that its Dockerfile builds, and the same in `base`; each has to be rewarded."""
    programs = environment(name, ["harbor[e2b]"])
    return [
        _harbor_trial("builds its template", programs, client),
        _harbor_trial("template base", programs, client, "--ek", "prebuilt_template_id=base"),
    ]


def _harbor_trial(title: str, programs: Path, client: Mapping[str, str], *more: str) -> Test:
    with tempfile.TemporaryDirectory(prefix="me2b-others-") as temporary:
        task, jobs = Path(temporary) / "hello", Path(temporary) / "jobs"
        for path, text in HARBOR_TASK.items():
            (task / path).parent.mkdir(parents=True, exist_ok=True)
            (task / path).write_text(text)
        command: list[str | Path] = [
            programs / "harbor",
            "run",
            "-p",
            task,
            "--agent",
            "oracle",
            "--env",
            "e2b",
            "-o",
            jobs,
            "-y",
            *more,
        ]
        settings = {**clean(), **client, "HARBOR_TELEMETRY": "0", "HOME": temporary}
        ended = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
        trials = [json.loads(path.read_text()) for path in sorted(jobs.glob("*/*/result.json"))]
    rewards = [trial["verifier_result"]["rewards"]["reward"] for trial in trials if trial.get("verifier_result")]
    if rewards == [1.0]:
        return Test(title, "passed")
    wrong = [trial.get("exception_info") for trial in trials] or (ended.stderr or ended.stdout).strip()[-400:]
    return Test(title, "failed", f"rewards {rewards}: {wrong}")


def environment(name: str, requirements: Sequence[str]) -> Path:
    """The programs of an environment with these requirements."""
    chosen = interpreter()
    if chosen is None:
        sys.exit(f"needs one of {', '.join(NEWEST_FIRST)}, and this host has none")
    return python_environment(f"others-{name}", requirements, chosen)


TOOLS: Mapping[str, tuple[str, Callable[[str, Mapping[str, str]], list[Test]]]] = {
    "inspect": (
        "inspect-sandboxes, inspect's self-check",
        tests_of(INSPECT, ["inspect-sandboxes[e2b]", "pytest-asyncio"], "-o", "asyncio_mode=auto"),
    ),
    "langchain": (
        "langchain-e2b, SandboxIntegrationTests",
        tests_of(LANGCHAIN, ["langchain-e2b", "langchain-tests", "pytest-asyncio"], "-o", "asyncio_mode=auto"),
    ),
    "harbor": ("harbor, oracle agent", harbor),
    "pydantic": (
        "pydantic-ai-harness, WorkspaceBackendSuite",
        tests_of(PYDANTIC, ["pydantic-ai-harness[e2b]", "anyio"]),
    ),
}


def run(wanted: Sequence[str]) -> list[Group]:
    """Run these tools against a server of their own."""
    with mirror() as arguments, server(*arguments) as client:
        return [Group(TOOLS[name][0], TOOLS[name][1](name, client)) for name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of: {', '.join(TOOLS)} (all)")
    arguments = parser.parse_args()
    unknown = set(arguments.tools) - set(TOOLS)
    if unknown:
        parser.error(f"no such tool: {', '.join(sorted(unknown))}")
    return 1 if report("Tools of others", run(arguments.tools or list(TOOLS))) else 0


if __name__ == "__main__":
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    sys.exit(main())
