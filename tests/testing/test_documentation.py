"""docs/testing.md names everything there is, and its code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import managed_e2b.testing
from managed_e2b.local.chaos.rules import OPS
from managed_e2b.testing import Chaos, TestServer
from managed_e2b.testing.chaos import On

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


@pytest.mark.parametrize("name", [*public(On), "calm", "reset", "release", "wait_for", "journal", "seed", "installed"])
def test_every_word_of_the_language_is_on_the_page(name: str) -> None:
    assert re.search(rf"\b{name}\(", PAGE)


@pytest.mark.parametrize("op", sorted(op for op in OPS if "." not in op))
def test_every_operation_of_the_control_plane_is_on_the_page(op: str) -> None:
    assert f"`{op}`" in PAGE


def test_the_page_names_no_method_that_does_not_exist() -> None:
    named = set(re.findall(r"chaos\.([a-z_]+)\(", PAGE))
    assert named <= {*public(Chaos), "on"}


@pytest.mark.parametrize("code", CODE, ids=range(len(CODE)))
def test_the_code_on_the_page_runs(code: str, me2b_server: TestServer, tmp_path: Path) -> None:
    assert me2b_server.alive  # skips where the host cannot run one
    command = [sys.executable, "-c", code]
    if re.search(r"^(def test_|class Test)", code, re.M):
        (tmp_path / "conftest.py").write_text('pytest_plugins = ["managed_e2b.testing.fixtures"]\n')
        (tmp_path / "test_page.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_every_public_name_is_somewhere_on_the_page_or_returned_by_what_is() -> None:
    returned = {"TestServer", "Journal", "Request", "Chaos", "ChaosError"}
    assert {name for name in managed_e2b.testing.__all__ if name not in PAGE} <= returned
