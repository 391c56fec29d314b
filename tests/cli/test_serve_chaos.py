"""`me2b serve --chaos`: a server that fails on purpose, for programs in any language."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from managed_e2b.local.background import LocalServerProcess
from managed_e2b.testing import Chaos, ChaosError, ChaosScript

Serve = Callable[..., Any]


@pytest.fixture
def serve(me2b: Any, server: LocalServerProcess) -> Serve:
    """Start `me2b serve` with more options: the `Chaos` of it. (`server` skips where the host cannot run one.)"""
    assert server.alive

    @contextmanager
    def start(*options: str) -> Iterator[Chaos]:
        data = str(me2b.folder / "data")
        with me2b.start("serve", "--port", "0", "--data-dir", data, "--json", *options) as process:
            try:
                ready = process.stdout.readline()
                assert ready, process.stderr.read()
                yield Chaos(json.loads(ready)["url"], me2b.json("env")["E2B_API_KEY"])
            finally:
                process.kill()

    return start


def script() -> ChaosScript:
    made = ChaosScript(seed=7)
    made.on("create").nth(3).after().status(504)
    return made


def test_rules_come_from_a_file_or_the_command_line(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(script().to_json())
    for given in (str(file), script().to_json()):
        with serve("--chaos", given) as chaos:
            assert [item.rule for item in chaos.installed()] == list(script().script.rules)


def test_a_seed_of_its_own_takes_the_place_of_the_scripts(serve: Serve) -> None:
    with serve("--chaos", script().to_json(), "--chaos-seed", "9") as chaos:
        assert chaos._call("GET", "")["seed"] == 9


def test_no_rules_let_tests_ask_for_some_and_no_option_lets_nobody(serve: Serve) -> None:
    with serve("--chaos", "{}") as chaos:
        chaos.on("create").drop()
        assert len(chaos.installed()) == 1
    with serve() as chaos, pytest.raises(ChaosError, match="without chaos"):
        chaos.installed()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--chaos", '{"rules": [{"ops": ["creat"], "fault": {"kind": "hang"}}]}'], "no operation is called 'creat'"),
        (["--chaos", '{"rules": [}'], "--chaos: Invalid JSON"),
        (["--chaos", "nowhere.json"], "nowhere.json"),
        (["--chaos-seed", "3"], "--chaos-seed needs --chaos"),
    ],
)
def test_what_cannot_be_a_script_is_told_in_one_line(me2b: Any, options: list[str], told: str) -> None:
    assert told in me2b.refused("serve", "--port", "0", *options)
