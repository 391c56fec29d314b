"""docs/local-server.md names every option of the server, and its code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from managed_e2b.cli.app import app
from managed_e2b.local.background import LocalServerProcess

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "local-server.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
ELSEWHERE = {"--chaos-seed", "--json"}  # of tests and of programs: docs/testing.md and docs/cli.md
HOST_LACKS = re.compile(r"gives sandboxes no way out.*|code-interpreter-v1 needs .*|sandboxes cannot run a copy of .*")


def options() -> list[str]:
    group: Any = typer.main.get_command(app)
    names = {name for option in group.commands["serve"].params for name in option.opts + option.secondary_opts}
    return sorted(name for name in names - ELSEWHERE if name.startswith("--"))


@pytest.mark.parametrize("option", options())
def test_every_option_of_the_server_is_on_the_page(option: str) -> None:
    pair = {"--internet": "--no-internet", "--keep-volumes": "--forget-volumes"}
    assert pair.get(option, option) in PAGE


def test_what_the_page_calls_an_option_is_one() -> None:
    named = set(re.findall(r"`me2b serve[^`]*?(--[a-z-]+)", PAGE)) | set(re.findall(r"\| `(--[a-z-]+)", PAGE))
    assert named <= {*options(), *ELSEWHERE}


def test_what_the_page_leads_to_within_itself_is_there() -> None:
    heads = {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)", PAGE, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= heads


@pytest.mark.parametrize("code", CODE, ids=range(len(CODE)))
def test_the_code_on_the_page_runs(code: str, tmp_path: Path, server: LocalServerProcess) -> None:
    if "e2b_code_interpreter" in code:
        pytest.importorskip("e2b_code_interpreter", reason="e2b-code-interpreter is not installed")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | server.environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    if lack := HOST_LACKS.search(done.stderr):
        pytest.skip(lack[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
