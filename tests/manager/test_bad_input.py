"""What cannot work is a typed error at the call that tells what to do, before any sandbox is made."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from managed_e2b import (
    AcquireRequest,
    AsyncSandboxLifecycle,
    AuthenticationError,
    BackendUnavailableError,
    ConfigError,
    LedgerError,
    Me2bError,
    PrewarmError,
    SandboxConfig,
    SandboxLifecycle,
    State,
    ValidationError,
    backend,
)
from managed_e2b.ledger import Ledger

from .conftest import Face, settle, states_of

FACES = pytest.mark.parametrize("kind", [SandboxLifecycle, AsyncSandboxLifecycle], ids=["sync", "async"])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"timeout": 0}, "timeout: .*greater than or equal to 1"),
        ({"timeout": -5}, "timeout"),
        ({"timeout": 90_000}, "timeout: .*86400"),
        ({"timeout": None}, "timeout"),
        ({"timeout": "300"}, "timeout"),
        ({"timeout": 1.5}, "timeout"),
        ({"template": "a", "image": "b"}, "template and image: give one source"),
        ({"image": "a", "dockerfile": "FROM b"}, "image and dockerfile: give one source"),
        ({"template": ""}, "template"),
        ({"metadata": {"a": 1}}, "metadata: 'a': int is not a str"),
        ({"metadata": {1: "a"}}, "metadata: 1"),
        ({"metadata": {"a": "\ud800"}}, "metadata: 'a': .*surrogate"),
        ({"metadata": ["a"]}, "metadata: must be a mapping"),
        ({"metadata": {"me2b_ticket": "x"}}, "metadata: 'me2b_ticket': .*reserved"),
        ({"envs": {"A": None}}, "envs: 'A': NoneType is not a str"),
        ({"envs": {"A=B": "x"}}, "envs: 'A=B' is not a name"),
        ({"envs": {"A": "x\0"}}, "envs: 'A': .*NUL"),
        ({"acquire_timeout": 0}, "acquire_timeout"),
    ],
    ids=str,
)
async def test_a_wrong_argument_is_told_at_the_call(face: Face, values: dict[str, Any], told: str) -> None:
    lifecycle = face.open()
    with pytest.raises(ValidationError, match=told) as caught:
        lifecycle.acquire(**values)
    assert isinstance(caught.value, ValueError)
    assert await states_of(lifecycle) == []


async def test_a_secret_in_envs_is_in_no_error(face: Face) -> None:
    with pytest.raises(ValidationError) as caught:
        face.open().acquire(envs={"A=B": "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("source", [{"image": "python:3.11-slim"}, {"dockerfile": "FROM python:3.11-slim"}], ids=str)
async def test_a_source_that_needs_a_build_says_how_to_get_it(face: Face, source: dict[str, str]) -> None:
    with pytest.raises(PrewarmError, match=r"e2b template build.*template="):
        face.open().acquire(**source)


@FACES
@pytest.mark.parametrize(
    "options",
    [
        {"max_concurrent": 0},
        {"max_concurrent": True},
        {"max_concurrent": "4"},
        {"lease": 5},
        {"lease": 86_401},
        {"lease": 60.0},
        {"create_rate": 0},
        {"create_rate": -1},
        {"create_rate": float("nan")},
        {"stale_timeout": 0},
        {"stale_timeout": float("inf")},
        {"account_limit": 0},
        {"reaper_max_iter": 0},
        {"max_build_concurrency": 0},
        {"backend": "docker"},
    ],
    ids=str,
)
def test_a_wrong_option_is_told_and_leaves_no_ledger(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        kind(tmp_path / "x.db", e2b_key="k", **options)
    assert list(tmp_path.iterdir()) == []


@FACES
def test_no_key_and_no_backend_names_both_ways_out(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r'E2B_API_KEY.*backend="local"'):
        kind(tmp_path / "x.db")
    assert list(tmp_path.iterdir()) == []


@FACES
def test_a_backend_and_an_endpoint_are_two_answers_to_one_question(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        kind(tmp_path / "x.db", backend="local", e2b_key="k")


@FACES
def test_a_ledger_in_a_directory_that_is_not_there(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="create it first"):
        kind(tmp_path / "none" / "x.db", e2b_key="k")


async def test_an_endpoint_that_cannot_be_reached(face: Face) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        lifecycle = face.open(e2b_api_url=f"http://127.0.0.1:{closed.getsockname()[1]}", e2b_key="e2b_00")
        with pytest.raises(BackendUnavailableError, match=r"cannot be reached.*server running"):
            async with face.entered(lifecycle.acquire()):
                pytest.fail("made nowhere")
    assert await states_of(lifecycle) == [State.CREATE_FAILED]


async def test_a_wrong_key(face: Face) -> None:
    key = "e2b_" + "f" * 40
    lifecycle = face.open(e2b_key=key)
    with pytest.raises(AuthenticationError, match="E2B_API_KEY") as caught:
        async with face.entered(lifecycle.acquire()):
            pytest.fail("made with a wrong key")
    assert key not in str(caught.value)
    assert await states_of(lifecycle) == [State.CREATE_FAILED]


async def test_the_key_is_in_no_file_of_the_ledger(face: Face, server: Any) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire(envs={"SECRET": "hunter2hunter2"})):
        pass
    await settle(lifecycle.shutdown())
    for file in face.db.parent.glob(f"{face.db.name}*"):
        content = file.read_bytes()
        assert server.api_key.encode() not in content
        assert b"hunter2hunter2" not in content


def test_an_opening_that_fails_leaves_no_local_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any) -> None:
        raise LedgerError("disk full")

    monkeypatch.setattr(Ledger, "open_owner", refuse)
    with pytest.raises(LedgerError):
        SandboxLifecycle(tmp_path / "x.db", backend="local")
    assert backend._local_server._server is None


@pytest.mark.parametrize("kind", [SandboxConfig, AcquireRequest])
def test_values_of_variables_show_up_neither_in_an_error_nor_in_a_repr(kind: Any) -> None:
    assert "secret" not in repr(kind(envs={"KEY": "secret"}))
    with pytest.raises(ValueError, match="envs") as caught:
        kind(envs={"KEY": "secret", "OTHER": 1})
    assert "secret" not in str(caught.value)


def test_all_errors_share_one_base() -> None:
    import managed_e2b

    errors = [value for name, value in vars(managed_e2b).items() if name.endswith("Error") and isinstance(value, type)]
    assert len(errors) > 15
    assert all(issubclass(error, Me2bError) for error in errors)
