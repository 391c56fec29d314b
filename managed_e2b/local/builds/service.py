"""The builds of a server: asked for, started, watched, cancelled. A few run at once, the others wait their turn."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from managed_e2b.local.builds.builder import Builder, Stage
from managed_e2b.local.builds.model import BuildFailed, Level, Log, Plan, Status
from managed_e2b.local.builds.registry import Registries
from managed_e2b.local.builds.uploads import Uploads
from managed_e2b.local.clock import Clock
from managed_e2b.local.errors import ApiError, bad_request
from managed_e2b.local.runtime.base import Guest, Runtime
from managed_e2b.local.templates import (
    BASE_ID,
    DEFAULT_TAG,
    Build,
    Template,
    TemplateCatalog,
    new_template_id,
)

log = logging.getLogger(__name__)

AT_ONCE = 4
KEPT_BUILDS = 500
"""Whose status and log can still be asked for; the oldest that have ended are forgotten."""


@dataclass(eq=False)
class BuildRecord:
    """A build, from its request on. `reason`: why it ended with an error, and at which step."""

    build_id: str
    template: Template
    tags: list[str]
    cpu_count: int | None
    memory_mb: int | None
    log: Log
    status: Status = Status.WAITING
    reason: BuildFailed | None = None
    task: asyncio.Task[None] | None = None

    def become(self, status: Status) -> None:
        self.status = status
        if self.template.latest is not None and self.template.latest[0] == self.build_id:
            self.template.latest = (self.build_id, status)


class Builds:
    """All on one event loop. `workshop` makes a guest of an image. `mirrors`: see `registry.Registries`."""

    def __init__(
        self,
        runtime: Runtime,
        workshop: Callable[[str], Awaitable[Guest]],
        templates: TemplateCatalog,
        clock: Clock,
        mirrors: Mapping[str, str],
    ) -> None:
        self._runtime = runtime
        self._workshop = workshop
        self._templates = templates
        self._clock = clock
        self._registries = Registries(mirrors, lambda: runtime.library.directory)
        self.uploads = Uploads(lambda: runtime.library.directory, clock)
        self._records: OrderedDict[str, BuildRecord] = OrderedDict()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._closing = False

    def request(self, name: str, tags: list[str], cpu_count: int | None, memory_mb: int | None) -> BuildRecord:
        """A build to be started, of a new template or of the one that has the name. Raises ApiError."""
        template = self._templates.find(name)
        now = self._clock.read().wall
        if template is None:
            template = Template(new_template_id(), now, names=[name])
            self._templates.add(template)
        elif template.template_id == BASE_ID:
            raise ApiError(403, f"template '{BASE_ID}' belongs to the server")
        elif template.kind == "snapshot":
            raise bad_request(f"'{name}' is the name of a snapshot")
        record = BuildRecord(
            str(uuid.uuid4()),
            template,
            tags or [DEFAULT_TAG],
            cpu_count,
            memory_mb,
            Log(self._clock),
        )
        template.latest = (record.build_id, record.status)
        self._records[record.build_id] = record
        self._forget_old()
        return record

    def find(self, template_id: str, build_id: str) -> BuildRecord:
        """Raises ApiError(404)."""
        record = self._records.get(build_id)
        if record is None or template_id not in (record.template.template_id, *record.template.names):
            raise ApiError(404, f"Build '{build_id[:64]}' not found")
        return record

    def start(self, record: BuildRecord, plan: Plan) -> None:
        """Begin to build. Raises ApiError: 400 when it was started already, 503 when the server ends."""
        if record.status is not Status.WAITING or record.task is not None:
            raise bad_request("build is not in waiting state")
        if self._closing:
            raise ApiError(503, "the server is shutting down", headers={"Should-Retry": "false"})
        record.become(Status.BUILDING)
        record.task = asyncio.create_task(self._build(record, plan))

    async def cancel(self, template: Template) -> None:
        """End all builds of a template, which is deleted. When this returns nothing of them is left."""
        records = [record for record in self._records.values() if record.template is template]
        tasks = {record.task for record in records if record.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for record in records:
            if record.status is Status.WAITING:
                self._fail(record, BuildFailed("", "the template was deleted"))

    async def discard(self, builds: Iterable[Build]) -> None:
        """Remove the files of builds that no tag names any more."""
        for build in builds:
            await self._runtime.remove_image(build.image)

    async def close(self) -> None:
        """End all builds."""
        self._closing = True
        tasks = {record.task for record in self._records.values() if record.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _build(self, record: BuildRecord, plan: Plan) -> None:
        start = self._clock.read().monotonic
        record.log.add(f"Building template {record.template.template_id}/{record.build_id}")
        builder = Builder(
            record.build_id,
            plan,
            record.log,
            self._runtime,
            self._workshop,
            self._registries,
            self.uploads.find,
        )
        try:
            async with self._turns:
                stage = await builder.run()
            await self._publish(record, stage)
            took = self._clock.read().monotonic - start
            record.log.add(f"Build finished, took {took:.1f}s")
            record.become(Status.READY)
        except BuildFailed as error:
            self._fail(record, error)
        except asyncio.CancelledError:
            self._fail(record, BuildFailed("", "the build was cancelled"))
        except Exception as error:
            log.exception("the build %s failed", record.build_id)
            self._fail(record, BuildFailed("", f"the server failed ({type(error).__name__}); see its log"))

    async def _publish(self, record: BuildRecord, stage: Stage) -> None:
        """Let the tags name the build. No await before that: the template may be deleted in between."""
        now = self._clock.read().wall
        if self._templates.find(record.template.template_id) is not record.template:
            await self._runtime.remove_image(stage.image)
            raise BuildFailed("", "the template was deleted")
        build = Build(record.build_id, stage.image, now, stage.settings, record.cpu_count, record.memory_mb, stage.key)
        await self.discard(self._templates.assign(record.template, build, record.tags, now))

    def _fail(self, record: BuildRecord, error: BuildFailed) -> None:
        record.log.add(f"Build failed: {error.message}", level=Level.ERROR, step=error.step or None)
        record.reason = error
        record.become(Status.ERROR)

    def _forget_old(self) -> None:
        ended = [key for key, record in self._records.items() if record.status in (Status.READY, Status.ERROR)]
        for key in ended[: max(0, len(self._records) - KEPT_BUILDS)]:
            del self._records[key]
