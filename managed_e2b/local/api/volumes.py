"""The endpoints of volumes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from managed_e2b.local.api import schemas
from managed_e2b.local.volumes.catalog import Volume, VolumeCatalog


class NewVolume(schemas.Body):
    name: str


class VolumeApi:
    def __init__(self, volumes: VolumeCatalog) -> None:
        self._volumes = volumes

    def routes(self) -> list[Route]:
        return [
            Route("/volumes", self.create, methods=["POST"]),
            Route("/volumes", self.list, methods=["GET"]),
            Route("/volumes/{id}", self.get, methods=["GET"]),
            Route("/volumes/{id}", self.delete, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        body = await schemas.read_body(request, NewVolume)
        await self._volumes.load()
        return JSONResponse(_with_token(await self._volumes.create(body.name)), 201)

    async def list(self, request: Request) -> Response:
        await self._volumes.load()
        return JSONResponse([_view(volume) for volume in self._volumes])

    async def get(self, request: Request) -> Response:
        await self._volumes.load()
        return JSONResponse(_with_token(self._volumes.get(request.path_params["id"])))

    async def delete(self, request: Request) -> Response:
        await self._volumes.load()
        await self._volumes.delete(request.path_params["id"])
        return Response(status_code=204)


def _view(volume: Volume) -> dict[str, Any]:
    return {"volumeID": volume.volume_id, "name": volume.name}


def _with_token(volume: Volume) -> dict[str, Any]:
    return {**_view(volume), "token": volume.token}
