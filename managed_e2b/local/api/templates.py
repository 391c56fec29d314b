"""The endpoints of templates: builds, the files they copy, names and tags."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from managed_e2b.local.api import schemas, views
from managed_e2b.local.api.template_schemas import AssignTags, DeleteTags, NewTemplate, StartBuild, UpdateTemplate
from managed_e2b.local.builds import uploads
from managed_e2b.local.builds.model import PAGE, Level, Plan, Status
from managed_e2b.local.builds.service import Builds
from managed_e2b.local.clock import Clock, rfc3339
from managed_e2b.local.errors import ApiError, bad_request
from managed_e2b.local.sizes import Asked, Size
from managed_e2b.local.snapshots import Snapshots
from managed_e2b.local.templates import BASE_ID, TemplateCatalog, check_tags, split_reference

_MAX_NUMBER = 10**9


class TemplateApi:
    """`size`: what a sandbox gets for what a build asks."""

    def __init__(
        self,
        builds: Builds,
        templates: TemplateCatalog,
        snapshots: Snapshots,
        clock: Clock,
        size: Callable[[Asked], Size],
    ) -> None:
        self._size = size
        self._builds = builds
        self._templates = templates
        self._snapshots = snapshots
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            Route("/v3/templates", self.request, methods=["POST"]),
            Route("/templates", self.list, methods=["GET"]),
            Route("/v2/templates", self.list, methods=["GET"]),
            Route("/templates/tags", self.assign_tags, methods=["POST"]),
            Route("/templates/tags", self.delete_tags, methods=["DELETE"]),
            Route("/templates/aliases/{alias:path}", self.alias, methods=["GET"]),
            Route(uploads.PREFIX + "{files}", self.upload, methods=["PUT"]),
            Route("/templates/{id}/files/{files}", self.files, methods=["GET"]),
            Route("/v2/templates/{id}/builds/{build}", self.start, methods=["POST"]),
            Route("/templates/{id}/builds/{build}/status", self.status, methods=["GET"]),
            Route("/templates/{id}/builds/{build}/logs", self.logs, methods=["GET"]),
            Route("/templates/{id:path}/tags", self.tags, methods=["GET"]),
            Route("/templates/{id:path}", self.update, methods=["PATCH"]),
            Route("/v2/templates/{id:path}", self.update, methods=["PATCH"]),
            # a name may be in a namespace: `team/name`
            Route("/templates/{id:path}", self.delete, methods=["DELETE"]),
            Route("/templates/{id:path}", self.get, methods=["GET"]),
        ]

    # --- builds

    async def request(self, request: Request) -> Response:
        body = await schemas.read_body(request, NewTemplate)
        given = body.name or body.alias
        if not given:
            raise bad_request("Name is required")
        name, tag = split_reference(given)
        tags = check_tags([*([tag] if ":" in given else []), *body.tags])
        record = self._builds.request(name, tags, body.cpu_count, body.memory_mb)
        template = record.template
        answer = {
            "templateID": template.template_id,
            "buildID": record.build_id,
            "public": template.public,
            "names": template.names,
            "aliases": template.names,
            "tags": record.tags,
        }
        return JSONResponse(answer, 202)

    async def files(self, request: Request) -> Response:
        files = request.path_params["files"]
        if not uploads.is_hash(files):
            raise bad_request("Invalid files hash")
        self._templates.get(request.path_params["id"])
        address = str(request.base_url).rstrip("/") + self._builds.uploads.address(files)
        present = self._builds.uploads.find(files) is not None
        return JSONResponse({"present": present, "url": address}, 201)

    async def upload(self, request: Request) -> Response:
        """Asks for no key: the address is signed."""
        files, query = request.path_params["files"], request.query_params
        self._builds.uploads.check(files, query.get("expires", ""), query.get("signature", ""))
        try:
            await self._builds.uploads.store(files, request.stream())
        except ClientDisconnect as error:
            raise bad_request("The request broke off") from error
        return Response(status_code=200)

    async def start(self, request: Request) -> Response:
        body = await schemas.read_body(request, StartBuild, most=schemas.MAX_BODY * 8)
        record = self._builds.find(request.path_params["id"], request.path_params["build"])
        self._builds.start(record, self._plan(body))
        return Response(status_code=202)

    def _plan(self, body: StartBuild) -> Plan:
        if (body.from_image is None) == (body.from_template is None):
            raise bad_request("One of fromImage and fromTemplate is needed")
        return Plan(
            image=body.from_image,
            credentials=body.credentials(),
            template=None if body.from_template is None else self._templates.resolve(body.from_template),
            steps=[step.parsed() for step in body.steps],
            force=body.force,
            start_cmd=body.start_cmd or None,
            ready_cmd=body.ready_cmd or None,
        )

    async def status(self, request: Request) -> Response:
        record = self._builds.find(request.path_params["id"], request.path_params["build"])
        status, reason = record.status, record.reason  # before the log, which may grow no more once it has ended
        entries = record.log.page(_number(request, "logsOffset", 0), _number(request, "limit", PAGE), _level(request))
        answer: dict[str, Any] = {
            "templateID": record.template.template_id,
            "buildID": record.build_id,
            "status": status,
            "logs": [],
            "logEntries": [views.build_log(entry) for entry in entries],
        }
        if status is Status.ERROR and reason is not None:
            told = [
                views.build_log(entry)
                for entry in record.log.entries
                if reason.step and entry.step == reason.step and entry.level in (Level.WARN, Level.ERROR)
            ]
            answer["reason"] = {"message": reason.message, "logEntries": told[-PAGE:]}
            if reason.step:
                answer["reason"]["step"] = reason.step
        return JSONResponse(answer)

    async def logs(self, request: Request) -> Response:
        """`cursor` is in Unix milliseconds; the lines from there on, or, backward, up to there."""
        record = self._builds.find(request.path_params["id"], request.path_params["build"])
        backward = request.query_params.get("direction") == "backward"
        cursor = _number(request, "cursor", -1)
        chosen = [entry for entry in record.log.entries if _in_reach(entry.at.timestamp() * 1000, cursor, backward)]
        if backward:
            chosen.reverse()
        entries = chosen[: min(_number(request, "limit", PAGE), PAGE)]
        return JSONResponse({"logs": [views.build_log(entry) for entry in entries]})

    # --- what there is

    async def list(self, request: Request) -> Response:
        return JSONResponse([views.template(item, self._size) for item in self._templates if item.kind == "template"])

    async def get(self, request: Request) -> Response:
        template, _ = self._templates.get(request.path_params["id"])
        return JSONResponse(views.template_with_builds(template, self._size))

    async def alias(self, request: Request) -> Response:
        reference = request.path_params["alias"]
        template, tag = self._templates.get(reference)
        if ":" in reference and tag not in template.tags:
            raise ApiError(404, f"tag '{tag}' does not exist for template '{split_reference(reference)[0]}'")
        return JSONResponse({"templateID": template.template_id, "public": template.public})

    async def update(self, request: Request) -> Response:
        body = await schemas.read_body(request, UpdateTemplate)
        template, _ = self._templates.get(request.path_params["id"])
        if body.public is not None:
            template.public = body.public
        return JSONResponse({"names": template.names})

    async def delete(self, request: Request) -> Response:
        """Of a template, or of a snapshot. Its builds that run are cancelled."""
        template, _ = self._templates.get(request.path_params["id"])
        await self._snapshots.delete(request.path_params["id"])
        await self._builds.cancel(template)
        return Response(status_code=204)

    # --- tags

    async def assign_tags(self, request: Request) -> Response:
        body = await schemas.read_body(request, AssignTags)
        if not body.tags:
            raise bad_request("At least one tag is required")
        found = self._templates.resolve(body.target)
        tags = check_tags(body.tags)
        if found.template.template_id == BASE_ID:
            raise ApiError(403, f"template '{BASE_ID}' belongs to the server")
        lost = self._templates.assign(found.template, found.build, tags, self._clock.read().wall)
        await self._builds.discard(lost)
        return JSONResponse({"tags": tags, "buildID": found.build.build_id}, 201)

    async def delete_tags(self, request: Request) -> Response:
        body = await schemas.read_body(request, DeleteTags)
        template, _ = self._templates.get(body.name)
        if template.template_id == BASE_ID:
            raise ApiError(403, f"template '{BASE_ID}' belongs to the server")
        await self._builds.discard(self._templates.unassign(template, check_tags(body.tags)))
        return Response(status_code=204)

    async def tags(self, request: Request) -> Response:
        template, _ = self._templates.get(request.path_params["id"])
        return JSONResponse(
            [
                {"tag": tag, "buildID": build.build_id, "createdAt": rfc3339(at)}
                for tag, (build, at) in template.tags.items()
            ]
        )


def _number(request: Request, name: str, default: int) -> int:
    raw = request.query_params.get(name)
    if raw is None:
        return default
    if not re.fullmatch(r"[0-9]{1,16}", raw):
        raise bad_request(f"Invalid {name}, expected a number")
    return int(raw)


def _level(request: Request) -> Level:
    raw = request.query_params.get("level", Level.DEBUG)
    if raw not in list(Level):
        raise bad_request("Invalid level")
    return Level(raw)


def _in_reach(milliseconds: float, cursor: int, backward: bool) -> bool:
    return cursor < 0 or (milliseconds <= cursor if backward else milliseconds >= cursor)
