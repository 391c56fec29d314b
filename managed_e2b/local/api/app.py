"""The control plane as one ASGI application: the key is checked first, every answer is JSON, errors included."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from http import HTTPStatus
from typing import Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from managed_e2b.local.api.network import NetworkApi
from managed_e2b.local.api.others import OtherApi
from managed_e2b.local.api.sandboxes import SandboxApi
from managed_e2b.local.api.secrets import SecretApi
from managed_e2b.local.api.snapshots import SnapshotApi
from managed_e2b.local.api.telemetry import TelemetryApi
from managed_e2b.local.api.templates import TemplateApi
from managed_e2b.local.api.volume_content import PREFIX as VOLUME_CONTENT
from managed_e2b.local.api.volume_content import VolumeContentApi
from managed_e2b.local.api.volumes import VolumeApi
from managed_e2b.local.builds.service import Builds
from managed_e2b.local.builds.uploads import PREFIX as UPLOADS
from managed_e2b.local.clock import Clock
from managed_e2b.local.errors import ApiError
from managed_e2b.local.sandboxes import SandboxRegistry
from managed_e2b.local.secretstore import SecretStore
from managed_e2b.local.snapshots import Snapshots
from managed_e2b.local.templates import TemplateCatalog
from managed_e2b.local.volumes.catalog import VolumeCatalog


class Extension(Protocol):
    """What stands between the key's check and the control plane: it sees each request, and has routes of its own."""

    def routes(self) -> list[Route]: ...
    def around(self, app: ASGIApp, /) -> ASGIApp: ...


def control_plane(
    registry: SandboxRegistry,
    templates: TemplateCatalog,
    builds: Builds,
    volumes: VolumeCatalog,
    clock: Clock,
    *,
    api_key: str,
    domain: str,
    extension: Extension | None = None,
) -> ASGIApp:
    """The application. `domain`: see SandboxApi."""
    snapshots = Snapshots(registry, templates, clock)
    app = Starlette(
        routes=[
            *TelemetryApi(registry).routes(),
            *SandboxApi(registry, templates, volumes, clock, domain).routes(),
            *NetworkApi(registry).routes(),
            *SnapshotApi(registry, templates, snapshots, domain).routes(),
            *TemplateApi(builds, templates, snapshots, clock, registry.size).routes(),
            *VolumeApi(volumes).routes(),
            *VolumeContentApi(volumes).routes(),
            *SecretApi(SecretStore(clock)).routes(),
            *OtherApi(registry, api_key).routes(),
            *(extension.routes() if extension is not None else ()),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error},
    )
    app.router.redirect_slashes = False
    return ApiKeyCheck(app if extension is None else extension.around(app), api_key)


class ApiKeyCheck:
    """Lets in who has the key: `X-API-KEY`, or `Authorization: Bearer`, as the CLI sends it.

    `/health` is open, and so are the addresses of uploads, which are signed, and the content of volumes, which asks for
    a token of its own.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        opened = path == "/health" or (path.startswith(UPLOADS) and scope["method"] == "PUT")
        opened = opened or path.startswith(VOLUME_CONTENT)
        if not opened and not self._allowed(Headers(scope=scope)):
            error = ApiError(401, "Invalid API key: send the server's key as X-API-KEY (`me2b env` prints it)")
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, headers: Mapping[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key", bearer.strip() if scheme.lower() == "bearer" else "")
        return hmac.compare_digest(given.encode("latin-1", "replace"), self._api_key)


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=dict(error.headers))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    message = f"{phrase}: {request.method} {request.url.path}"
    return error_response(ApiError(error.status_code, message, headers=error.headers or {}))


async def _internal_error(request: Request, error: Exception) -> Response:
    # the details go to the server's log, never to the caller
    return error_response(ApiError(500, "Internal server error"))
