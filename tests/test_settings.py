from __future__ import annotations

import os
from pathlib import Path

import pytest

from managed_e2b import ConfigError, E2BConfig, get_e2b_config, load_env


def test_no_key_names_both_ways_out() -> None:
    with pytest.raises(ConfigError, match="E2B_API_KEY") as caught:
        get_e2b_config(environ={}, env_file=None)
    assert 'backend="local"' in str(caught.value)


def test_arguments_win_over_the_environment_and_it_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "some.env"
    file.write_text("E2B_API_KEY=from-file\nE2B_DOMAIN='file.example'\n# a comment\nexport OTHER=1\n")
    environment = {"E2B_API_KEY": "from-environment"}
    assert get_e2b_config(environ={}, env_file=file).api_key == "from-file"
    config = get_e2b_config(environ=environment, env_file=file)
    assert (config.api_key, config.endpoint) == ("from-environment", "https://api.file.example")
    config = get_e2b_config(environ=environment, env_file=file, e2b_key="given", e2b_api_url="http://127.0.0.1:1/")
    assert (config.api_key, config.api_url, config.sandbox_url) == ("given", "http://127.0.0.1:1", "http://127.0.0.1:1")


def test_nothing_is_written_into_the_environment(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("ME2B_TEST_VARIABLE=1\nE2B_API_KEY=k\n")
    before = dict(os.environ)
    assert load_env(file)["ME2B_TEST_VARIABLE"] == "1"
    get_e2b_config(env_file=file)
    assert dict(os.environ) == before


def test_a_named_file_must_exist_and_the_default_one_need_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_env() == {}
    with pytest.raises(ConfigError, match=r"no such \.env file"):
        load_env(tmp_path / "none.env")


def test_the_key_is_in_no_repr_and_the_account_does_not_give_it_away() -> None:
    config = E2BConfig("e2b_secretsecret", api_url="https://api.example")
    assert "secretsecret" not in repr(config)
    assert "secretsecret" not in config.account
    assert config.account != E2BConfig("e2b_other", api_url="https://api.example").account
    assert config.account != E2BConfig("e2b_secretsecret", api_url="https://other.example").account


@pytest.mark.parametrize("url", ["api.e2b.app", "ftp://x", "http://", "http://host:notaport", "http://host:0"])
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL such as"):
        get_e2b_config(e2b_api_url=url, e2b_key="k", environ={})


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "ümlaut"])
def test_a_key_with_stray_characters_is_told_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match="E2B_API_KEY holds characters") as caught:
        get_e2b_config(e2b_key=key, environ={})
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://127.0.0.1:7820", True),
        ("http://localhost:1", True),
        ("http://[::1]:2", True),
        ("https://e2b.app", False),
    ],
)
def test_loopback_is_told_apart(url: str, loopback: bool) -> None:
    assert E2BConfig("k", api_url=url).is_loopback is loopback


def test_a_sandbox_url_of_another_endpoint_is_refused() -> None:
    environment = {"E2B_SANDBOX_URL": "http://127.0.0.1:7820"}
    with pytest.raises(ConfigError, match="E2B_SANDBOX_URL is set in the environment"):
        get_e2b_config(e2b_api_url="https://api.example.com", e2b_key="k", environ=environment)
    config = get_e2b_config(e2b_api_url="http://127.0.0.1:1", e2b_key="k", environ=environment)
    assert config.sandbox_url == "http://127.0.0.1:1"


def test_an_empty_variable_does_not_hide_the_file(tmp_path: Path) -> None:
    file = tmp_path / "some.env"
    file.write_text("E2B_API_KEY=from-file\n")
    assert get_e2b_config(env_file=file, environ={"E2B_API_KEY": ""}).api_key == "from-file"


def test_a_url_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="without user and password") as caught:
        get_e2b_config(e2b_api_url="https://user:hunter2@example.com", e2b_key="k", environ={})
    assert "hunter2" not in str(caught.value)
