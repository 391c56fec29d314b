"""The command as a user meets it: a process with arguments, an environment, two streams and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from managed_e2b.local.background import LocalServerProcess

TIMEOUT = 60
"""Seconds for one command: only a hang takes that long."""


@dataclass
class Me2b:
    """Runs `me2b` in a folder and an environment of its own; nothing of the caller's E2B settings is inherited."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "ME2B_"))}
        return {**inherited, "XDG_STATE_HOME": str(self.folder / "state"), **self.variables}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "managed_e2b.cli", *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments) as process:
            try:
                out, err = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def refused(self, *arguments: str) -> str:
        """The one line with which the command says that it could not do it: no traceback, nothing on stdout."""
        done = self(*arguments)
        assert done.returncode == 2, done
        assert done.stdout == ""
        assert done.stderr.startswith("me2b: "), done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        return done.stderr

    def json(self, *arguments: str) -> Any:
        """What the command printed with --json, which must be all of stdout."""
        return json.loads(self(*arguments, "--json").stdout)


@pytest.fixture
def me2b(tmp_path: Path) -> Me2b:
    return Me2b(tmp_path)


@pytest.fixture
def connected(me2b: Me2b, server: LocalServerProcess) -> Me2b:
    """The command with an environment that points at the shared server, as `me2b env` would have it."""
    me2b.variables |= {"E2B_API_URL": server.url, "E2B_API_KEY": server.api_key}
    return me2b


@pytest.fixture
def listed(server: LocalServerProcess) -> Callable[[], list[str]]:
    """The ids that the server itself lists now."""

    def ask() -> list[str]:
        request = urllib.request.Request(f"{server.url}/v2/sandboxes", headers={"X-API-KEY": server.api_key})
        with urllib.request.urlopen(request, timeout=30) as response:
            return [entry["sandboxID"] for entry in json.load(response)]

    return ask
