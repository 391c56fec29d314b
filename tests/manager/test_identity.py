"""A row tells what its sandbox was: what was asked for, what that stood for, and which versions made it."""

from __future__ import annotations

from typing import Any

import pytest

from managed_e2b import BackendError, State
from managed_e2b.drivers.sdk import SDK_VERSION
from managed_e2b.engine import identity, keeper
from managed_e2b.local.model import ENVD_VERSION
from managed_e2b.testing import Chaos

from .conftest import Face, settle, until


@pytest.fixture
def server(me2b_server: Any, me2b_chaos: Chaos) -> Any:
    """This room's lifecycles run against the server with the journal."""
    return me2b_server


async def row_of(lifecycle: Any) -> Any:
    (row,) = await settle(lifecycle.records())
    return row


async def resolved(lifecycle: Any, handle: Any) -> str:
    """The template's id, by the backend's own word."""
    (remote,) = [one for one in await settle(lifecycle.list_remote()) if one.sandbox_id == handle.sandbox_id]
    return str(remote.template)


async def test_the_row_of_a_good_run_tells_template_versions_and_tags(face: Face, me2b_chaos: Chaos) -> None:
    """Which template a run really had could be found nowhere once its sandbox was gone."""
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire("base", metadata={"run": "7", "task": "humaneval/3"})) as handle:
        template_id = await resolved(lifecycle, handle)
    row = await row_of(lifecycle)
    assert (row.state, row.source_kind, row.source) == (State.CLEANED, "template", "base")
    assert (row.template_id, row.envd_version, row.sdk_version) == (template_id, ENVD_VERSION, SDK_VERSION)
    assert row.metadata == {"run": "7", "task": "humaneval/3"}


async def test_what_runs_longer_is_identified_while_it_runs_with_one_list_for_all(
    face: Face, me2b_chaos: Chaos
) -> None:
    lifecycle = face.open(max_concurrent=3)
    async with (
        face.entered(lifecycle.acquire()) as handle,
        face.entered(lifecycle.acquire()),
        face.entered(lifecycle.acquire()),
    ):
        until(lambda: all(row.template_id for row in lifecycle._book.records()), "all rows tell what they are")
        lists = me2b_chaos.journal().count("list")
        assert lists <= 3
        assert {row.template_id for row in await settle(lifecycle.records())} == {await resolved(lifecycle, handle)}
        asked = me2b_chaos.journal().count("info")
    # What is known is not asked for again: one look a sandbox, the proof of its death.
    assert me2b_chaos.journal().count("info") - asked == 3


async def test_a_backend_that_does_not_tell_holds_nothing_up(
    face: Face, me2b_chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "TICK", 0.05)
    lifecycle = face.open(opening_reap=False)
    looks = 0

    async def failing(metadata: Any = None) -> Any:
        nonlocal looks
        looks += 1
        raise BackendError("503", status=503)
        yield

    lifecycle._cleaner.driver.sdk.pages = failing
    async with face.entered(lifecycle.acquire()):
        until(lambda: not lifecycle._engine.unidentified, "it has given up")
        assert looks == identity.LOOKS
        me2b_chaos.on("info").first().status(503, retry=False)
    row = await row_of(lifecycle)
    assert (row.state, row.template_id) == (State.CLEANED, None)
