"""The only place where the manager touches the E2B SDK: its calls, and the one map of its exceptions.

`Sandbox` and `AsyncSandbox` have the same lifecycle signatures. A call's result is awaited when it is
awaitable, so this one class serves both faces.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from importlib.metadata import version
from typing import Any

import e2b
import httpx
from e2b import exceptions as sdk_errors
from e2b.connection_config import REQUEST_TIMEOUT

from ..errors import (
    AuthenticationError,
    BackendError,
    BackendUnavailableError,
    RateLimitedError,
    SandboxNotRunning,
    TemplateNotFoundError,
    TemplateOutdatedError,
)
from ..models import RemoteSandbox
from ..rules import retry_after
from ..settings import E2BConfig
from . import forked
from .inside import NOT_RUNNING, Inside, NativeSandbox
from .refusals import header_of
from .unsent import sent

SDK_VERSION = version("e2b")

# Newer than the oldest SDK that is supported (2.45).
_ServiceBusy: type[Exception] | None = getattr(sdk_errors, "ServiceBusyException", None)


CONTROL_TIMEOUT = 15.0
"""Seconds for a kill, a look or a renewal: they are asked again, so that none may hang for the SDK's minute."""


class Sdk(Inside):
    """Calls to one endpoint with one key. Nothing is written to the environment."""

    def __init__(self, config: E2BConfig, *, is_async: bool, request_timeout: float | None = None) -> None:
        """`request_timeout`: seconds for each call to the control plane, instead of the defaults."""
        if forked.hopeless:
            raise BackendUnavailableError(
                f"cannot reach {config.endpoint} from a process that was forked after E2B's SDK had been used: its "
                'HTTP client would hang. Start workers with the "spawn" or "forkserver" method of multiprocessing, or '
                "fork earlier"
            )
        self._pid = os.getpid()
        self.endpoint = config.endpoint
        self._class: Any = e2b.AsyncSandbox if is_async else e2b.Sandbox
        self._is_async = is_async
        named = {
            "api_key": config.api_key,
            "api_url": config.api_url,
            "sandbox_url": config.sandbox_url,
            "domain": config.domain,
        }
        self._options: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
        self._options["debug"] = False  # E2B_DEBUG would turn create and kill into no-ops
        self._options["validate_api_key"] = False  # other endpoints have other keys; newer SDKs do not look
        create = inspect.signature(self._class.create).parameters
        self._keyed = "idempotency_key" in create
        self._has_retries = "retries" in getattr(e2b.ConnectionConfig.__init__, "__annotations__", {})
        # The engine waits and tries again, knowing why: never the SDK.
        self._once = {**self._options, "retries": 0} if self._has_retries else dict(self._options)
        self._control = {**self._once, "request_timeout": request_timeout or CONTROL_TIMEOUT}
        if request_timeout is not None:
            self._once["request_timeout"] = request_timeout

    # -- lifecycle ------------------------------------------------------------------------------------------

    async def create(
        self,
        *,
        template: str,
        timeout: int,
        metadata: Mapping[str, str],
        envs: Mapping[str, str],
        allow_internet_access: bool | None,
        idempotency_key: str,
    ) -> NativeSandbox:
        """One POST. `timeout` in seconds. Never retried in here: the engine decides what a failure proves."""
        options = dict(self._once)
        if self._keyed:
            options["idempotency_key"] = idempotency_key
        if allow_internet_access is not None:
            options["allow_internet_access"] = allow_internet_access
        self._begin()
        try:
            sandbox = await sent(
                self._class.create, template, timeout=timeout, metadata=dict(metadata), envs=dict(envs), **options
            )
        except sdk_errors.TemplateException as error:  # the SDK has looked at the agent's version, and killed it
            raise TemplateOutdatedError(
                f"the agent (envd) in sandboxes of template {template!r} at {self.endpoint} is too old for e2b "
                f"{SDK_VERSION}: build the template anew with `e2b template build`"
            ) from error
        except Exception as error:
            if _status(error) == 404:
                raise TemplateNotFoundError(
                    f"{self.endpoint} has no template {template!r}: check its name with `e2b template list`", status=404
                ) from error
            raise self._mapped(error, "create a sandbox") from error
        return self._as_users_want(sandbox)

    async def kill(self, sandbox_id: str) -> bool:
        """DELETE by id. True: the endpoint took it, which proves nothing. False: a per-id 404, which proves death."""
        return bool(await self._call("kill a sandbox", self._class.kill, sandbox_id))

    async def info(self, sandbox_id: str) -> RemoteSandbox | None:
        """What the endpoint says of this id; None for a per-id 404."""
        try:
            found = await self._call("look up a sandbox", self._class.get_info, sandbox_id)
        except BackendError as error:
            if isinstance(error.__cause__, sdk_errors.NotFoundException):
                return None
            raise
        return _remote(found)

    async def set_timeout(self, sandbox_id: str, seconds: int) -> bool:
        """Let it live for so many seconds from now. False for a per-id 404."""
        try:
            await self._call("extend a sandbox", self._class.set_timeout, sandbox_id, seconds)
        except BackendError as error:
            if isinstance(error.__cause__, sdk_errors.NotFoundException):
                return False
            raise
        return True

    async def adopt(self, sandbox_id: str, seconds: int) -> NativeSandbox:
        """A native object for a sandbox of ours whose create was not answered."""
        sandbox = await self._call_bare("connect to a sandbox", self._class.connect, sandbox_id, seconds, **self._once)
        return self._as_users_want(sandbox)

    async def pages(self, metadata: Mapping[str, str] | None = None) -> AsyncIterator[list[RemoteSandbox]]:
        """Running and paused sandboxes, a page at a time. A clue, never a proof."""
        states = [e2b.SandboxState.RUNNING, e2b.SandboxState.PAUSED]
        query = e2b.SandboxQuery(state=states, metadata=dict(metadata) if metadata else None)
        paginator: Any = self._class.list(query=query, **self._control)
        while paginator.has_next:
            page = await self._call_bare("list sandboxes", paginator.next_items)
            yield [_remote(item) for item in page]

    # -- inside ---------------------------------------------------------------------------------------------

    def _as_users_want(self, sandbox: Any) -> NativeSandbox:
        """Their own calls on the native object keep the SDK's defaults."""
        if self._has_retries:
            sandbox.connection_config.retries = e2b.ConnectionConfig(**self._options).retries
        if "request_timeout" in self._once:
            sandbox.connection_config.request_timeout = REQUEST_TIMEOUT
        return sandbox  # type: ignore[no-any-return]

    async def _call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        return await self._call_bare(what, function, *args, **self._control)

    async def _call_bare(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._begin()
        try:
            return await sent(function, *args, **kwargs)
        except Exception as error:
            raise self._mapped(error, what) from error

    def _begin(self) -> None:
        if self._pid != os.getpid():
            raise BackendUnavailableError(
                f"cannot reach {self.endpoint} with what belongs to the parent process: open a lifecycle of its own "
                "after a fork"
            )

    def _mapped(self, error: Exception, what: str) -> BackendError:
        """A foreign exception by type and status; what is not recognised stays a plain BackendError."""
        told = f"cannot {what} at {self.endpoint}"
        if isinstance(error, sdk_errors.AuthenticationException):
            return AuthenticationError(
                f"{told}: the key was refused; check E2B_API_KEY (and that it belongs to this endpoint)", status=401
            )
        if isinstance(error, sdk_errors.RateLimitException):
            wait = retry_after.seconds(
                header_of(error, "Retry-After", 429), time.time_ns() // 1000, header_of(error, "Date", 429)
            )
            return RateLimitedError(f"{told}: too many requests or sandboxes ({error})", retry_after=wait)
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
            return BackendUnavailableError(f"{told}: it cannot be reached; is the URL right and the server running?")
        if isinstance(error, NOT_RUNNING or sdk_errors.TimeoutException):  # a hint: a per-id answer decides
            return SandboxNotRunning(f"{told}: {error}")
        if _ServiceBusy is not None and isinstance(error, _ServiceBusy):
            return BackendError(f"{told}: {error}", status=503)
        if isinstance(error, json.JSONDecodeError | KeyError):
            return BackendError(f"{told}: it answered what no E2B API answers ({type(error).__name__})")
        return BackendError(f"{told}: {error}", status=_status(error))


def _status(error: Exception) -> int | None:
    """The HTTP status of an API answer. SDKs before `status_code` have it at the beginning of their message only."""
    if hasattr(error, "status_code") or not isinstance(error, sdk_errors.SandboxException):
        return getattr(error, "status_code", None)
    found = re.match(r"([45]\d\d): ", str(error))
    return int(found[1]) if found else None


def _remote(item: Any) -> RemoteSandbox:
    return RemoteSandbox(
        sandbox_id=item.sandbox_id,
        template=item.template_id,
        state=str(item.state.value),
        metadata=dict(item.metadata or {}),
        started_at=_micros(item.started_at),
        end_at=_micros(item.end_at),
        alias=item.name,
        envd_version=getattr(item, "envd_version", None),  # not in the oldest SDK
    )


def _micros(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000)
