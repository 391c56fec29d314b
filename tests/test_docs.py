"""The documentation tells of everything there is, of nothing there is not, and its code runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

import managed_e2b
from managed_e2b.cli.app import app
from managed_e2b.local.background import LocalServerProcess

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> list[str]:
    group: Any = typer.main.get_command(app)
    return list(group.commands)


def test_generated_pages_are_what_the_code_says() -> None:
    for name, page in load_tool("docs").PAGES.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == page(), f"run `make docs` for docs/{name}"


@pytest.mark.parametrize("name", commands())
def test_readme_names_every_command(name: str) -> None:
    assert f"`me2b {name}" in README


def test_documents_name_no_command_that_does_not_exist() -> None:
    for page in PAGES:
        named = set(re.findall(r"me2b ([a-z]+)\b", "\n".join(re.findall(r"`[^`]+`|^\$ .*$", page.read_text(), re.M))))
        assert named <= set(commands()), page


@pytest.mark.parametrize("name", sorted(managed_e2b.__all__))
def test_every_public_name_is_documented_in_the_code_and_on_a_page(name: str) -> None:
    assert getattr(managed_e2b, name).__doc__
    assert [page.name for page in PAGES if re.search(rf"\b{name}\b", page.read_text(encoding="utf-8"))]


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        assert set(re.findall(r"(?:`|^\$ )make ([a-z]+)", page.read_text(encoding="utf-8"), re.M)) <= targets, page


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.S), ids=["sync", "async"])
def test_the_code_of_the_readme_runs(code: str, tmp_path: Path, server: LocalServerProcess) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("42")
