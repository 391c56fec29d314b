"""Snapshots: the files of a sandbox as they were at one moment, kept by name until somebody deletes them.

They are entries of the catalog of templates, so sandboxes are made of them as of any template. A snapshot outlives
its sandbox, but not the server. Memory is not kept: what is made of a snapshot starts without any process.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from managed_e2b.local.clock import Clock
from managed_e2b.local.errors import ApiError, bad_request
from managed_e2b.local.listing import Page, page_of
from managed_e2b.local.model import Sandbox
from managed_e2b.local.sandboxes import SandboxRegistry
from managed_e2b.local.templates import (
    BASE_ID,
    DEFAULT_TAG,
    Build,
    Settings,
    Template,
    TemplateCatalog,
    check_tags,
    new_template_id,
    split_reference,
)


@dataclass(frozen=True)
class Snapshot:
    """One tag of a snapshot."""

    template: Template
    tag: str

    @property
    def created_at(self) -> datetime:
        """When the tag was given to what it names now."""
        return self.template.tags[self.tag][1]

    @property
    def snapshot_id(self) -> str:
        """What a sandbox is made from: `name:tag`, or `id:tag` of one without a name."""
        return f"{self.template.alias or self.template.template_id}:{self.tag}"

    @property
    def place(self) -> tuple[datetime, str]:
        """Where it is in a list. The tag in hexadecimal, as it may hold what a page's token is split at."""
        return self.created_at, f"{self.template.template_id}-{self.tag.encode().hex()}"


@dataclass(frozen=True)
class SnapshotQuery:
    """What a list was asked for. `name`: the template's, or its id; `tag`: None for all."""

    source: str | None = None
    name: str | None = None
    tag: str | None = None
    limit: int = 100
    cursor: tuple[datetime, str] | None = None


def select(templates: Iterable[Template], query: SnapshotQuery) -> Page[Snapshot]:
    """The page of the snapshots among `templates`, newest first. Pure."""
    return page_of(
        [snapshot for snapshot in _snapshots(templates) if _matches(snapshot, query)],
        lambda snapshot: snapshot.place,
        limit=query.limit,
        cursor=query.cursor,
    )


def _snapshots(templates: Iterable[Template]) -> Iterator[Snapshot]:
    for template in templates:
        if template.kind == "snapshot":
            yield from (Snapshot(template, tag) for tag in template.tags)


def _matches(snapshot: Snapshot, query: SnapshotQuery) -> bool:
    return (
        (query.source is None or query.source == snapshot.template.source)
        and (query.name is None or query.name in (snapshot.template.template_id, *snapshot.template.names))
        and (query.tag is None or query.tag == snapshot.tag)
    )


class Snapshots:
    """Makes and deletes them."""

    def __init__(self, registry: SandboxRegistry, templates: TemplateCatalog, clock: Clock) -> None:
        self._registry = registry
        self._templates = templates
        self._clock = clock

    async def create(self, sandbox_id: str, name: str | None, *, memory: bool = True) -> Snapshot:
        """A snapshot of a running sandbox, which goes on running. A name that is in use gets a new build.

        `memory` True keeps as well what of the memory can be told: the environment the sandbox was given. Raises
        ApiError: 400 for a bad name; 404, 409 when it is paused, and what keeps its files from being copied.
        """
        alias, tag = (None, DEFAULT_TAG) if name is None else _checked(name)

        def keep(sandbox: Sandbox, image: str) -> tuple[Snapshot, list[Build]]:
            # all of it without an await: the name may have been given to another while the files were copied
            settings, now = _settings_of(sandbox, memory=memory), self._clock.read().wall
            build = Build(str(uuid.uuid4()), image, now, settings, sandbox.spec.cpu_count, sandbox.spec.memory_mb)
            template = None if alias is None else self._templates.find(alias)
            if template is None:
                names = [] if alias is None else [alias]
                template = Template(
                    new_template_id(), build.created_at, kind="snapshot", source=sandbox.sandbox_id, names=names
                )
                self._templates.add(template)
            lost = self._templates.assign(template, build, [tag], build.created_at)
            return Snapshot(template, tag), lost

        snapshot, lost = await self._registry.commit(sandbox_id, keep)
        await self._forget(lost)
        return snapshot

    async def delete(self, reference: str) -> None:
        """Delete a template or a snapshot, with all its tags. Raises ApiError: 400 in use, 403 `base`, 404."""
        template, _ = self._templates.get(reference)
        if template.template_id == BASE_ID:
            raise ApiError(403, f"template '{BASE_ID}' belongs to the server")
        states = {box.shown_state for box in self._registry if box.spec.template_id == template.template_id}
        for state in ("running", "paused"):
            if state in states:
                what = f"there are {state} sandboxes using it"
                raise bad_request(f"cannot delete template '{template.template_id}' because {what}")
        await self._forget(self._templates.remove(template))

    async def _forget(self, builds: Iterable[Build]) -> None:
        for build in builds:
            await self._registry.drop(build.image)


def _checked(name: str) -> tuple[str, str]:
    alias, tag = split_reference(name)
    if alias == BASE_ID:
        raise bad_request(f"Invalid name: '{BASE_ID}' belongs to the server")
    return alias, check_tags([tag])[0]


def _settings_of(sandbox: Sandbox, *, memory: bool) -> Settings:
    settings = sandbox.spec.settings
    given: Mapping[str, str] = sandbox.spec.env_vars if memory else {}
    return replace(settings, env={**settings.env, **given})
