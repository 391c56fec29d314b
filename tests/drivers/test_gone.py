"""Errors of ours that are the SDK's own, too."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from e2b import exceptions as sdk

from managed_e2b import errors
from managed_e2b.drivers.gone import combined

DEAD = [
    errors.SandboxExpiredError,
    errors.SandboxGoneError,
    errors.SandboxKilledError,
    errors.SandboxLapsedError,
    errors.SandboxLostError,
    errors.SandboxReapedError,
    errors.SandboxReleasedError,
]
NOT_RUNNING = getattr(sdk, "SandboxNotRunningException", sdk.TimeoutException)
NOT_FOUND = getattr(sdk, "SandboxNotFoundException", sdk.NotFoundException)
UNREACHABLE = getattr(sdk, "SandboxUnreachableException", sdk.TimeoutException)


@pytest.mark.parametrize("kind", DEAD)
def test_what_is_dead_is_caught_by_either_word_of_the_sdk(kind: type[errors.SandboxGoneError]) -> None:
    made = combined(kind)
    assert issubclass(made, kind)
    assert issubclass(made, NOT_RUNNING)
    assert issubclass(made, NOT_FOUND)
    assert not issubclass(made, TimeoutError)


def test_what_is_paused_is_not_running_but_it_is_found() -> None:
    made = combined(errors.SandboxPausedError)
    assert issubclass(made, NOT_RUNNING)
    assert not issubclass(made, NOT_FOUND)


def test_what_is_unreachable_is_not_called_dead() -> None:
    made = combined(errors.SandboxUnreachableError)
    assert issubclass(made, UNREACHABLE)
    assert not issubclass(made, errors.SandboxGoneError)
    if hasattr(sdk, "SandboxNotRunningException"):
        assert not issubclass(made, NOT_RUNNING)


def test_other_errors_stay_what_they_are() -> None:
    assert combined(errors.StageError) is errors.StageError


def test_a_class_is_made_once() -> None:
    assert combined(errors.SandboxLostError) is combined(errors.SandboxLostError)


def test_it_goes_through_a_process_pool() -> None:
    error = combined(errors.SandboxLostError)("gone", sandbox_id="i1", reason="lost: x", ticket="t", noticed_at=7)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.sandbox_id, again.reason, again.ticket) == ("gone", "i1", "lost: x", "t")
    assert (again.ending, again.noticed_at, again.ended_at) == ("lost", 7, None)
    unreachable = pickle.loads(pickle.dumps(combined(errors.SandboxUnreachableError)("silent", running=True)))
    assert (str(unreachable), unreachable.running, unreachable.status) == ("silent", True, None)


def test_the_errors_need_no_sdk() -> None:
    program = "import sys; sys.modules['e2b'] = None; import managed_e2b.errors as e; print(e.SandboxLostError.ending)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "lost\n", done.stderr
