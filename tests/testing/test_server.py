from __future__ import annotations

from pathlib import Path

import pytest
from e2b import Sandbox

import managed_e2b.testing
from managed_e2b import SandboxLifecycle
from managed_e2b.local.background import LocalServerProcess
from managed_e2b.testing import ChaosError, ChaosScript, TestServer, local_server


@pytest.mark.usefixtures("me2b_server")  # skips where the host cannot run one
def test_a_server_lives_as_long_as_its_block_and_plays_its_script_from_the_start() -> None:
    script = ChaosScript(seed=5)
    script.on("list").nth(1).status(418)
    with local_server(chaos=script) as server:
        assert server.alive
        assert [item.rule for item in server.chaos.installed()] == list(script.script.rules)
        with pytest.raises(Exception, match="418"):
            Sandbox.list(api_key=server.api_key, api_url=server.url).next_items()
        pid = server.pid
        assert pid is not None
    assert not server.alive
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.usefixtures("me2b_server")
def test_a_server_without_chaos_has_none() -> None:
    with local_server() as server:
        with pytest.raises(RuntimeError, match="chaos=True"):
            _ = server.chaos
        with pytest.raises(ChaosError, match="a server without chaos"):
            managed_e2b.testing.Chaos(server.url, server.api_key).journal()


def test_the_shared_server_of_the_other_tests_has_no_chaos(server: LocalServerProcess) -> None:
    with pytest.raises(ChaosError, match="a server without chaos"):
        managed_e2b.testing.Chaos(server.url, server.api_key).on("create").hang()


@pytest.mark.usefixtures("me2b_chaos")
def test_what_lives_there_is_known_whatever_lists_say(me2b_server: TestServer, tmp_path: Path) -> None:
    me2b_server.chaos.on("list").empty()
    before = me2b_server.live()
    with (
        SandboxLifecycle(tmp_path / "s.db", e2b_api_url=me2b_server.url, e2b_key=me2b_server.api_key) as lifecycle,
        lifecycle.acquire() as handle,
    ):
        assert lifecycle.list_remote() == []
        assert me2b_server.live() == before + 1
        (created,) = me2b_server.chaos.journal().of("create")
        assert (created.sandbox_id, created.owner) == (handle.sandbox_id, lifecycle.owner_id)
        assert created.ticket is not None
    assert me2b_server.live() == before
    assert [request.ticket for request in me2b_server.chaos.journal().of("kill")] == [created.ticket]


@pytest.mark.usefixtures("me2b_chaos")
def test_a_server_is_cleared_whatever_is_wrong_with_it(me2b_server: TestServer) -> None:
    connection = {"api_key": me2b_server.api_key, "api_url": me2b_server.url, "sandbox_url": me2b_server.url}
    Sandbox.create(**connection)
    Sandbox.create(**connection).pause()
    me2b_server.chaos.on("kill", "list").drop()
    me2b_server.clear()
    assert me2b_server.live() == 0
    assert me2b_server.chaos.journal().count("kill") == 0


def test_the_environment_points_a_program_at_it(me2b_server: TestServer) -> None:
    assert me2b_server.environment == {
        "E2B_API_URL": me2b_server.url,
        "E2B_SANDBOX_URL": me2b_server.url,
        "E2B_VOLUME_API_URL": me2b_server.url,
        "E2B_API_KEY": me2b_server.api_key,
        "NO_PROXY": "127.0.0.1,localhost",
    }


@pytest.mark.parametrize("name", managed_e2b.testing.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(managed_e2b.testing, name).__doc__


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = managed_e2b.testing.nothing_of_the_kind
