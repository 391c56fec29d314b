"""`Chaos`, the client: its language, what it reads back, and what it says when something is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from e2b import Sandbox
from e2b.exceptions import RateLimitException, SandboxException
from pydantic import ValidationError

from managed_e2b.local.chaos import rules
from managed_e2b.testing import Chaos, ChaosError, ChaosScript, Journal, Request, TestServer
from managed_e2b.testing.chaos import On


def sentence(*ops: str) -> On[rules.Rule]:
    return On(lambda made: made, ops=ops)


SENTENCES: list[tuple[Callable[[], rules.Rule], rules.Rule]] = [
    (
        lambda: sentence("create").nth(3).after().status(504, retry=False),
        rules.Rule(
            ops=("create",), nth=(3,), phase="after", fault=rules.Status(status=504, headers={"Should-Retry": "false"})
        ),
    ),
    (
        lambda: sentence("list", "kill").status(429, retry_after=-1, message="no"),
        rules.Rule(
            ops=("list", "kill"), fault=rules.Status(status=429, headers={"Retry-After": "-1"}, message="no")
        ),
    ),
    (lambda: sentence("kill").first(2).pretend(), rules.Rule(ops=("kill",), stop=2, fault=rules.Status(status=204))),
    (lambda: sentence("*").sometimes(0.05).drop(), rules.Rule(ops=("*",), probability=0.05, fault=rules.Drop())),
    (lambda: sentence("info").after_first(2).hang(), rules.Rule(ops=("info",), start=3, fault=rules.Hang())),
    (
        lambda: sentence("info").every(3).times(2).after().before().delay(1),
        rules.Rule(ops=("info",), every=3, times=2, fault=rules.Delay(seconds=1)),
    ),
    (lambda: sentence("list").stale(4), rules.Rule(ops=("list",), fault=rules.StaleList(calls=4))),
    (lambda: sentence("list").empty(), rules.Rule(ops=("list",), fault=rules.EmptyList())),
    (lambda: sentence("list").lossy(0.2), rules.Rule(ops=("list",), fault=rules.LossyList(fraction=0.2))),
    (lambda: sentence("list").truncated(2), rules.Rule(ops=("list",), fault=rules.TruncatedList(keep=2))),
    (lambda: sentence("list").repeating(), rules.Rule(ops=("list",), fault=rules.RepeatingList())),
    (
        lambda: sentence("process.start").where(run="7").cut("end", after_events=1),
        rules.Rule(
            ops=("process.start",), metadata={"run": "7"}, fault=rules.CutStream(how="end", after_events=1)
        ),
    ),
    (
        lambda: sentence("kill").where("i1").drop("close"),
        rules.Rule(ops=("kill",), sandbox_id="i1", fault=rules.Drop(how="close")),
    ),
    (lambda: sentence("create").dies_at(28), rules.Rule(ops=("create",), fault=rules.EarlyDeath(age=28))),
    (
        lambda: sentence("create").cap(20, retry_after=3),
        rules.Rule(ops=("create",), fault=rules.AccountCap(limit=20, headers={"Retry-After": "3"})),
    ),
    (
        lambda: sentence("create").rate(5, retry_after="auto"),
        rules.Rule(ops=("create",), fault=rules.RateLimit(per_second=5, retry_after="auto")),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("said", "meant"), SENTENCES, ids=[f"{meant.fault.kind}-{n}" for n, (_, meant) in enumerate(SENTENCES)]
)
def test_a_sentence_is_the_rule_that_it_says(said: Callable[[], rules.Rule], meant: rules.Rule) -> None:
    assert said() == meant


def test_a_beginning_of_a_sentence_can_be_used_twice() -> None:
    third = sentence("create").nth(3)
    assert third.after().drop().phase == "after"
    assert third.drop().phase == "before"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: sentence("creates").hang(),
        lambda: sentence("info").empty(),
        lambda: sentence("list").after().stale(),
        lambda: sentence("info").status(42),
        lambda: sentence("info").nth(0).hang(),
        lambda: sentence("info").status(429, retry_after="1\r\nX: y"),
    ],
)
def test_a_sentence_without_sense_is_refused_where_it_is_said(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ValidationError):
        wrong()


def test_a_script_for_a_server_that_is_not_started_yet() -> None:
    script = ChaosScript(seed=7)
    script.on("create").nth(3).after().status(504)
    script.on("kill").drop()
    read = rules.Script.model_validate_json(script.to_json())
    assert read == script.script
    assert (read.seed, [rule.ops for rule in read.rules]) == (7, [("create",), ("kill",)])


def connect(server: TestServer) -> dict[str, Any]:
    return {"api_key": server.api_key, "api_url": server.url, "sandbox_url": server.url}


def test_the_third_create_answers_504_and_has_happened(me2b_server: TestServer, me2b_chaos: Chaos) -> None:
    rule_id = me2b_chaos.on("create").nth(3).after().status(504, retry=False)
    for _ in range(2):
        Sandbox.create(**connect(me2b_server)).kill()
    with pytest.raises(SandboxException, match="504"):
        Sandbox.create(**connect(me2b_server))
    assert me2b_server.live() == 1
    (lost,) = [request for request in me2b_chaos.journal().of("create") if request.status == 504]
    assert lost.effect == 201
    assert lost.sandbox_id is not None
    Sandbox.kill(sandbox_id=lost.sandbox_id, **connect(me2b_server))
    (installed,) = me2b_chaos.installed()
    assert (installed.id, installed.seen, installed.hits) == (rule_id, 3, 1)
    assert me2b_chaos.hits() == me2b_chaos.hits(rule_id) == 1


def test_the_retries_of_the_sdk_are_counted(me2b_server: TestServer, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("create").status(429)
    with pytest.raises(RateLimitException):
        Sandbox.create(**connect(me2b_server))
    assert me2b_chaos.journal().count("create") == 4


def test_a_rule_that_is_removed_strikes_no_more(me2b_server: TestServer, me2b_chaos: Chaos) -> None:
    rule_id = me2b_chaos.on("list").status(500)
    with pytest.raises(SandboxException):
        Sandbox.list(**connect(me2b_server)).next_items()
    me2b_chaos.remove(rule_id)
    Sandbox.list(**connect(me2b_server)).next_items()
    with pytest.raises(ChaosError, match="no such rule"):
        me2b_chaos.remove(rule_id)


def test_a_request_that_hangs_is_seen_and_let_go(me2b_server: TestServer, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("create").after().hang()
    made: list[Sandbox] = []
    thread = threading.Thread(target=lambda: made.append(Sandbox.create(**connect(me2b_server))))
    thread.start()
    (request,) = me2b_chaos.wait_for("create", state="hanging")
    assert request.effect == 201
    me2b_chaos.release()
    thread.join()
    assert made[0].sandbox_id == request.sandbox_id
    made[0].kill()


def test_waiting_for_what_does_not_come_ends(me2b_chaos: Chaos) -> None:
    with pytest.raises(TimeoutError, match="0 of 2 requests 'pause'"):
        me2b_chaos.wait_for("pause", count=2, timeout=0.1)


def test_a_reset_forgets_rules_and_requests(me2b_server: TestServer, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("list").status(500)
    with pytest.raises(SandboxException):
        Sandbox.list(**connect(me2b_server)).next_items()
    me2b_chaos.reset()
    assert me2b_chaos.installed() == []
    assert me2b_chaos.journal().requests == ()
    me2b_chaos.play(ChaosScript(seed=3))
    assert me2b_chaos.installed() == []


def test_a_wrong_key_and_a_server_that_is_gone_are_told(me2b_server: TestServer) -> None:
    with pytest.raises(ChaosError, match="Invalid API key"):
        Chaos(me2b_server.url, "e2b_" + "0" * 40).journal()
    with pytest.raises(ChaosError, match="does not answer"):
        Chaos("http://127.0.0.1:1", "e2b_" + "0" * 40).journal()


def request(n: int, op: str, at: float = 0.0, sandbox_id: str = "i1", **more: Any) -> Request:
    values: dict[str, Any] = {
        "method": "POST", "ticket": None, "owner": None, "faults": (),
        "effect": 204, "status": 204, "state": "answered",
    }  # fmt: skip
    return Request(n=n, at=at, op=op, sandbox_id=sandbox_id, **{**values, **more})


def journal(*requests: Request) -> Journal:
    return Journal(requests, live=0, peak_live=0, peak_present=0, forgotten=0)


def test_the_busiest_window_is_half_open() -> None:
    told = journal(*(request(n, "create", at) for n, at in enumerate([0.0, 0.4, 0.9, 1.0, 1.3, 9.0])))
    assert told.busiest("create", 1.0) == 4, "0.4 to 1.3: a request a whole second later is in the next window"
    assert told.busiest("create", 0.5) == 3
    assert told.busiest("kill") == 0


def test_a_kill_after_a_kill_that_was_done_is_a_double_kill() -> None:
    told = journal(
        request(1, "kill", sandbox_id="retried", status=503),
        request(2, "kill", sandbox_id="retried", effect=404, status=404),
        request(3, "kill", sandbox_id="lied", effect=None),
        request(4, "kill", sandbox_id="lied"),
        request(5, "kill", sandbox_id="twice"),
        request(6, "kill", sandbox_id="twice", effect=404, status=404),
    )
    assert told.double_kills() == ["twice"]


def test_requests_are_found_by_what_they_are_about() -> None:
    told = journal(request(1, "kill", ticket="t"), request(2, "info", ticket="t"), request(3, "kill", sandbox_id="i2"))
    assert [found.n for found in told.of("kill")] == [1, 3]
    assert [found.n for found in told.of(ticket="t")] == [1, 2]
    assert told.count("kill", sandbox_id="i2") == 1
