"""Between the wish for a sandbox and its use: whatever goes wrong there, nothing is made that nobody knows of."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from managed_e2b import (
    BackendError,
    CommandError,
    SandboxCreateError,
    StageError,
    State,
    TemplateNotFoundError,
)
from managed_e2b.engine import listing, release
from managed_e2b.models import RemoteSandbox
from managed_e2b.testing import Chaos

from .conftest import Face, assert_nothing_left, settle, states_of, until
from .orphans import entered


@pytest.fixture
def server(me2b_server: Any, me2b_chaos: Chaos) -> Any:
    """This room's lifecycles run against the server with chaos."""
    return me2b_server


# -- answers that do not come, or are not true -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_create_that_took_effect_and_whose_connection_broke_is_one_sandbox_and_one_request(
    face: Face, server: Any, me2b_chaos: Chaos, how: Any
) -> None:
    """An ambiguous create could not be tried again safely."""
    me2b_chaos.on("create").first().after().drop(how)
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        (create,) = me2b_chaos.journal().of("create")
        assert (create.effect, create.status, create.sandbox_id) == (201, None, handle.sandbox_id)
        assert server.live() == 1
        assert (await settle(handle.run("echo here"))).stdout == "here\n"
    assert server.live() == 0
    assert await states_of(lifecycle) == [State.CLEANED]


async def test_a_create_that_broke_before_it_took_effect_makes_nothing_and_is_not_repeated(
    face: Face, server: Any, me2b_chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "FIND_PATIENCE", 0.0)
    me2b_chaos.on("create").first().before().drop()
    with pytest.raises(SandboxCreateError):
        async with face.entered(face.open().acquire()):
            pytest.fail("nothing was made")
    assert me2b_chaos.journal().count("create") == 1
    assert server.live() == 0


@pytest.mark.parametrize(("status", "kind"), [(404, TemplateNotFoundError), (400, BackendError), (403, BackendError)])
async def test_a_create_that_took_effect_and_was_answered_as_refused_is_killed_before_the_error_comes_out(
    face: Face, server: Any, me2b_chaos: Chaos, status: int, kind: type[BackendError]
) -> None:
    """It was visible at the provider, never returned, and gone minutes later."""
    me2b_chaos.on("create").first().after().status(status)
    lifecycle = face.open()
    with pytest.raises(kind) as caught:
        async with face.entered(lifecycle.acquire()):
            pytest.fail("refused")
    assert server.live() == 0
    assert caught.value.status == status
    (create,) = me2b_chaos.journal().of("create")
    assert create.effect == 201
    (row,) = await settle(lifecycle.records())
    assert (row.state, row.sandbox_id) == (State.CLEANED, create.sandbox_id)


async def test_a_connect_that_is_refused_for_a_while_does_not_cost_the_sandbox_that_is_adopted(
    face: Face, me2b_chaos: Chaos
) -> None:
    me2b_chaos.on("create").first().after().drop()
    me2b_chaos.on("connect").first(2).status(429, retry_after=1)
    async with face.entered(face.open().acquire()) as handle:
        assert (await settle(handle.run("echo here"))).stdout == "here\n"
    journal = me2b_chaos.journal()
    assert (journal.count("create"), journal.count("connect")) == (1, 3)


async def test_a_lookup_reads_a_bounded_number_of_pages_and_believes_no_strangers(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint that ignores the filter and has thousands of sandboxes, none of them ours."""
    monkeypatch.setattr(release, "FIND_PATIENCE", 0.0)
    lifecycle = face.open()
    sdk, pages = lifecycle._engine.driver.sdk, 0

    async def endless(metadata: Any = None) -> Any:
        nonlocal pages
        while True:
            pages += 1
            yield [RemoteSandbox(f"i{pages:019d}", "base", "running", {}, 0, 0)]

    async def lost(**values: Any) -> Any:
        raise BackendError("504", status=504)

    sdk.pages, sdk.create = endless, lost
    with pytest.raises(SandboxCreateError):
        async with face.entered(lifecycle.acquire()):
            pytest.fail("nothing was made")
    assert pages == listing.LOOKUP_PAGES


# -- cancelled in the making -------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["async"], indirect=True)
@pytest.mark.parametrize("patience", [3.0, 0.0], ids=["found by the release", "found by the keeper"])
async def test_a_task_that_is_cancelled_while_its_sandbox_is_made_is_free_at_once_and_the_sandbox_is_killed(
    face: Face, server: Any, me2b_chaos: Chaos, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """A cancellation is no `Exception`; what was in the making had no name yet, and no cancellation ended the wait."""
    monkeypatch.setattr(release, "FIND_PATIENCE", patience)
    me2b_chaos.on("create").first().before().delay(1.5)
    lifecycle = face.open()
    task = asyncio.create_task(entered(face, lifecycle.acquire()))
    await asyncio.to_thread(me2b_chaos.wait_for, "create")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert me2b_chaos.journal().of("create")[0].effect is None, "the caller had not to wait for it"
    await asyncio.to_thread(until, lambda: me2b_chaos.journal().of("create")[0].effect == 201, "it is made after all")
    (row,) = await asyncio.to_thread(until, lambda: lifecycle._book.records(states_=[State.CLEANED]), "its row ends")
    (create,) = me2b_chaos.journal().of("create")
    assert (row.sandbox_id, row.reason) == (create.sandbox_id, "cancelled")
    assert server.live() == 0


@pytest.mark.parametrize("face", ["async"], indirect=True)
async def test_a_shutdown_waits_for_no_create_that_never_ends(face: Face, server: Any, me2b_chaos: Chaos) -> None:
    """A create could not be given up for minutes."""
    me2b_chaos.on("create").first().before().delay(60)
    lifecycle = face.open()
    task = asyncio.create_task(entered(face, lifecycle.acquire()))
    await asyncio.to_thread(me2b_chaos.wait_for, "create")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (left,) = await lifecycle.shutdown(timeout=1.0)
    assert (left.state, left.sandbox_id, left.reason) == (State.CLEANING, None, "cancelled")
    assert me2b_chaos.journal().of("create")[0].effect is None, "and nobody waited for the minute"


# -- set up, and in use ------------------------------------------------------------------------------------------


async def test_the_ledger_knows_the_id_before_the_first_line_of_the_block(face: Face) -> None:
    """A job that was done at once was over before its sandbox's id had been stored."""
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        with sqlite3.connect(face.db) as connection:
            rows = connection.execute("SELECT state, sandbox_id, ticket FROM sandboxes").fetchall()
        connection.close()
        assert rows == [("running", handle.sandbox_id, handle.ticket)]
    await assert_nothing_left(lifecycle)


SETUPS: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "a file of the caller's that is not there": (lambda handle: handle.stage_in({"x": Path("/nowhere/x")}), StageError),
    "a file that the sandbox does not take": (lambda handle: handle.stage_in({"x": "y"}), StageError),
    "a command": (lambda handle: handle.run("exit 3", check=True), CommandError),
}


@pytest.mark.parametrize("setup", SETUPS)
async def test_a_setup_that_fails_ends_the_sandbox_before_its_error_reaches_the_caller(
    face: Face, server: Any, me2b_chaos: Chaos, setup: str
) -> None:
    """What had been created was not rolled back when the next step failed."""
    me2b_chaos.on("files.write").status(507)
    lifecycle = face.open()
    step, kind = SETUPS[setup]
    with pytest.raises(kind):
        async with face.entered(lifecycle.acquire()) as handle:
            await settle(step(handle))
    assert server.live() == 0
    assert await states_of(lifecycle) == [State.CLEANED]


async def test_setups_that_fail_again_and_again_pile_nothing_up(face: Face, server: Any, me2b_chaos: Chaos) -> None:
    """Ten retries left ten sandboxes: the cleanup did not belong to what had raised."""
    lifecycle = face.open(max_concurrent=10)
    for _ in range(10):
        with pytest.raises(CommandError):
            async with face.entered(lifecycle.acquire()) as handle:
                await settle(handle.run("exit 3", check=True))
    assert server.live() == 0
    journal = me2b_chaos.journal()
    assert (journal.count("create"), journal.peak_present) == (10, 1)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is forgotten has to be let go of without the help of Python's collector, which may come in minutes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def held(face: Face, contexts: list[Any]) -> list[Any]:
    """Entered contexts and their handles, which nobody else holds."""
    return [(context, await entered(face, context)) for context in contexts]


@pytest.mark.usefixtures("no_collector")
async def test_a_group_that_is_built_anew_and_forgets_the_old_one_leaves_nothing_and_keeps_the_cap(
    face: Face, server: Any, me2b_chaos: Chaos
) -> None:
    """A retry overwrote the list of handles, of which the first three worked."""
    me2b_chaos.on("create").nth(4, 8, 12).status(400)
    lifecycle = face.open(max_concurrent=4)
    failures, group = 0, []
    while not group:
        try:
            group = await held(face, [lifecycle.acquire(acquire_timeout=30) for _ in range(4)])
        except BackendError:
            failures += 1
    assert failures == 3
    assert len({handle.sandbox_id for _, handle in group}) == 4
    assert server.live() == 4
    await settle(lifecycle.shutdown())
    assert server.live() == 0
    journal = me2b_chaos.journal()
    assert (journal.count("create"), journal.peak_present) == (16, 4)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("fault", ["refused for a while", "not answered"])
async def test_what_is_forgotten_after_a_create_that_went_wrong_at_first_is_released(
    face: Face, server: Any, me2b_chaos: Chaos, fault: str
) -> None:
    create = me2b_chaos.on("create").first()
    if fault == "not answered":
        create.after().drop()
    else:
        create.status(429, retry_after=1)
    lifecycle = face.open()
    await held(face, [lifecycle.acquire()])
    (row,) = await asyncio.to_thread(until, lambda: lifecycle._book.records(states_=[State.CLEANED]), "it is released")
    assert row.reason == "abandoned: nobody holds its handle"
    assert server.live() == 0
