"""A wrong argument of a handle's method is a ValidationError that names it, before anything is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from managed_e2b import ValidationError
from managed_e2b.testing.steps import Steps

from .conftest import Face, settle

CALLS: dict[str, Callable[[Any], Any]] = {
    "run.*command": lambda handle: handle.run(["ls"]),
    "run.*command.*NUL": lambda handle: handle.run("a\0b"),
    "run.*timeout='5'": lambda handle: handle.run("true", timeout="5"),
    "run.*timeout=-1": lambda handle: handle.run("true", timeout=-1),
    "run.*timeout=nan": lambda handle: handle.run("true", timeout=float("nan")),
    "run.*check": lambda handle: handle.run("true", check="no"),
    "run.*cwd": lambda handle: handle.run("true", cwd=5),
    "run.*cwd.*NUL": lambda handle: handle.run("true", cwd="/a\0b"),
    "run.*envs.*'X': int": lambda handle: handle.run("true", envs={"X": 5}),
    "run.*envs.*NUL": lambda handle: handle.run("true", envs={"X": "a\0b"}),
    "run.*user": lambda handle: handle.run("true", user=""),
    "run.*stdin": lambda handle: handle.run("true", stdin=5),
    "run.*on_stdout": lambda handle: handle.run("true", on_stdout="print"),
    "run.*on_stderr": lambda handle: handle.run("true", on_stderr=1),
    "run_script.*path": lambda handle: handle.run_script(5),
    "run_script.*args": lambda handle: handle.run_script("a.py", "--fast"),
    "run_script.*args.*NUL": lambda handle: handle.run_script("a.py", ["a\0"]),
    "run_script.*interpreter": lambda handle: handle.run_script("a.py", interpreter=""),
    "run.*envs.*not a name": lambda handle: handle.run_script("a.py", envs={"A=B": "x"}),
    "stage_in.*files": lambda handle: handle.stage_in([("a", "b")]),
    "stage_in.*files.*int": lambda handle: handle.stage_in({"fine": "x", "a": 5}),
    "stage_in.*user": lambda handle: handle.stage_in({"a": "b"}, user=0),
    "stage_out.*paths": lambda handle: handle.stage_out("a"),
    "stage_out.*user": lambda handle: handle.stage_out(["a"], user="\0"),
}


@pytest.fixture
async def watched(face: Face) -> AsyncIterator[tuple[Any, Steps]]:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        steps = Steps()
        steps.watch(lifecycle)
        yield handle, steps


async def test_it_is_named_and_nothing_is_sent(watched: tuple[Any, Steps]) -> None:
    handle, steps = watched
    for told, call in CALLS.items():
        with pytest.raises(ValidationError, match=told.replace(".*", r"\(.*", 1)):
            await settle(call(handle))
    assert steps.seen == []
    assert (await settle(handle.run("echo unharmed"))).stdout == "unharmed\n"
