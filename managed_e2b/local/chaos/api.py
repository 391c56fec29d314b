"""`/me2b/chaos`: tests change the rules of a running server, and read its journal. Behind the API key like all else.

`GET` the rules with their counts, `PUT` a script, `DELETE` all rules; `POST …/rules` one more, `DELETE …/rules/{id}`;
`POST …/release` what hangs; `GET` (`?op=…`) and `DELETE …/journal`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from managed_e2b.local.api import schemas
from managed_e2b.local.chaos.director import Standing
from managed_e2b.local.chaos.rules import Rule, Script
from managed_e2b.local.errors import ApiError

if TYPE_CHECKING:
    from managed_e2b.local.chaos.layer import ChaosLayer

NOTHING = 204


class ChaosApi:
    def __init__(self, layer: ChaosLayer) -> None:
        self._layer = layer

    def routes(self) -> list[Route]:
        return [
            Route("/me2b/chaos", self.show, methods=["GET"]),
            Route("/me2b/chaos", self.play, methods=["PUT"]),
            Route("/me2b/chaos", self.calm, methods=["DELETE"]),
            Route("/me2b/chaos/rules", self.add, methods=["POST"]),
            Route("/me2b/chaos/rules/{id:int}", self.remove, methods=["DELETE"]),
            Route("/me2b/chaos/release", self.release, methods=["POST"]),
            Route("/me2b/chaos/journal", self.journal, methods=["GET"]),
            Route("/me2b/chaos/journal", self.forget, methods=["DELETE"]),
        ]

    async def show(self, request: Request) -> Response:
        director = self._layer.director
        return JSONResponse({"seed": director.seed, "rules": [_standing(item) for item in director]})

    async def play(self, request: Request) -> Response:
        self._layer.director.play(await schemas.read_body(request, Script))
        return Response(status_code=NOTHING)

    async def calm(self, request: Request) -> Response:
        self._layer.director.play(Script(seed=self._layer.director.seed))
        self._layer.drop()
        return Response(status_code=NOTHING)

    async def add(self, request: Request) -> Response:
        return JSONResponse(_standing(self._layer.director.add(await schemas.read_body(request, Rule))), 201)

    async def remove(self, request: Request) -> Response:
        if not self._layer.director.remove(request.path_params["id"]):
            raise ApiError(404, f"No rule {request.path_params['id']} is in force")
        return Response(status_code=NOTHING)

    async def release(self, request: Request) -> Response:
        return JSONResponse({"released": self._layer.release()})

    async def journal(self, request: Request) -> Response:
        return JSONResponse(self._layer.journal.as_dict(request.query_params.get("op")))

    async def forget(self, request: Request) -> Response:
        self._layer.journal.clear()
        return Response(status_code=NOTHING)


def _standing(item: Standing) -> dict[str, Any]:
    return {"id": item.id, "seen": item.seen, "hits": item.hits, "rule": item.rule.model_dump(mode="json")}
