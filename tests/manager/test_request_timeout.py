"""`request_timeout`: how long one request to the control plane may take. A create that runs into it is found again."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from managed_e2b import AsyncSandboxLifecycle, BackendError, ConfigError, SandboxCreateError, SandboxLifecycle, State
from managed_e2b.engine import release
from managed_e2b.testing import Chaos, TestServer

from .conftest import Face, assert_nothing_left, remote_of, settle

SHORT = 0.5
USUAL = 60.0
"""What the SDK gives a call when nobody says otherwise."""


@pytest.fixture(params=["sync", "async"])
async def face(
    request: pytest.FixtureRequest, me2b_server: TestServer, me2b_chaos: Chaos, tmp_path: Path
) -> AsyncIterator[Face]:
    face = Face(request.param, me2b_server, tmp_path / "sandboxes.db")
    yield face
    me2b_chaos.reset()
    await face.close()


async def test_a_create_that_hangs_and_took_effect_ends_by_it_and_is_adopted(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open(request_timeout=SHORT)
    me2b_chaos.on("create").first().after().hang()
    async with face.entered(lifecycle.acquire()) as handle:
        assert await remote_of(lifecycle) == [handle.sandbox_id]
        assert handle.sandbox.connection_config.request_timeout == USUAL, "its user's own calls are the SDK's"
        assert (await settle(handle.run("sleep 1.5; echo done"))).stdout == "done\n"
    assert me2b_chaos.journal().count("create") == 1
    await assert_nothing_left(lifecycle)


async def test_a_create_that_hangs_and_took_no_effect_is_told_with_its_ticket(
    face: Face, me2b_chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "FIND_PATIENCE", 0.0)
    lifecycle = face.open(request_timeout=SHORT)
    hang = me2b_chaos.on("create").hang()
    with pytest.raises(SandboxCreateError, match="not known yet") as caught:
        async with face.entered(lifecycle.acquire()):
            pytest.fail("made by a create that hangs")
    (row,) = await settle(lifecycle.records())
    assert (row.ticket, row.state) == (caught.value.ticket, State.CLEANING)
    me2b_chaos.remove(hang)
    async with face.entered(lifecycle.acquire()) as handle:
        assert handle.sandbox.connection_config.request_timeout == USUAL


async def test_every_other_call_ends_by_it_too(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open(request_timeout=SHORT, opening_reap=False)
    async with face.entered(lifecycle.acquire()) as handle:
        me2b_chaos.on("info", "timeout", "connect", "list", "kill").hang()
        for sdk in (lifecycle._engine.driver.sdk, lifecycle._cleaner.driver.sdk):
            for call, *arguments in ((sdk.kill,), (sdk.info,), (sdk.set_timeout, 60), (sdk.adopt, 60)):
                with pytest.raises(BackendError):
                    await call(handle.sandbox_id, *arguments)
        with pytest.raises(BackendError):
            await settle(lifecycle.list_remote())
        me2b_chaos.reset()
    await assert_nothing_left(lifecycle)


@pytest.mark.parametrize("kind", [SandboxLifecycle, AsyncSandboxLifecycle])
@pytest.mark.parametrize("value", [0, -1, "5", True, math.nan, math.inf])
def test_what_is_no_number_of_seconds_is_refused(kind: Any, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="request_timeout"):
        kind(tmp_path / "x.db", e2b_key="k", request_timeout=value)
    assert list(tmp_path.iterdir()) == []
