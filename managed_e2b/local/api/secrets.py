"""The endpoints of secrets. No answer shows a value, and none is kept, see `secretstore`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from managed_e2b.local.api import schemas
from managed_e2b.local.api.params import whole_number
from managed_e2b.local.clock import rfc3339
from managed_e2b.local.errors import bad_request
from managed_e2b.local.listing import decode_token
from managed_e2b.local.secretstore import Secret, SecretStore

MAX_LIMIT = 100


class SecretUpdate(schemas.Body):
    value: Annotated[str, Field(repr=False)]
    metadata: dict[str, str] | None = None


class NewSecret(SecretUpdate):
    name: str


class SecretApi:
    def __init__(self, store: SecretStore) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        return [
            Route("/secrets", self.create, methods=["POST"]),
            Route("/secrets", self.list, methods=["GET"]),
            Route("/secrets/{id}", self.get, methods=["GET"]),
            Route("/secrets/{id}", self.update, methods=["POST"]),
            Route("/secrets/{id}", self.delete, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        body = await schemas.read_body(request, NewSecret)
        return JSONResponse(_view(self._store.create(body.name, body.value, body.metadata or {})), 201)

    async def list(self, request: Request) -> Response:
        limit = whole_number(request, "limit", f"a number from 1 to {MAX_LIMIT}", MAX_LIMIT)
        if limit == 0:
            raise bad_request(f"Invalid limit, expected a number from 1 to {MAX_LIMIT}")
        token = request.query_params.get("nextToken")
        cursor = None if token is None else decode_token(token, ascending=False)
        page = self._store.page(limit or MAX_LIMIT, cursor)
        headers = {} if page.next_token is None else {"X-Next-Token": page.next_token}
        return JSONResponse([_view(secret) for secret in page.items], headers=headers)

    async def get(self, request: Request) -> Response:
        return JSONResponse(_view(self._store.get(request.path_params["id"])))

    async def update(self, request: Request) -> Response:
        body = await schemas.read_body(request, SecretUpdate)
        return JSONResponse(_view(self._store.update(request.path_params["id"], body.value, body.metadata)))

    async def delete(self, request: Request) -> Response:
        self._store.delete(request.path_params["id"])
        return Response(status_code=204)


def _view(secret: Secret) -> dict[str, Any]:
    return {
        "secretID": secret.secret_id,
        "name": secret.name,
        "currentVersion": secret.version,
        "metadata": dict(secret.metadata),
        "createdAt": rfc3339(secret.created_at),
        "updatedAt": rfc3339(secret.updated_at),
    }
