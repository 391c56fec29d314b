"""The examples and the benchmark do what they say, on a few items."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.usefixtures("server")  # skips on a host that cannot run sandboxes


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "ME2B_"))}
    return subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], env=environment, capture_output=True, text=True, timeout=100
    )


def test_the_demo_shows_results_rows_and_that_nothing_is_left() -> None:
    done = run("examples/demo.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('{"mean": 3.875') == 2
    assert done.stdout.count("cleaned") == 2
    assert done.stdout.count("server's own list   empty") == 2


@pytest.mark.parametrize("face", ["sync", "async"])
@pytest.mark.parametrize("planted", [False, True])
def test_humaneval_tells_right_from_wrong_and_keeps_the_limit(face: str, planted: bool) -> None:
    done = run(
        "examples/humaneval.py", "--face", face, "--limit", "5", "--concurrency", "2", "--json",
        *(["--planted-error"] if planted else []),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    outcome: Any = json.loads(done.stdout)
    assert [verdict["passed"] for verdict in outcome["verdicts"]] == [not planted] * 5
    assert outcome["peak_live"] <= 2
    assert outcome["rows_by_state"] == {"cleaned": 5}
    assert outcome["still_listed"] == []


def test_the_benchmark_measures_both_ways() -> None:
    done = run("bench/main_job.py", "--count", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert {one["count"] for one in figures["measured"].values()} == {2}
    assert len(figures["added by me2b to"]) == 2


def test_the_benchmark_of_the_local_server_measures_one_and_many() -> None:
    done = run("bench/local.py", "--count", "1", "--alive", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert all(one["least"] > 0 for one in figures["measured"].values())
    assert {"pause", "resume", "a command in each of 3 alive"} <= set(figures["measured"])
    assert figures["idle"]["processes"] >= 1
