"""`me2b doctor`: every check has a word of what was found, and a fix when something is missing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..places import place_of_servers

Examined = Callable[[Any], dict[str, Any]]


@pytest.fixture(scope="module")
def data_dir() -> Iterator[Path]:
    """Where doctor tries a sandbox. In the host's own place it may find, and tell, what a killed server left there."""
    with place_of_servers("me2b-doctor-") as place:
        yield place


@pytest.fixture
def examined(data_dir: Path) -> Examined:
    """What doctor finds, as `_examined` has it."""
    return functools.partial(_examined, data_dir)


def _examined(data_dir: Path, me2b: Any) -> dict[str, Any]:
    """The checks by name; the exit code has to say whether all is well."""
    done = me2b("doctor", "--json", "--data-dir", str(data_dir))
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    assert done.stderr == ""
    return {check["name"]: check for check in report["checks"]}


def test_every_check_says_what_was_found_and_a_failed_one_how_to_fix_it(me2b: Any, examined: Examined) -> None:
    checks = examined(me2b)
    assert {"endpoint", "ledger", "bubblewrap", "user namespaces"} <= set(checks)
    assert all(check["detail"] for check in checks.values())
    assert [name for name, check in checks.items() if not check["ok"] and not check["fix"]] == []
    # Neither a key nor a ledger is missed: both come with the first use, and doctor makes none.
    assert checks["endpoint"]["ok"]
    assert checks["ledger"]["ok"]
    assert not (me2b.folder / "sandboxes.db").exists()


def test_people_see_the_same_checks_and_the_fixes(me2b: Any, data_dir: Path) -> None:
    me2b.variables["ME2B_DB"] = "nowhere/sandboxes.db"
    done = me2b("doctor", "--data-dir", str(data_dir))
    assert done.returncode == 1
    assert "user namespaces" in done.stdout
    assert "nowhere" in done.stdout
    assert "fix:" in done.stdout


def test_an_endpoint_that_takes_the_key(connected: Any, examined: Examined) -> None:
    check = examined(connected)["endpoint"]
    assert check["ok"]
    assert connected.variables["E2B_API_URL"] in check["detail"]


def test_an_endpoint_that_refuses_the_key(connected: Any, examined: Examined) -> None:
    connected.variables["E2B_API_KEY"] = "e2b_" + "1" * 40
    check = examined(connected)["endpoint"]
    assert not check["ok"]
    assert "E2B_API_KEY" in check["fix"]


def test_an_endpoint_that_does_not_answer_and_a_url_that_is_none(me2b: Any, examined: Examined) -> None:
    me2b.variables |= {"E2B_API_KEY": "e2b_" + "0" * 40, "E2B_API_URL": "http://127.0.0.1:9"}
    assert not examined(me2b)["endpoint"]["ok"]
    me2b.variables["E2B_API_URL"] = "nonsense"
    assert "nonsense" in examined(me2b)["endpoint"]["detail"]
