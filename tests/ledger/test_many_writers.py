"""A ledger under many processes that write to it at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "ledger.py"


@pytest.mark.timeout(120)
def test_many_processes_that_beat_and_churn_meet_no_lock(url: str) -> None:
    """From about ten writers on, heartbeats and a fan-out of writes ended in "database is locked"."""
    size = ["--processes", "12", "--sandboxes", "10", "--seconds", "3", "--churn", "5"]
    run = subprocess.run(
        [sys.executable, str(BENCH), *size, "--db", url, "--json"], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout)
    assert (figures["errors"], figures["rows left open"]) == ({}, 0)
    assert figures["all open at once"]["count"] == 12 * 10 * 3, "each joined the line, had its turn, and ran"
    assert figures["all close at once"]["count"] == 12 * 10 * 2, "each was claimed and cleaned"
