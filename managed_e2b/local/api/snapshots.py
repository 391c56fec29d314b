"""The endpoints of copies: forks and snapshots. (Both are of files: this server copies no memory.)"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from managed_e2b.local import lifetime
from managed_e2b.local.api import schemas, views
from managed_e2b.local.api.params import sandbox_id, short_id, whole_number
from managed_e2b.local.copies import MAX_FORKS
from managed_e2b.local.errors import bad_request
from managed_e2b.local.listing import MAX_LIMIT, decode_token
from managed_e2b.local.sandboxes import SandboxRegistry
from managed_e2b.local.snapshots import SnapshotQuery, Snapshots, select
from managed_e2b.local.templates import TemplateCatalog, split_reference


class SnapshotApi:
    """`domain`: see SandboxApi."""

    def __init__(
        self, registry: SandboxRegistry, templates: TemplateCatalog, snapshots: Snapshots, domain: str
    ) -> None:
        self._registry = registry
        self._templates = templates
        self._snapshots = snapshots
        self._domain = domain

    def routes(self) -> list[Route]:
        return [
            Route("/sandboxes/{id}/fork", self.fork, methods=["POST"]),
            Route("/sandboxes/{id}/snapshots", self.create, methods=["POST"]),
            Route("/snapshots", self.list, methods=["GET"]),
        ]

    async def fork(self, request: Request) -> Response:
        """One result for each fork asked for: the sandbox, or the error that kept it from starting."""
        body = await schemas.read_body(request, schemas.ForkSandbox)
        seconds = lifetime.timeout_for_create(body.timeout, lifetime.DEFAULT_TIMEOUT_V1)
        if body.count < 1:
            raise bad_request("Count must be at least 1")
        if body.count > MAX_FORKS:
            raise bad_request(f"Count cannot be greater than {MAX_FORKS}")
        made = await self._registry.fork(sandbox_id(request), seconds, body.count)
        return JSONResponse([views.fork(result, self._domain) for result in made], 201)

    async def create(self, request: Request) -> Response:
        body = await schemas.read_body(request, schemas.NewSnapshot)
        snapshot = await self._snapshots.create(sandbox_id(request), body.name, memory=body.memory)
        return JSONResponse(views.snapshot(snapshot), 201)

    async def list(self, request: Request) -> Response:
        params = request.query_params
        name, tag = _name_filter(params.get("name"))
        source, token = params.get("sandboxID"), params.get("nextToken")
        limit = whole_number(request, "limit", f"1 to {MAX_LIMIT}", MAX_LIMIT)
        if limit == 0:
            raise bad_request(f"Invalid limit, expected 1 to {MAX_LIMIT}")
        query = SnapshotQuery(
            source=None if source is None else short_id(source),
            name=name,
            tag=tag,
            limit=limit or MAX_LIMIT,
            cursor=decode_token(token, ascending=False) if token else None,
        )
        page = select(self._templates, query)
        headers: dict[str, Any] = {} if page.next_token is None else {"X-Next-Token": page.next_token}
        return JSONResponse([views.snapshot(item) for item in page.items], headers=headers)


def _name_filter(raw: str | None) -> tuple[str | None, str | None]:
    """The name, and the tag where one is said: without it all tags are meant."""
    if not raw:
        return None, None
    name, tag = split_reference(raw)
    return name, tag if ":" in raw else None
