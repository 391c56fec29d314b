"""`me2b doctor`: every check has a word of what was found, and a fix when something is missing."""

from __future__ import annotations

from typing import Any


def found(me2b: Any, name: str) -> Any:
    (check,) = [check for check in me2b.json("doctor")["checks"] if check["name"] == name]
    return check


def test_every_check_says_what_was_found_and_a_failed_one_how_to_fix_it(me2b: Any) -> None:
    report = me2b.json("doctor")
    assert {"endpoint", "ledger"} < {check["name"] for check in report["checks"]}
    assert all(check["detail"] for check in report["checks"])
    assert [check["name"] for check in report["checks"] if not check["ok"] and not check["fix"]] == []
    assert report["ok"] == all(check["ok"] for check in report["checks"])


def test_the_exit_code_tells_whether_all_is_well(me2b: Any) -> None:
    done = me2b("doctor")
    assert done.returncode == (0 if me2b.json("doctor")["ok"] else 1)
    assert done.stderr == ""
    assert "ledger" in done.stdout


def test_an_endpoint_that_takes_the_key(connected: Any) -> None:
    check = found(connected, "endpoint")
    assert check["ok"]
    assert connected.variables["E2B_API_URL"] in check["detail"]


def test_an_endpoint_that_refuses_the_key(connected: Any) -> None:
    connected.variables["E2B_API_KEY"] = "e2b_" + "1" * 40
    check = found(connected, "endpoint")
    assert not check["ok"]
    assert "E2B_API_KEY" in check["fix"]
    assert connected("doctor").returncode == 1


def test_an_endpoint_that_does_not_answer(me2b: Any) -> None:
    me2b.variables |= {"E2B_API_KEY": "e2b_" + "0" * 40, "E2B_API_URL": "http://127.0.0.1:9"}
    assert not found(me2b, "endpoint")["ok"]


def test_a_ledger_that_cannot_be_opened(me2b: Any) -> None:
    me2b.variables["ME2B_DB"] = "nowhere/sandboxes.db"
    check = found(me2b, "ledger")
    assert not check["ok"]
    assert "nowhere" in check["detail"]


def test_a_ledger_that_is_not_there_yet_is_none_of_its_making(me2b: Any) -> None:
    assert found(me2b, "ledger")["ok"]
    assert not (me2b.folder / "sandboxes.db").exists()
