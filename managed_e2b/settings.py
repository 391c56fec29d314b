"""Which endpoint, which key: arguments, then the environment, then a `.env`; read once, never written anywhere."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from dotenv import dotenv_values

from .errors import ConfigError

__all__ = ["E2BConfig", "get_e2b_config", "load_env"]

DEFAULT_DOMAIN = "e2b.app"

_NO_BACKEND = (
    "no E2B key and no backend: either set E2B_API_KEY (in the environment, in a .env file, or as e2b_key=) "
    'to use E2B or a compatible endpoint, or pass backend="local" to run sandboxes on this machine'
)


@dataclass(frozen=True)
class E2BConfig:
    """An endpoint and its key. The key is left out of `repr` and of every message."""

    api_key: str = field(repr=False)
    api_url: str | None = None
    sandbox_url: str | None = None
    domain: str | None = None

    @property
    def endpoint(self) -> str:
        """The control plane's URL, for people and for the account's identity."""
        return self.api_url or f"https://api.{self.domain or DEFAULT_DOMAIN}"

    @property
    def account(self) -> str:
        """A name for 'this key at this endpoint' that gives neither away: 16 hex digits of a SHA-256."""
        return hashlib.sha256(f"{self.endpoint}\0{self.api_key}".encode()).hexdigest()[:16]

    @property
    def is_loopback(self) -> bool:
        """Whether the endpoint is on this machine (a local server: E2B's own rate limits do not apply)."""
        host = urlsplit(self.endpoint).hostname or ""
        return host == "localhost" or host.startswith("127.") or host == "::1"


def load_env(path: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """The variables of a `.env` file, as a dict; `os.environ` is left alone.

    Without a path, `.env` in the working directory is read when it is there. A path that is named must exist.
    Raises ConfigError.
    """
    file = Path(path) if path is not None else Path(".env")
    if not file.is_file():
        if path is not None:
            raise ConfigError(f"{file}: no such .env file")
        return {}
    try:
        values = dotenv_values(file, interpolate=False)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as a .env file ({type(error).__name__})") from error
    return {key: value for key, value in values.items() if value is not None}


def get_e2b_config(
    *,
    e2b_api_url: str | None = None,
    e2b_key: str | None = None,
    env_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> E2BConfig:
    """The endpoint to use: arguments win over the environment, the environment over the `.env` file.

    Read are E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL and E2B_DOMAIN, the variables of E2B's own SDKs.
    An `http://` API URL without a sandbox URL is a server on one origin, such as `me2b serve`.
    Raises ConfigError when there is no key, naming the ways out, or when a URL cannot be one.
    """
    environment = os.environ if environ is None else environ
    # A variable that is set to nothing does not hide the one in the file.
    merged = {**load_env(env_file), **{name: value for name, value in environment.items() if value}}
    key = e2b_key or merged.get("E2B_API_KEY")
    if not key:
        raise ConfigError(_NO_BACKEND)
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("E2B_API_KEY holds characters that no key has; check for a stray line break or quote")
    api_url = _url(e2b_api_url or merged.get("E2B_API_URL"), "E2B_API_URL")
    # A sandbox URL from the environment belongs to the API URL of the environment, not to one given as an argument.
    sandbox_url = None if e2b_api_url else _url(merged.get("E2B_SANDBOX_URL"), "E2B_SANDBOX_URL")
    if sandbox_url is None and api_url is not None and api_url.startswith("http://"):
        sandbox_url = api_url
    if sandbox_url is None and environment.get("E2B_SANDBOX_URL"):
        # The SDK would read it by itself, and send the sandboxes' traffic and tokens to another host.
        raise ConfigError("E2B_SANDBOX_URL is set in the environment, but not for the endpoint given: unset it there")
    return E2BConfig(api_key=key, api_url=api_url, sandbox_url=sandbox_url, domain=merged.get("E2B_DOMAIN") or None)


def _url(value: str | None, name: str) -> str | None:
    if not value:
        return None
    try:
        parts = urlsplit(value)
    except ValueError as error:
        raise ConfigError(f"{name} is not a URL") from error
    try:
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
    if "@" in parts.netloc:
        raise ConfigError(f"{name}: a URL without user and password; the key goes into E2B_API_KEY")
    if not port_is_valid or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{name}={value!r} is not a URL such as https://api.example.com or http://127.0.0.1:7820")
    return value.rstrip("/")
