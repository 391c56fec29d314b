"""Where sandboxes run: a remote endpoint, or the local server that this process starts for itself."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .engine import host
from .errors import BackendUnavailableError, ConfigError
from .settings import E2BConfig, get_e2b_config

if TYPE_CHECKING:
    from .local.background import LocalServerProcess

BackendName = Literal["local"]


@dataclass(frozen=True)
class Backend:
    """An endpoint in use. `account` is what the ledger counts limits and reaps by."""

    config: E2BConfig
    account: str
    is_local: bool


class _LocalServer:
    """One server a process, however many lifecycles use it; it is stopped after the last one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._pid = 0
        self._server: LocalServerProcess | None = None

    def acquire(self) -> E2BConfig:
        try:
            from .local.background import LocalServerProcess
        except ImportError as error:
            raise ConfigError(
                f"backend=\"local\" needs the local server: pip install 'managed-e2b[local]' ({error.name} is missing)"
            ) from error
        with self._lock:
            if self._pid != os.getpid():  # after a fork the parent's server stays the parent's
                self._users, self._pid, self._server = 0, os.getpid(), None
            if self._server is None or not self._server.alive:
                server = LocalServerProcess()
                try:
                    server.start()
                except RuntimeError as error:
                    raise BackendUnavailableError(f"the local server cannot run: {error}") from error
                self._server = server
            self._users += 1
            return E2BConfig(self._server.api_key, api_url=self._server.url, sandbox_url=self._server.url)

    def release(self) -> None:
        with self._lock:
            if self._pid != os.getpid():
                return
            self._users -= 1
            if self._users == 0 and self._server is not None:
                server, self._server = self._server, None
                server.stop()

    def forked(self) -> None:
        """In a forked child: a thread that is not here may hold the lock."""
        self._lock = threading.Lock()


_local_server = _LocalServer()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_local_server.forked)


def open_backend(
    backend: BackendName | None,
    e2b_api_url: str | None,
    e2b_key: str | None,
    env_file: str | os.PathLike[str] | None,
) -> Backend:
    """The backend that the arguments, the environment and `.env` name. Raises ConfigError, BackendUnavailableError."""
    if backend is None:
        config = get_e2b_config(e2b_api_url=e2b_api_url, e2b_key=e2b_key, env_file=env_file)
        return Backend(config, config.account, is_local=False)
    if backend != "local":
        raise ConfigError(f'backend={backend!r}: either "local", or None with a key for a remote endpoint')
    if e2b_api_url or e2b_key:
        raise ConfigError('backend="local" and an endpoint (e2b_api_url=, e2b_key=): give one of them')
    # A process's own server ends with it, so what a dead owner on this host left there is known to be gone:
    # all of them share one account, and any of these servers answers for a dead one's ids.
    return Backend(_local_server.acquire(), f"local-{host.here().machine_id[:10]}", is_local=True)


def close_backend(backend: Backend) -> None:
    """Stop the local server if nobody else in this process uses it."""
    if backend.is_local:
        _local_server.release()
