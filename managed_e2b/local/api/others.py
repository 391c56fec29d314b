"""The endpoints beside sandboxes: templates, teams, the server's own counters, and what is not built yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from managed_e2b.local.counters import prometheus_text
from managed_e2b.local.errors import not_built
from managed_e2b.local.sandboxes import SandboxRegistry

TEAM_ID = "00000000-0000-4000-8000-000000000001"

NOT_BUILT: tuple[tuple[str, str, list[str]], ...] = (
    # the first build system, whose images came by `docker push`; the SDKs and the CLI have left it
    ("/templates", "Building a template from a pushed image", ["POST"]),
    ("/templates/{id}", "Building a template from a pushed image", ["POST"]),
    ("/templates/{id}/builds/{build}", "Building a template from a pushed image", ["POST"]),
)


class OtherApi:
    def __init__(self, registry: SandboxRegistry, api_key: str) -> None:
        self._registry = registry
        self._api_key = api_key

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/me2b/stats", self.stats, methods=["GET"]),
            Route("/me2b/metrics", self.metrics, methods=["GET"]),
            Route("/teams", self.teams, methods=["GET"]),
            *(Route(path, _not_built(what), methods=methods) for path, what, methods in NOT_BUILT),
        ]

    async def health(self, request: Request) -> Response:
        return Response(status_code=204)

    async def stats(self, request: Request) -> Response:
        return JSONResponse(self._registry.counters.as_dict())

    async def metrics(self, request: Request) -> Response:
        text = prometheus_text(self._registry.counters)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def teams(self, request: Request) -> Response:
        """One team. Its key is the one the caller just proved to have."""
        return JSONResponse([{"teamID": TEAM_ID, "name": "local", "apiKey": self._api_key, "isDefault": True}])


def _not_built(what: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        raise not_built(what)

    return endpoint
