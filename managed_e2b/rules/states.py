"""The only state machine of a sandbox's life; the SQL lists, the CHECK constraint and the docs derive from it.

    queued → creating → running ⇄ paused          running | paused | creating → cleaning → cleaned
    queued → cleaned (gave up waiting)             creating | cleaning → create_failed (proved that nothing exists)

A row holds a slot from before its create until it is proved dead: SLOT_STATES.
"""

from __future__ import annotations

from ..errors import StateTransitionError
from ..models import State

TRANSITIONS: dict[State, frozenset[State]] = {
    # a slot came free, or the caller gave up waiting (nothing was ever sent)
    State.QUEUED: frozenset({State.CREATING, State.CLEANED}),
    # the answer came; or it never came and somebody must look; or the endpoint refused and nothing exists
    State.CREATING: frozenset({State.RUNNING, State.CLEANING, State.CREATE_FAILED}),
    # paused on purpose, or claimed by whoever cleans it
    State.RUNNING: frozenset({State.PAUSED, State.CLEANING}),
    State.PAUSED: frozenset({State.RUNNING, State.CLEANING}),
    # proved dead by a per-id answer; or proved by lookup and time never to have existed
    State.CLEANING: frozenset({State.CLEANED, State.CREATE_FAILED}),
    # terminal is final
    State.CLEANED: frozenset(),
    State.CREATE_FAILED: frozenset(),
}

TERMINAL: frozenset[State] = frozenset(state for state, targets in TRANSITIONS.items() if not targets)

SLOT_STATES: frozenset[State] = frozenset({State.CREATING, State.RUNNING, State.CLEANING})
"""What counts against the caps: anything that may be running at the backend."""

CLEANABLE: frozenset[State] = frozenset(
    state for state, targets in TRANSITIONS.items() if State.CLEANING in targets or state is State.CLEANING
)
"""States whose row may be claimed for cleaning (again)."""


def sources(target: State) -> frozenset[State]:
    """The states from which `target` can be reached in one step."""
    return frozenset(state for state, targets in TRANSITIONS.items() if target in targets)


def check(source: State, target: State) -> None:
    """Raise StateTransitionError unless the edge exists."""
    if target not in TRANSITIONS[source]:
        allowed = ", ".join(sorted(TRANSITIONS[source])) or "nothing: it is terminal"
        raise StateTransitionError(f"a sandbox that is {source} cannot become {target} (it can become {allowed})")
