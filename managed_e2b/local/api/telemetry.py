"""What sandboxes use, and what happened in them: samples and log lines."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from managed_e2b.local.api import views
from managed_e2b.local.api.params import sandbox_id, short_id, whole_number
from managed_e2b.local.errors import bad_request
from managed_e2b.local.logbook import MAX_LIMIT, Level, LogQuery, select
from managed_e2b.local.model import Sandbox
from managed_e2b.local.sandboxes import SandboxRegistry

MAX_METRICS_IDS = 100
MAX_SEARCH = 256


class TelemetryApi:
    def __init__(self, registry: SandboxRegistry) -> None:
        self._registry = registry

    def routes(self) -> list[Route]:
        return [
            Route("/sandboxes/metrics", self.metrics_of_many, methods=["GET"]),
            Route("/sandboxes/{id}/metrics", self.metrics, methods=["GET"]),
            Route("/sandboxes/{id}/logs", self.logs_v1, methods=["GET"]),
            Route("/v2/sandboxes/{id}/logs", self.logs_v2, methods=["GET"]),
        ]

    async def metrics(self, request: Request) -> Response:
        """The samples of a time, oldest first; while it runs the last one is at most some seconds old."""
        start, end = (whole_number(request, name, "Unix seconds") for name in ("start", "end"))
        history = await self._registry.history(await self._registry.get(sandbox_id(request)))
        return JSONResponse([views.metric(sample) for sample in history.between(start, end)])

    async def metrics_of_many(self, request: Request) -> Response:
        """The last sample of each."""
        ids = [i for i in request.query_params.get("sandbox_ids", "").split(",") if i]
        if len(ids) > MAX_METRICS_IDS:
            raise bad_request(f"Too many sandbox_ids, at most {MAX_METRICS_IDS}")
        boxes = [box for box in map(self._registry.find, map(short_id, ids)) if box is not None]
        samples = await asyncio.gather(*map(self._last, boxes))
        found = {box.sandbox_id: sample for box, sample in zip(boxes, samples, strict=True) if sample is not None}
        return JSONResponse({"sandboxes": found})

    async def _last(self, box: Sandbox) -> dict[str, Any] | None:
        last = (await self._registry.history(box)).last
        return None if last is None else views.metric(last)

    async def logs_v1(self, request: Request) -> Response:
        """Oldest first, from `start` on."""
        logbook = self._registry.logbook(sandbox_id(request))
        query = LogQuery(start=whole_number(request, "start", "Unix milliseconds"), limit=_limit(request))
        lines = select(logbook, query)
        return JSONResponse({"logs": [line.raw() for line in lines], "logEntries": [line.entry() for line in lines]})

    async def logs_v2(self, request: Request) -> Response:
        """Newest first and up to `cursor`, or in the other direction from it on."""
        logbook = self._registry.logbook(sandbox_id(request))
        params = request.query_params
        direction = params.get("direction", "backward")
        if direction not in ("forward", "backward"):
            raise bad_request("Invalid direction, expected 'forward' or 'backward'")
        search = params.get("search", "")
        if len(search) > MAX_SEARCH:
            raise bad_request(f"Invalid search, expected at most {MAX_SEARCH} characters")
        cursor = whole_number(request, "cursor", "Unix milliseconds")
        backward = direction == "backward"
        query = LogQuery(
            start=None if backward else cursor,
            end=cursor if backward else None,
            level=_level(params.get("level", "debug")),
            search=search,
            backward=backward,
            limit=_limit(request),
        )
        return JSONResponse({"logs": [line.entry() for line in select(logbook, query)]})


def _limit(request: Request) -> int:
    limit = whole_number(request, "limit", f"0 to {MAX_LIMIT}", MAX_LIMIT)
    return MAX_LIMIT if limit is None else limit


def _level(name: str) -> Level:
    for level in Level:
        if level.wire == name:
            return level
    raise bad_request("Invalid level, expected 'debug', 'info', 'warn' or 'error'")
