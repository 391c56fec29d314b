from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from managed_e2b.local.chaos.ops import control_plane_op, sandbox_op
from managed_e2b.local.chaos.rules import (
    OPS,
    AccountCap,
    CutStream,
    Delay,
    Drop,
    EarlyDeath,
    EmptyList,
    Fault,
    Hang,
    LossyList,
    RateLimit,
    RepeatingList,
    Rule,
    Script,
    StaleList,
    Status,
    TruncatedList,
)

DICE = random.Random(1)

FAULTS: list[tuple[str, Fault]] = [
    ("info", Delay(seconds=1.5)),
    ("kill", Hang()),
    ("create", Status(status=429, headers={"Retry-After": "-1"}, message="no", body={"a": [1]})),
    ("timeout", Drop(how="close")),
    ("list", EmptyList()),
    ("list", StaleList(calls=3)),
    ("list", LossyList(fraction=0.25)),
    ("list", TruncatedList(keep=2)),
    ("list", RepeatingList()),
    ("process.start", CutStream(how="unavailable", after_events=2)),
    ("create", EarlyDeath(age=28)),
    ("create", AccountCap(limit=20)),
    ("create", RateLimit(per_second=0.5, retry_after="auto")),
]


def struck(rule: Rule, requests: int) -> list[int]:
    hits = 0
    numbers = []
    for number in range(1, requests + 1):
        if rule.strikes(number, hits, DICE):
            hits += 1
            numbers.append(number)
    return numbers


@pytest.mark.parametrize(
    ("chosen", "numbers"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"nth": (3,)}, [3]),
        ({"nth": (1, 4)}, [1, 4]),
        ({"stop": 2}, [1, 2]),
        ({"start": 5}, [5, 6]),
        ({"every": 3}, [1, 4]),
        ({"start": 2, "every": 2, "stop": 5}, [2, 4]),
        ({"times": 2}, [1, 2]),
        ({"start": 3, "times": 1}, [3]),
        ({"probability": 0}, []),
    ],
)
def test_the_requests_that_a_rule_strikes(chosen: dict[str, Any], numbers: list[int]) -> None:
    assert struck(Rule(ops=("create",), fault=Hang(), **chosen), 6) == numbers


@pytest.mark.parametrize(("op", "fault"), FAULTS, ids=lambda value: getattr(value, "kind", value))
def test_a_rule_is_the_same_after_a_trip_through_json(op: str, fault: Fault) -> None:
    script = Script(seed=3, rules=(Rule(ops=(op,), fault=fault, nth=(2,), times=4),))
    assert Script.model_validate_json(script.model_dump_json()) == script


@given(pattern=st.sampled_from([*sorted(OPS), "*", "process.*", "files.*"]), op=st.sampled_from(sorted(OPS)))
def test_a_pattern_names_the_operations_that_it_spells(pattern: str, op: str) -> None:
    rule = Rule(ops=(pattern,), fault=Hang())
    assert rule.is_about(op, None, {}) == (op.startswith(pattern[:-1]) if pattern.endswith("*") else op == pattern)


def test_a_rule_is_about_its_sandboxes_only() -> None:
    rule = Rule(ops=("kill",), fault=Hang(), metadata={"run": "7"})
    assert rule.is_about("kill", "a", {"run": "7", "more": "1"})
    assert not rule.is_about("kill", "a", {"run": "8"})
    rule = Rule(ops=("kill",), fault=Hang(), sandbox_id="a")
    assert rule.is_about("kill", "a", {})
    assert not rule.is_about("kill", "b", {})


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"ops": ["creat"], "fault": {"kind": "hang"}}, "no operation is called 'creat'"),
        ({"ops": [], "fault": {"kind": "hang"}}, "at least 1 item"),
        ({"ops": ["*"], "fault": {"kind": "empty"}}, "'empty' is for list only"),
        ({"ops": ["info"], "fault": {"kind": "cut"}}, "'cut' is for"),
        ({"ops": ["create", "list"], "fault": {"kind": "cap", "limit": 1}}, "'cap' is for create only"),
        ({"ops": ["list"], "fault": {"kind": "empty"}, "phase": "after"}, "no before and after"),
        ({"ops": ["create"], "fault": {"kind": "hang"}, "sandbox_id": "a"}, "choose it by metadata"),
        ({"ops": ["info"], "fault": {"kind": "delay", "seconds": -1}}, "greater than or equal to 0"),
        ({"ops": ["info"], "fault": {"kind": "delay", "seconds": float("inf")}}, "finite"),
        ({"ops": ["info"], "fault": {"kind": "status", "status": 99}}, "greater than or equal to 200"),
        ({"ops": ["info"], "fault": {"kind": "status", "status": 429, "headers": {"X": "1\r\nY: 2"}}}, "ASCII"),
        ({"ops": ["info"], "fault": {"kind": "rate", "per_second": 1, "retry_after": "1\n"}}, "pattern"),
        ({"ops": ["info"], "fault": {"kind": "hang"}, "nth": [0]}, "greater than or equal to 1"),
        ({"ops": ["info"], "fault": {"kind": "hang"}, "probablity": 0.5}, "Extra inputs"),
    ],
)  # fmt: skip
def test_a_rule_that_makes_no_sense_is_refused_and_told_why(rule: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        Rule.model_validate(rule)


@pytest.mark.parametrize(
    ("method", "path", "op"),
    [
        ("POST", "/sandboxes", "create"),
        ("POST", "/v2/sandboxes", "create"),
        ("GET", "/v2/sandboxes", "list"),
        ("GET", "/sandboxes/metrics", "metrics"),
        ("GET", "/sandboxes/i1", "info"),
        ("DELETE", "/sandboxes/i1", "kill"),
        ("DELETE", "/sandboxes/i1-local", "kill"),
        ("POST", "/sandboxes/i1/timeout", "timeout"),
        ("POST", "/sandboxes/i1/refreshes", "refresh"),
        ("POST", "/sandboxes/i1/pause", "pause"),
        ("POST", "/sandboxes/i1/resume", "resume"),
        ("POST", "/v2/sandboxes/i1/connect", "connect"),
        ("GET", "/v2/sandboxes/i1/logs", "logs"),
        ("POST", "/sandboxes/i1/snapshots", "snapshot"),
        ("GET", "/templates/aliases/base", "template"),
        ("POST", "/v3/templates", "template"),
        ("GET", "/teams", "other"),
        ("PATCH", "/sandboxes/i1", "other"),
        ("POST", "/sandboxes/i1/nonsense", "other"),
    ],
)
def test_what_requests_to_the_control_plane_are_called(method: str, path: str, op: str) -> None:
    called, sandbox_id = control_plane_op(method, path)
    assert called == op
    assert sandbox_id == ("i1" if "/i1" in path else None)


@pytest.mark.parametrize(
    ("method", "path", "port", "op"),
    [
        ("GET", "/health", 49983, "health"),
        ("GET", "/files", 49983, "files.read"),
        ("POST", "/files", 49983, "files.write"),
        ("POST", "/process.Process/Start", 49983, "process.start"),
        ("POST", "/process.Process/SendSignal", 49983, "process.send_signal"),
        ("POST", "/filesystem.Filesystem/GetWatcherEvents", 49983, "filesystem.get_watcher_events"),
        ("POST", "/process.Process/Nonsense", 49983, "envd"),
        ("GET", "/metrics", 49983, "envd"),
        ("GET", "/health", 8080, "port"),
    ],
)
def test_what_requests_to_a_sandbox_are_called(method: str, path: str, port: int, op: str) -> None:
    assert sandbox_op(method, path, port) == op
