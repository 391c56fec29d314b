"""`me2b reap`: finishing what a dead owner left, once or again and again, and what nobody here owns."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import e2b
import pytest

from managed_e2b import BackendError, LedgerError, Reaped, ReapReport
from managed_e2b.cli.reap import _watch
from managed_e2b.testing import Chaos
from managed_e2b.testing.server import TestServer

Listed = Callable[[], list[str]]

OWNER = """
import os
from managed_e2b import SandboxLifecycle
lifecycle = SandboxLifecycle(watchdog=False)  # with one, nothing would be left to reap
lifecycle.acquire(metadata={"run": "7"}).__enter__()
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def orphan(connected: Any) -> Any:
    """The row of a sandbox whose owner was SIGKILLed, with nobody to see it."""
    done = subprocess.run(
        [sys.executable, "-c", OWNER], cwd=connected.folder, env=connected.environment(), timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    (row,) = connected.json("ls")["ledger"]
    return row


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


def test_a_dry_run_prints_ages_and_ends_nothing(connected: Any, listed: Listed, orphan: Any) -> None:
    report = connected.json("reap", "--dry-run")
    assert [(item["sandbox_id"], item["action"]) for item in report["items"]] == [(orphan["sandbox_id"], "due")]
    assert report["items"][0]["age"] > 0
    assert report["due"] == 1
    shown = connected("reap", "--dry-run")
    assert shown.returncode == 0
    assert "AGE" in shown.stdout
    assert orphan["sandbox_id"] in listed()
    assert connected("reap").returncode == 0


def test_filters(connected: Any, listed: Listed, orphan: Any) -> None:
    assert connected.json("reap", "--older-than", "2h")["items"] == []
    assert connected.json("reap", "--metadata", "run=8")["items"] == []
    assert connected.json("reap", "--template", "other")["items"] == []
    assert orphan["sandbox_id"] in listed()
    (item,) = connected.json("reap", "--metadata", "run=7", "--template", "base", "--older-than", "0.001m")["items"]
    assert item["action"] == "cleaned"
    assert listed() == []


@pytest.mark.parametrize(
    "wrong",
    [
        ("--older-than", "soon"),
        ("--metadata", "run"),
        ("--include-other-ledgers",),
        ("--foreign", "--include-other-ledgers", "--older-than", "10s"),
        ("30",),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_refused_in_one_line(connected: Any, wrong: tuple[str, ...]) -> None:
    connected.refused("reap", *wrong)


@pytest.fixture
def stranger(server: TestServer) -> Iterator[str]:
    """A sandbox that a program without managed-e2b made."""
    where = {"api_key": server.api_key, "api_url": server.url}
    sandbox = e2b.Sandbox.create("base", timeout=600, metadata={"mine": "yes"}, **where)
    yield sandbox.sandbox_id
    e2b.Sandbox.kill(sandbox.sandbox_id, **where)


def test_what_nobody_here_owns_is_ended_only_with_foreign(connected: Any, listed: Listed, stranger: str) -> None:
    assert connected.json("reap")["items"] == []
    assert stranger in listed()
    (item,) = connected.json("reap", "--foreign", "--metadata", "mine=yes")["items"]
    assert (item["sandbox_id"], item["action"]) == (stranger, "cleaned")
    assert stranger not in listed()


def test_a_kill_that_cannot_be_proved_is_exit_code_1(me2b: Any, me2b_server: TestServer, me2b_chaos: Chaos) -> None:
    me2b.variables |= me2b_server.environment
    subprocess.run([sys.executable, "-c", OWNER], cwd=me2b.folder, env=me2b.environment(), timeout=60, check=False)
    me2b_chaos.on("kill").status(503, retry=False)
    done = me2b("reap")
    assert done.returncode == 1
    assert "pending" in done.stdout
    assert "503" in done.stdout
    me2b_chaos.calm()
    assert me2b("reap").returncode == 0


def test_watching_reaps_what_dies_later_until_it_is_interrupted(connected: Any, listed: Listed) -> None:
    with connected.start("reap", "--watch", "1", "--json") as watcher:
        assert json.loads(watcher.stdout.readline())["items"] == []
        subprocess.run(
            [sys.executable, "-c", OWNER], cwd=connected.folder, env=connected.environment(), timeout=60, check=False
        )
        while not (items := json.loads(watcher.stdout.readline())["items"]):
            pass
        assert [item["action"] for item in items] == ["cleaned"]
        assert items[0]["sandbox_id"] not in listed()
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(timeout=60) == 0


def test_watching_outlives_an_endpoint_and_a_ledger_that_fail(capsys: pytest.CaptureFixture[str]) -> None:
    item = Reaped("t", "igone", "o", "cleaned", "its owner is dead")
    answers = iter([BackendError("503"), LedgerError("locked"), ReapReport((item,))])

    class Lifecycle:
        def reap(self, **options: Any) -> ReapReport:
            assert options == {"dry_run": False}
            answer = next(answers, KeyboardInterrupt())
            if isinstance(answer, BaseException):
                raise answer
            return answer

    _watch(Lifecycle(), {"dry_run": False}, 0, as_json=True)
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert json.loads(line)["items"][0]["sandbox_id"] == "igone"
    assert [word in err for word in ("503", "locked", "interrupted")] == [True] * 3
