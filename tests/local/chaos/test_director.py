from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_e2b.local.chaos.director import Director, Plan, Subject, World
from managed_e2b.local.chaos.rules import Delay, Drop, Hang, Rule, Script, Status

from .conftest import rule

EMPTY = World(live=0, now=0.0)


def director(*rules: Rule, seed: int = 0) -> Director:
    return Director(Script(seed=seed, rules=rules))


def statuses(plans: list[Plan]) -> list[int | None]:
    return [next((step.status for step in plan.before if isinstance(step, Status)), None) for plan in plans]


def ask(asked: Director, op: str, times: int = 1, world: World = EMPTY) -> list[Plan]:
    return [asked.plan(Subject(op), world) for _ in range(times)]


def test_each_rule_counts_its_own_requests() -> None:
    asked = director(rule("create").nth(3).status(504), rule("*").nth(3).status(500))
    assert statuses(ask(asked, "create", 2)) == [None, None]
    assert statuses(ask(asked, "info", 1)) == [500]
    assert statuses(ask(asked, "create", 2)) == [504, None]


def test_waits_add_up_and_the_first_decision_wins() -> None:
    asked = director(
        rule("kill").delay(1), rule("kill").hang(), rule("kill").status(503), rule("kill").drop(), rule("kill").delay(9)
    )
    (plan,) = ask(asked, "kill")
    assert [type(step) for step in plan.before] == [Delay, Hang, Status]
    assert plan.struck == ["delay 1.0 before", "hang before", "status 503 before"]
    assert [standing.hits for standing in asked] == [1, 1, 1, 0, 0]
    assert [standing.seen for standing in asked] == [1] * 5, "what another rule decided is counted all the same"


def test_before_and_after_are_decided_apart() -> None:
    asked = director(rule("kill").delay(1), rule("kill").after().drop(), rule("kill").after().status(500))
    (plan,) = ask(asked, "kill")
    assert [type(step) for step in plan.before] == [Delay]
    assert [type(step) for step in plan.after] == [Drop]
    assert not plan.refused


def test_a_rule_of_lists_and_one_of_streams_and_one_of_deaths_have_places_of_their_own() -> None:
    asked = director(
        rule("list").empty(), rule("process.start").cut("end"), rule("create").dies_at(9), rule("create").dies_at(4)
    )
    assert [fault.kind for fault, _ in ask(asked, "list")[0].lists] == ["empty"]
    cut = ask(asked, "process.start")[0].cut
    assert cut is not None
    assert cut.how == "end"
    assert ask(asked, "create")[0].death == 4


@given(seed=st.integers(), others=st.lists(st.sampled_from(["info", "list", "kill"]), max_size=20))
def test_chance_is_the_same_again_whatever_else_is_asked_in_between(seed: int, others: list[str]) -> None:
    script = (rule("create").sometimes(0.5).status(503), rule("info").sometimes(0.5).drop())
    alone = statuses(ask(director(*script, seed=seed), "create", 20))
    asked = director(*script, seed=seed)
    mixed = []
    for number in range(20):
        for op in others[number::20]:
            ask(asked, op)
        mixed += statuses(ask(asked, "create"))
    assert mixed == alone


def test_chance_strikes_about_as_often_as_it_says() -> None:
    hits = sum(
        status is not None for status in statuses(ask(director(rule("*").sometimes(0.05).status(500)), "info", 2000))
    )
    assert 60 <= hits <= 140


def test_seeds_differ() -> None:
    told = {
        tuple(statuses(ask(director(rule("*").sometimes(0.5).status(500), seed=seed), "info", 30))) for seed in range(5)
    }
    assert len(told) == 5


def test_a_cap_refuses_while_so_many_live() -> None:
    asked = director(rule("create").cap(2, retry_after="3"))
    assert [plan.refused for live in (0, 1, 2, 3, 1) for plan in ask(asked, "create", 1, World(live, 0))] == [
        False, False, True, True, False,
    ]  # fmt: skip
    (plan,) = ask(asked, "create", 1, World(2, 0))
    (refusal,) = plan.before
    assert isinstance(refusal, Status)
    assert (refusal.status, refusal.headers) == (429, {"Retry-After": "3"})
    assert "maximum number of concurrent sandboxes (2)" in str(refusal.message)
    (standing,) = asked
    assert (standing.seen, standing.hits) == (6, 3)


def test_a_cap_does_not_refuse_what_was_done_already() -> None:
    asked = director(rule("create").cap(0))
    assert not asked.plan(Subject("create", replay=True), EMPTY).refused


@given(
    per_second=st.sampled_from([0.4, 0.5, 1, 2.5, 5, 20]),
    gaps=st.lists(st.floats(0, 0.7), min_size=1, max_size=60),
)
def test_a_rate_holds_in_every_window_and_wastes_nothing(per_second: float, gaps: list[float]) -> None:
    asked = director(rule("create").rate(per_second))
    window = max(1.0, 1 / per_second)
    allowed = max(1, int(per_second * window + 1e-9))
    now, admitted = 0.0, []
    for gap in gaps:
        now += gap
        (plan,) = ask(asked, "create", 1, World(0, now))
        recent = sum(1 for at in admitted if now - at < window)
        assert plan.refused == (recent >= allowed)
        if not plan.refused:
            admitted.append(now)


@pytest.mark.parametrize(
    ("header", "sent"), [(None, {}), ("soon", {"Retry-After": "soon"}), ("auto", {"Retry-After": "1"})]
)
def test_a_rate_says_when_to_come_again_as_it_was_told(header: str | None, sent: dict[str, str]) -> None:
    asked = director(rule("create").rate(1, retry_after=header))
    ask(asked, "create", 1, World(0, 5.0))
    (plan,) = ask(asked, "create", 1, World(0, 5.25))
    (refusal,) = plan.before
    assert isinstance(refusal, Status)
    assert refusal.headers == sent


def test_what_another_rule_refuses_uses_no_rate() -> None:
    asked = director(rule("create").rate(1), rule("create").nth(1).status(500))
    assert statuses(ask(asked, "create", 3)) == [500, None, 429]


def test_playing_a_script_forgets_all_counts() -> None:
    asked = director(rule("create").nth(1).status(500))
    assert statuses(ask(asked, "create", 2)) == [500, None]
    asked.play(Script(rules=(rule("create").nth(1).status(502),)))
    assert statuses(ask(asked, "create", 2)) == [502, None]
    assert asked.remove(1)
    assert not asked.remove(1)
