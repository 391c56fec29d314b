"""A sandbox that is broken, too old, or does not answer says so, soon; a command in it never looks like a success."""

from __future__ import annotations

from typing import Any

import e2b
import pytest

from managed_e2b import BackendError, SandboxUnreachableError, State, TemplateOutdatedError
from managed_e2b.drivers import sdk
from managed_e2b.engine import release, streams
from managed_e2b.local.model import ENVD_VERSION
from managed_e2b.testing import Chaos

from .conftest import Face, assert_nothing_left, settle, states_of, until
from .proxy import Proxy


@pytest.fixture
def server(me2b_server: Any, me2b_chaos: Chaos) -> Any:
    """This room's lifecycles run against the server with chaos."""
    return me2b_server


BREAK = {
    "the shell is gone": "/usr/bin/rm /bin",
    "no user is known": "rm /etc/passwd",
}


@pytest.mark.parametrize("how", BREAK)
async def test_a_sandbox_that_can_start_nothing_any_more_is_unreachable_and_no_command_of_it_succeeds(
    face: Face, how: str
) -> None:
    """A model broke its sandbox, and the run was logged as a success."""
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle:
        await settle(handle.run(BREAK[how], user="root"))
        for command in ("true", "echo still here"):
            with pytest.raises(SandboxUnreachableError, match="it runs, says the backend") as caught:
                await settle(handle.run(command))
            assert caught.value.running is True
            assert isinstance(caught.value, getattr(e2b, "SandboxUnreachableException", e2b.TimeoutException))
    await assert_nothing_left(lifecycle)


async def test_a_command_that_is_refused_in_a_sandbox_that_works_is_not_called_a_broken_sandbox(face: Face) -> None:
    async with face.entered(face.open().acquire()) as handle:
        for wrong in ({"cwd": "/nowhere"}, {"user": "nosuchuser"}):
            with pytest.raises(BackendError) as caught:
                await settle(handle.run("true", **wrong))
            assert not isinstance(caught.value, SandboxUnreachableError)
        assert (await settle(handle.run("true"))).ok


async def test_an_agent_that_dies_under_a_command_and_stays_dead_is_told_and_is_no_result(
    face: Face, me2b_chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PATIENCE", 1.0)
    async with face.entered(face.open().acquire()) as handle:
        me2b_chaos.on("process.start").first().cut("reset", after_events=2)
        me2b_chaos.on("process.connect", "process.list", "health").status(502, message="port is not open")
        with pytest.raises(SandboxUnreachableError) as caught:
            await settle(handle.run("echo first; sleep 60", timeout=50))
        assert caught.value.running is True
        me2b_chaos.calm()


async def test_an_agent_that_is_too_old_is_told_at_once_and_leaves_nothing(face: Face, server: Any) -> None:
    """An SDK and an agent that did not fit together hung, and said nothing."""
    old = "0.0.9".ljust(len(ENVD_VERSION), "0")
    with Proxy(server.url, replace=(ENVD_VERSION.encode(), old.encode())) as proxy:
        lifecycle = face.open(e2b_api_url=proxy.url)
        with pytest.raises(TemplateOutdatedError, match=r"'base'.*build the template anew"):
            async with face.entered(lifecycle.acquire()):
                pytest.fail("nobody can talk to it")
        assert server.live() == 0
        assert await states_of(lifecycle) == [State.CREATE_FAILED]


# -- an endpoint that takes a connection, and never answers ------------------------------------------------------


async def test_calls_that_are_never_answered_end_by_their_deadline_and_nobody_else_waits_for_them(
    face: Face, server: Any, me2b_chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk, "CONTROL_TIMEOUT", 1.0)
    monkeypatch.setattr(release, "PATIENCE", 1.0)
    lifecycle = face.open(opening_reap=False)
    async with face.entered(lifecycle.acquire()) as other:
        async with face.entered(lifecycle.acquire()) as handle:
            hang = me2b_chaos.on("list").hang()
            for call in (lifecycle.list_remote, lifecycle.list_remote):
                with pytest.raises(BackendError):
                    await settle(call())
            me2b_chaos.remove(hang)
            hang = me2b_chaos.on("info").where(sandbox_id=handle.sandbox_id).hang()
            report = await settle(lifecycle.reconcile())
            assert [item.sandbox_id for item in report.of("unknown")] == [handle.sandbox_id]
            assert [item.sandbox_id for item in report.of("running")] == [other.sandbox_id]
            me2b_chaos.remove(hang)
            me2b_chaos.on("kill").where(sandbox_id=handle.sandbox_id).hang()
        (row,) = [row for row in await settle(lifecycle.records()) if row.ticket == handle.ticket]
        assert (row.state, row.reason) == (State.CLEANING, "released")
        assert (await settle(other.run("echo fine"))).stdout == "fine\n"
    assert [row.sandbox_id for row in await settle(lifecycle.records([State.CLEANED]))] == [other.sandbox_id]
    me2b_chaos.calm()
    until(lambda: len(lifecycle._book.records(states_=[State.CLEANED])) == 2, "the keeper has ended it")
    assert server.live() == 0


async def test_a_whole_endpoint_that_went_deaf_holds_nobody_for_long_and_loses_nothing(
    face: Face, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk, "CONTROL_TIMEOUT", 1.0)
    monkeypatch.setattr(release, "PATIENCE", 1.0)
    with Proxy(server.url) as proxy:
        lifecycle = face.open(e2b_api_url=proxy.url, opening_reap=False)
        async with face.entered(lifecycle.acquire()) as handle:
            handle.sandbox.connection_config.request_timeout = 1.0
            proxy.deafen()
            with pytest.raises(BackendError):
                await settle(lifecycle.list_remote())
            with pytest.raises(SandboxUnreachableError) as caught:
                await settle(handle.run("true"))
            assert caught.value.running is None
        assert await states_of(lifecycle) == [State.CLEANING]
        assert server.live() == 1
        proxy.hear()
        until(lambda: lifecycle._book.records(states_=[State.CLEANED]), "the keeper has ended it")
    assert server.live() == 0
