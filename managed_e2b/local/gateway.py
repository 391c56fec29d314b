"""The one origin: sends each request to the control plane, to a sandbox's envd, or to a port of a sandbox.

The answers for a sandbox that is not there, or a port that is closed, are upstream's gateway's, word by word: the
SDKs tell `SandboxNotRunningException` from `SandboxUnreachableException` by these texts.
"""

from __future__ import annotations

import contextlib
import hmac
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from managed_e2b.local.api.app import error_response
from managed_e2b.local.envd.auth import UNAUTHORIZED
from managed_e2b.local.errors import ApiError
from managed_e2b.local.model import ENVD_PORT, Sandbox, State
from managed_e2b.local.portproxy import PortClosed, proxy
from managed_e2b.local.routing import ToControlPlane, ToSandbox, ToSigned, route
from managed_e2b.local.runtime.base import GuestGone
from managed_e2b.local.sandboxes import SandboxRegistry
from managed_e2b.local.tunnels import tunnel

if TYPE_CHECKING:
    from managed_e2b.local.tls import Tls

KEY_HEADERS = (b"x-api-key", b"authorization")
TRAFFIC_TOKEN_HEADER = "e2b-traffic-access-token"  # the name of a header, no secret


class SignatureMatches(Protocol):
    def __call__(
        self, token: str, path: str, operation: str, username: str, expiration: str | None, signature: str, /
    ) -> bool: ...


class InFront(Protocol):
    """What a request to a sandbox passes before `app` serves it."""

    async def sandbox(
        self, app: ASGIApp, sandbox_id: str, port: int, scope: Scope, receive: Receive, send: Send, /
    ) -> None: ...


class Gateway:
    """The server's ASGI application. `in_front`: of the sandboxes, if anything. `api_key`: what they must not learn.

    `tls`: what it answers https with, at the end of a tunnel.
    """

    def __init__(
        self,
        registry: SandboxRegistry,
        control_plane: ASGIApp,
        signature_matches: SignatureMatches,
        in_front: InFront | None = None,
        *,
        api_key: str,
        tls: Tls | None = None,
    ) -> None:
        self._registry = registry
        self._control_plane = control_plane
        self._signature_matches = signature_matches
        self._in_front = in_front
        self._api_key = api_key.encode()
        self._tls = tls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway does not speak {scope['type']}")
        if scope["method"] == "CONNECT":
            await tunnel(self._tls, scope, receive, send)
            return
        try:
            target, scope = route(scope)
            if isinstance(target, ToControlPlane):
                await self._control_plane(scope, receive, send)
                return
            if isinstance(target, ToSigned):
                target = self._signer(target)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        serve = partial(self._to_sandbox, target)
        if self._in_front is None:
            await serve(scope, receive, send)
        else:
            await self._in_front.sandbox(serve, target.sandbox_id, target.port, scope, receive, send)

    def _signer(self, signed: ToSigned) -> ToSandbox:
        """The sandbox whose token made the signature. Whether it still counts, its envd decides."""
        for sandbox in self._registry:
            if sandbox.access_token is not None and self._signature_matches(
                sandbox.access_token,
                signed.path,
                signed.operation,
                signed.username,
                signed.expiration,
                signed.signature,
            ):
                return ToSandbox(sandbox.sandbox_id, ENVD_PORT)
        raise ApiError(401, "invalid signature")

    async def _to_sandbox(self, target: ToSandbox, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            refusal = await self._forward(target, scope, receive, watched_send)
        except (GuestGone, PortClosed) as error:
            if started:
                raise  # the server cuts the connection: a clean end would be a lie
            refusal = _closed(target) if isinstance(error, PortClosed) else _not_found(target)
        if refusal is not None:
            await refusal(scope, receive, send)

    async def _forward(self, target: ToSandbox, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """Serve the request, or return the answer that refuses it."""
        sandbox = self._registry.find(target.sandbox_id)
        if sandbox is None:
            return _not_found(target)
        headers = Headers(scope=scope)
        if target.port != ENVD_PORT and not _token_fits(sandbox.traffic_token, headers.get(TRAFFIC_TOKEN_HEADER)):
            return _answer(target, 403, f"The sandbox's ports need its token in the header {TRAFFIC_TOKEN_HEADER}")
        if (target.port, scope["path"]) in sandbox.spec.settings.guarded and not _token_fits(
            sandbox.access_token, headers.get("x-access-token")
        ):
            return _answer(target, 401, UNAUTHORIZED)
        if not sandbox.is_in(State.RUNNING) and (refusal := await self._wake(sandbox, target, headers)):
            return refusal
        if target.port == ENVD_PORT:
            await sandbox.envd(scope, receive, send)
        else:
            await proxy(sandbox, target.port, self._without_key(scope), receive, send)
        return None

    def _without_key(self, scope: Scope) -> Scope:
        """A client may send the server's key with all its requests: what runs in a sandbox must not learn it."""
        headers = [
            (name, value)
            for name, value in scope["headers"]
            if name not in KEY_HEADERS or value.split()[-1:] != [self._api_key]
        ]
        return {**scope, "headers": headers}

    async def _wake(self, sandbox: Sandbox, target: ToSandbox, headers: Headers) -> Response | None:
        """Resume a sandbox that wants to be resumed by traffic; for envd's the caller must have its token."""
        if sandbox.spec.auto_resume:
            if target.port == ENVD_PORT and not _token_fits(sandbox.access_token, headers.get("x-access-token")):
                return _answer(target, 403, "The sandbox is paused, and these credentials cannot resume it")
            with contextlib.suppress(ApiError):
                await self._registry.wake(sandbox)
                return None
        return _not_found(target)


def _token_fits(token: str | None, given: str | None) -> bool:
    return token is None or hmac.compare_digest((given or "").encode(), token.encode())


def _not_found(target: ToSandbox) -> Response:
    return _answer(target, 502, "The sandbox was not found")


def _closed(target: ToSandbox) -> Response:
    return _answer(target, 502, "The sandbox is running but port is not open", port=target.port)


def _answer(target: ToSandbox, status: int, message: str, **more: Any) -> Response:
    return JSONResponse({"sandboxId": target.sandbox_id, "message": message, "code": status, **more}, status)
