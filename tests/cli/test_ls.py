"""`me2b ls`: what the ledger knows."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any


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
