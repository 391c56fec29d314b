"""The endpoints of sandboxes: read the request, ask the registry, show the answer."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from managed_e2b.local import lifetime
from managed_e2b.local.api import network, schemas, views
from managed_e2b.local.api.params import sandbox_id
from managed_e2b.local.clock import Clock
from managed_e2b.local.errors import ApiError, bad_request, not_built
from managed_e2b.local.idempotency import IdempotencyStore, check_key
from managed_e2b.local.listing import Query, parse_metadata, parse_query, select
from managed_e2b.local.model import SandboxSpec
from managed_e2b.local.sandboxes import SandboxRegistry
from managed_e2b.local.templates import TemplateCatalog
from managed_e2b.local.volumes.catalog import VolumeCatalog


class SandboxApi:
    """`domain` is what answers name as the sandboxes' domain: `localhost:<port>` of this server."""

    def __init__(
        self,
        registry: SandboxRegistry,
        templates: TemplateCatalog,
        volumes: VolumeCatalog,
        clock: Clock,
        domain: str,
    ) -> None:
        self._registry = registry
        self._volumes = volumes
        self._templates = templates
        self._clock = clock
        self._domain = domain
        self._answers: IdempotencyStore[dict[str, Any]] = IdempotencyStore(clock)

    def routes(self) -> list[Route]:
        return [
            Route("/sandboxes", self.create_v1, methods=["POST"]),
            Route("/sandboxes", self.list_v1, methods=["GET"]),
            Route("/v2/sandboxes", self.create_v2, methods=["POST"]),
            Route("/v2/sandboxes", self.list_v2, methods=["GET"]),
            Route("/sandboxes/{id}", self.info, methods=["GET"]),
            Route("/sandboxes/{id}", self.kill, methods=["DELETE"]),
            Route("/sandboxes/{id}/timeout", self.set_timeout, methods=["POST"]),
            Route("/sandboxes/{id}/refreshes", self.refresh, methods=["POST"]),
            Route("/sandboxes/{id}/pause", self.pause, methods=["POST"]),
            Route("/sandboxes/{id}/resume", self.resume, methods=["POST"]),
            Route("/sandboxes/{id}/connect", self.connect_v1, methods=["POST"]),
            Route("/v2/sandboxes/{id}/connect", self.connect_v2, methods=["POST"]),
        ]

    # --- create

    async def create_v1(self, request: Request) -> Response:
        body = await schemas.read_body(request, schemas.NewSandbox)
        return await self._create(request, body, default_timeout=lifetime.DEFAULT_TIMEOUT_V1, secure=body.secure)

    async def create_v2(self, request: Request) -> Response:
        body = await schemas.read_body(request, schemas.NewSandbox)
        return await self._create(request, body, default_timeout=lifetime.DEFAULT_TIMEOUT, secure=True)

    async def _create(
        self, request: Request, body: schemas.NewSandbox, *, default_timeout: int, secure: bool
    ) -> Response:
        key = request.headers.get("idempotency-key")
        if key is not None:
            check_key(key)
        if body.volume_mounts:
            await self._volumes.load()
        spec = self._spec(body, default_timeout, secure)

        async def effect() -> dict[str, Any]:
            box = await self._registry.create(spec)
            self._templates.count(spec.template_id, self._clock.read().wall)
            return views.sandbox(box, self._domain)

        if key is None:
            return JSONResponse(await effect(), 201)
        # the server has one API key, so the key's scope is the server
        asked = (request.url.path, body.model_dump_json())
        return JSONResponse(await self._answers.run(key, asked, effect), 201)

    def _spec(self, body: schemas.NewSandbox, default_timeout: int, secure: bool) -> SandboxSpec:
        found = self._templates.resolve(body.template_id)
        auto_resume = body.auto_resume is not None and body.auto_resume.enabled
        if not body.auto_pause_memory and (not body.auto_pause or auto_resume):
            raise bad_request("autoPauseMemory: false needs autoPause and excludes autoResume")
        for name in body.env_vars or {}:
            if not name or "=" in name or "\0" in name + (body.env_vars or {})[name]:
                raise bad_request("Invalid envVars: a name must not be empty or hold '=', nothing may hold a NUL")
        if body.iam and body.iam.get("tokens"):
            raise not_built("Workload identity (iam)")
        return SandboxSpec(
            template_id=found.template.template_id,
            alias=found.template.alias,
            timeout=lifetime.timeout_for_create(body.timeout, default_timeout),
            image=found.build.image,
            settings=found.build.settings,
            cpu_count=found.build.cpu_count,
            memory_mb=found.build.memory_mb,
            secure=secure,
            metadata=body.metadata or {},
            env_vars=body.env_vars or {},
            volume_mounts=self._volumes.mounts([(mount.name, mount.path) for mount in body.volume_mounts or ()]),
            auto_pause=body.auto_pause,
            auto_pause_memory=body.auto_pause_memory,
            auto_resume=auto_resume,
            **network.options(body.network, body.allow_internet_access),
        )

    # --- lists

    async def list_v1(self, request: Request) -> Response:
        metadata = parse_metadata(request.query_params.get("metadata", ""))
        page = select(self._registry, Query(states=frozenset({"running"}), metadata=metadata, limit=None))
        return JSONResponse([views.listed(box) for box in page.items])

    async def list_v2(self, request: Request) -> Response:
        page = select(self._registry, parse_query(request.query_params))
        running = sum(1 for box in self._registry if box.shown_state == "running")
        headers = {"X-Total-Running": str(running)}
        if page.next_token is not None:
            headers["X-Next-Token"] = page.next_token
        return JSONResponse([views.listed(box) for box in page.items], headers=headers)

    # --- one sandbox

    async def info(self, request: Request) -> Response:
        return JSONResponse(views.detail(await self._registry.get(sandbox_id(request)), self._domain))

    async def kill(self, request: Request) -> Response:
        await self._registry.kill(sandbox_id(request))
        return Response(status_code=204)

    async def set_timeout(self, request: Request) -> Response:
        body = await schemas.read_body(request, schemas.SetTimeout)
        await self._registry.set_timeout(sandbox_id(request), body.timeout)
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        body = await schemas.read_body(request, schemas.Refresh)
        await self._registry.refresh(sandbox_id(request), max(body.duration or 0, lifetime.MINIMUM_REFRESH))
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        body = await schemas.read_body(request, schemas.PauseSandbox)
        await self._registry.pause(sandbox_id(request), memory=body.memory)
        return Response(status_code=204)

    async def connect_v1(self, request: Request) -> Response:
        body = await schemas.read_body(request, schemas.ConnectSandboxV1)
        return await self._connect(request, body.timeout, body.memory)

    async def connect_v2(self, request: Request) -> Response:
        body = await schemas.read_body(request, schemas.ConnectSandbox)
        return await self._connect(request, body.timeout, body.memory)

    async def _connect(self, request: Request, asked: int | None, memory: bool) -> Response:
        seconds = lifetime.timeout_for_connect(asked)
        box, resumed = await self._registry.connect(sandbox_id(request), seconds, memory=memory)
        return JSONResponse(views.sandbox(box, self._domain), 201 if resumed else 200)

    async def resume(self, request: Request) -> Response:
        """Deprecated upstream: like connect, but a running sandbox is a conflict."""
        body = await schemas.read_body(request, schemas.ResumeSandbox)
        seconds = lifetime.timeout_for_create(body.timeout, lifetime.DEFAULT_TIMEOUT_V1)
        box = await self._registry.get(sandbox_id(request))
        if box.shown_state == "running":
            raise ApiError(409, f"Sandbox {box.sandbox_id} is already running")
        box, _ = await self._registry.connect(box.sandbox_id, seconds, memory=body.memory)
        return JSONResponse(views.sandbox(box, self._domain), 201)
