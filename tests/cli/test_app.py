"""The command's frame: what it costs to import, what it never takes, how it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from managed_e2b.cli.app import app
from managed_e2b.cli.output import duration


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_importing_the_package_of_the_command_costs_nothing() -> None:
    heavy = "{'typer', 'rich', 'e2b', 'sqlalchemy', 'starlette', 'uvicorn'}"
    code = f"import sys, managed_e2b.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_and_env_import_neither_the_sdk_nor_the_ledger() -> None:
    code = "import sys, managed_e2b.cli.app; print(sorted({'e2b', 'sqlalchemy', 'uvicorn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", sorted(commands()))
def test_no_command_takes_a_key_on_its_command_line(name: str) -> None:
    spellings = [spelling for parameter in commands()[name].params for spelling in parameter.opts]
    assert not [spelling for spelling in spellings if "key" in spelling or "token" in spelling]


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_option_and_command_is_explained(name: str) -> None:
    command = commands()[name]
    assert command.help
    assert [parameter.name for parameter in command.params if not parameter.help] == []


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_a_form_for_programs(name: str) -> None:
    assert "--json" in [spelling for parameter in commands()[name].params for spelling in parameter.opts]


def test_version(me2b: Any) -> None:
    done = me2b("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("me2b ")


def test_no_key_and_no_backend_names_both_ways_out(me2b: Any) -> None:
    told = me2b.refused("run", "--", "true")
    assert "E2B_API_KEY" in told
    assert "local" in told


def test_an_endpoint_that_is_not_a_url_is_refused(me2b: Any) -> None:
    me2b.variables["E2B_API_KEY"] = "e2b_" + "0" * 40
    assert "nonsense" in me2b.refused("run", "--api-url", "nonsense", "--", "true")


def test_a_key_never_shows_in_an_error(me2b: Any) -> None:
    me2b.variables |= {"E2B_API_KEY": "e2b_" + "5ec2e7" * 7, "E2B_API_URL": "http://127.0.0.1:9"}
    for arguments in (("run", "--", "true"), ("ls", "--remote")):
        done = me2b(*arguments)
        assert "5ec2e7" not in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [("ls",), ("reap",), ("run", "--", "true")])
def test_a_ledger_that_is_none_is_refused(me2b: Any, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    me2b.variables["E2B_API_KEY"] = "e2b_" + "0" * 40
    (tmp_path / "notes.txt").write_text("these are notes\n" * 100)
    command, *rest = arguments
    assert "notes.txt" in me2b.refused(command, "--db", "notes.txt", *rest)
    assert "nowhere" in me2b.refused(command, "--db", "nowhere/sandboxes.db", *rest)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3, "0s"),
        (0, "0s"),
        (0.9, "0s"),
        (59, "59s"),
        (125, "2m 5s"),
        (120, "2m"),
        (7262, "2h 1m"),
        (3605, "1h"),
        (183600, "2d 3h"),
    ],
)
def test_a_duration_is_told_in_its_two_largest_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
