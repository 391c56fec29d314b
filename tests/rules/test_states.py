from __future__ import annotations

import itertools

import pytest

from managed_e2b import State, StateTransitionError
from managed_e2b.rules import states


def test_every_state_is_in_the_table_and_can_end() -> None:
    assert set(states.TRANSITIONS) == set(State)
    reach = {state: {state} for state in State}
    for _ in State:
        for source, targets in states.TRANSITIONS.items():
            reach[source] |= {end for target in targets for end in reach[target]}
    assert all(reach[state] & states.TERMINAL for state in State)


def test_terminal_is_final() -> None:
    assert {State.CLEANED, State.CREATE_FAILED} == states.TERMINAL


def test_what_may_run_at_the_backend_holds_a_slot() -> None:
    assert {State.CREATING, State.RUNNING, State.CLEANING} == states.SLOT_STATES
    assert not states.SLOT_STATES & states.TERMINAL


@pytest.mark.parametrize(("source", "target"), list(itertools.product(State, State)))
def test_check_follows_the_table(source: State, target: State) -> None:
    if target in states.TRANSITIONS[source]:
        states.check(source, target)
        assert source in states.sources(target)
    else:
        with pytest.raises(StateTransitionError, match=f"{source} cannot become {target}"):
            states.check(source, target)
        assert source not in states.sources(target)
