"""`me2b ls` and `me2b reap`: what the ledger knows, and finishing what a dead owner left."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

Listed = Callable[[], list[str]]


@pytest.fixture
def orphan(connected: Any) -> Any:
    """The row of a sandbox whose owner, a `me2b run`, was SIGKILLed while its command ran."""
    with connected.start("run", "--", "echo here; sleep 1000") as process:
        assert process.stdout.readline() == "here\n"
        process.kill()
    (row,) = connected.json("ls")["ledger"]
    return row


def test_ls_makes_no_ledger(me2b: Any, tmp_path: Path) -> None:
    done = me2b("ls")
    assert (done.returncode, done.stdout) == (0, "")
    assert "sandboxes.db" in done.stderr
    assert me2b.json("ls") == {"ledger": [], "remote": None}
    assert not (tmp_path / "sandboxes.db").exists()


def test_ls_shows_open_rows_and_with_all_closed_ones(connected: Any) -> None:
    assert connected("run", "--", "true").returncode == 0
    assert connected.json("ls")["ledger"] == []
    (row,) = connected.json("ls", "--all")["ledger"]
    assert row["state"] == "cleaned"
    assert connected.json("ls", "--state", "cleaned")["ledger"] == [row]
    assert connected.json("ls", "--state", "running")["ledger"] == []
    assert datetime.fromisoformat(row["queued_at"]) < datetime.fromisoformat(row["ended_at"])
    assert row["sandbox_id"] in connected("ls", "--all").stdout


def test_what_a_killed_owner_left_is_listed_reaped_once_and_gone(connected: Any, listed: Listed, orphan: Any) -> None:
    assert orphan["sandbox_id"] in listed()
    remote = connected.json("ls", "--remote")["remote"]
    assert orphan["sandbox_id"] in [sandbox["sandbox_id"] for sandbox in remote]
    assert orphan["sandbox_id"] in connected("ls", "--remote").stdout

    report = connected.json("reap")
    assert [(item["sandbox_id"], item["action"]) for item in report["items"]] == [(orphan["sandbox_id"], "cleaned")]
    assert report["pending"] == 0
    assert listed() == []
    assert connected.json("ls")["ledger"] == []
    assert connected.json("reap")["items"] == []


def test_reap_for_people(connected: Any, orphan: Any) -> None:
    done = connected("reap")
    assert done.returncode == 0
    assert orphan["sandbox_id"] in done.stdout
    assert connected("reap").stderr == "me2b: nothing to reap\n"


def test_reap_leaves_a_living_owner_alone(connected: Any, listed: Listed) -> None:
    with connected.start("run", "--", "echo here; sleep 1000") as process:
        assert process.stdout.readline() == "here\n"
        assert connected.json("reap")["items"] == []
        (row,) = connected.json("ls")["ledger"]
        assert row["state"] == "running"
        assert listed() == [row["sandbox_id"]]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    assert listed() == []
