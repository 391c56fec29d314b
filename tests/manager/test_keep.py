"""`keep_on_error`: a block that raises leaves its sandbox to be looked at, for a time that is told."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from managed_e2b import SandboxReleasedError, State, ValidationError

from .conftest import Face, assert_nothing_left, remote_of, settle, until
from .orphans import die


async def test_without_it_a_block_that_raises_ends_its_sandbox(face: Face) -> None:
    lifecycle = face.open()
    with pytest.raises(ZeroDivisionError) as caught:
        async with face.entered(lifecycle.acquire()):
            raise ZeroDivisionError
    assert not hasattr(caught.value, "__notes__")
    await assert_nothing_left(lifecycle)


async def fail(face: Face, lifecycle: Any, **options: Any) -> tuple[Any, list[str]]:
    """A block that raises: its handle, and the notes on the exception."""
    with pytest.raises(ZeroDivisionError) as caught:
        async with face.entered(lifecycle.acquire(keep_on_error=True, **options)) as handle:
            raise ZeroDivisionError
    return handle, caught.value.__notes__


async def test_with_it_the_sandbox_and_its_handle_live_on_and_the_time_is_told(
    face: Face, caplog: pytest.LogCaptureFixture
) -> None:
    lifecycle = face.open()
    handle, (note,) = await fail(face, lifecycle, timeout=600)
    assert handle.sandbox_id in note
    assert "UTC" in note
    assert note in caplog.text
    assert (await settle(handle.run("echo still here"))).stdout == "still here\n"
    (row,) = await settle(lifecycle.records())
    assert (row.state, row.last_error) == (State.RUNNING, "kept: raised ZeroDivisionError")
    await settle(lifecycle.shutdown())
    listed = await settle(face.open(opening_reap=False).list_remote())
    assert handle.sandbox_id not in [item.sandbox_id for item in listed]
    with pytest.raises(SandboxReleasedError):
        await settle(handle.run("true"))


async def test_it_outlives_all_that_holds_it(face: Face) -> None:
    lifecycle = face.open()
    handle, _ = await fail(face, lifecycle, timeout=600)
    sandbox_id = handle.sandbox_id
    del handle
    gc.collect()
    assert list(lifecycle._cleaner.abandoned) == []
    assert await remote_of(lifecycle) == [sandbox_id]


async def test_its_timeout_ends_it(face: Face) -> None:
    lifecycle = face.open(lease=10)
    await fail(face, lifecycle, timeout=3)
    until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "the keeper has ended it")
    assert await remote_of(lifecycle) == []


async def test_a_reaper_ends_it_when_its_owner_is_dead(face: Face) -> None:
    lifecycle = face.open(watchdog=False)
    handle, _ = await fail(face, lifecycle, timeout=600)
    await die(lifecycle)
    report = await settle(face.open(opening_reap=False).reap())
    assert [(item.sandbox_id, item.action) for item in report.items] == [(handle.sandbox_id, "cleaned")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, SystemExit])
async def test_what_ends_the_program_or_the_task_ends_the_sandbox(face: Face, error: type[BaseException]) -> None:
    lifecycle = face.open()
    with pytest.raises(error):
        async with face.entered(lifecycle.acquire(keep_on_error=True)):
            raise error
    await assert_nothing_left(lifecycle)


async def test_a_block_that_succeeds_ends_its_sandbox(face: Face) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire(keep_on_error=True)):
        pass
    await assert_nothing_left(lifecycle)


async def test_anything_but_a_bool_is_refused(face: Face) -> None:
    with pytest.raises(ValidationError, match="keep_on_error"):
        face.open().acquire(keep_on_error="yes")
