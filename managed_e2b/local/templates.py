"""What sandboxes can be made of: templates and snapshots, their names and tags. One catalog for both, in memory.

A reference is `name`, `name:tag` or `namespace/name:tag`, in lower case; `name` may be a template's id, `tag` that of a
build, and the tag of an untagged one is `default`. A template has *builds*: files (an image of the runtime) and what
its sandboxes' commands run with. Each tag names one of them.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from managed_e2b.local.errors import ApiError, bad_request

DEFAULT_TAG = "default"
DEFAULT_USER = "user"

_NAME = re.compile(r"(?:[a-z0-9_-]+/)?[a-z0-9_-]+")
_TAG = re.compile(r"[a-z0-9_.-]+")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MAX_REFERENCE = 256
_ID_ALPHABET = string.ascii_lowercase + string.digits
_BEGINNING = datetime.fromtimestamp(0, UTC)


def new_template_id() -> str:
    """20 random characters, as upstream's are."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(20))


@dataclass(frozen=True)
class Settings:
    """What the commands of a template's sandboxes run with, and what is started in each. `workdir` None: the home.

    `awaited_ports`: those that what is started will listen on; a request that comes earlier waits for it.
    `guarded`: port and path of requests that need the sandbox's access token, as those to its envd do.
    """

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    user: str = DEFAULT_USER
    workdir: str | None = None
    start_cmd: str | None = None
    ready_cmd: str | None = None
    awaited_ports: frozenset[int] = frozenset()
    guarded: frozenset[tuple[int, str]] = frozenset()


NO_SETTINGS = Settings()


@dataclass(frozen=True)
class Build:
    """One state of a template. `image` is the runtime's name of its files, and belongs to this build alone.

    `key` tells what it was made of, for the cache of builds. `cpu_count` and `memory_mb` are for each of its sandboxes;
    None: what the server gives (`sizes.Sizes`).
    """

    build_id: str
    image: str
    created_at: datetime = _BEGINNING
    settings: Settings = NO_SETTINGS
    cpu_count: int | None = None
    memory_mb: int | None = None
    key: str | None = None


@dataclass(eq=False)
class Template:
    """A template, or a snapshot of a sandbox (`source` is its id then). Only the catalog changes `tags` and `names`.

    `tags`: tag → (build, when it was assigned), the oldest first. `names`: the first is the alias that answers show.
    """

    template_id: str
    created_at: datetime
    kind: Literal["template", "snapshot"] = "template"
    source: str | None = None
    public: bool = False
    names: list[str] = field(default_factory=list)
    tags: dict[str, tuple[Build, datetime]] = field(default_factory=dict)
    updated_at: datetime | None = None
    spawned: int = 0
    last_spawned_at: datetime | None = None
    latest: tuple[str, str] | None = None
    """The build that was asked for last, and its status; None: a snapshot, which has no builds of that kind."""

    @property
    def alias(self) -> str | None:
        return self.names[0] if self.names else None

    @property
    def builds(self) -> dict[str, Build]:
        """Those that a tag names, by id, the latest first."""
        latest = sorted(self.tags.values(), key=lambda entry: entry[1], reverse=True)
        return {build.build_id: build for build, _ in latest}


@dataclass(frozen=True)
class Found:
    """What a reference means."""

    template: Template
    tag: str
    build: Build


BASE_ID = "base"
BASE = Build(build_id="00000000-0000-4000-8000-000000000000", image="base")


def split_reference(reference: str) -> tuple[str, str]:
    """The name and tag of a reference. Raises ApiError(400) for what can't be one."""
    name, colon, tag = reference.strip().lower().partition(":")
    if len(reference) > _MAX_REFERENCE or not _NAME.fullmatch(name) or (colon and not _TAG.fullmatch(tag)):
        raise bad_request("Invalid template reference, expected name or name:tag")
    return name, tag or DEFAULT_TAG


def check_tags(tags: list[str]) -> list[str]:
    """Tags to assign, in lower case, each once. Raises ApiError(400): a UUID is no tag, because builds have UUIDs."""
    cleaned = [tag.strip().lower() for tag in tags]
    for tag in cleaned:
        if len(tag) > _MAX_REFERENCE or not _TAG.fullmatch(tag) or _UUID.fullmatch(tag):
            raise bad_request(f"Invalid tag '{tag[:_MAX_REFERENCE]}'")
    return list(dict.fromkeys(cleaned))


class TemplateCatalog:
    """Which templates and snapshots exist. No I/O: who removes a build gets it back, to remove its image."""

    def __init__(self, now: datetime = _BEGINNING) -> None:
        """`now`: since when there is `base`."""
        base = Template(BASE_ID, now, names=[BASE_ID], tags={DEFAULT_TAG: (BASE, now)})
        self._templates: dict[str, Template] = {}
        self._by_name: dict[str, Template] = {}
        self.add(base)

    def __iter__(self) -> Iterator[Template]:
        """Templates and snapshots, oldest first."""
        return iter(list(self._templates.values()))

    def find(self, name: str) -> Template | None:
        """By id or name, without a tag."""
        return self._templates.get(name) or self._by_name.get(name)

    def get(self, reference: str) -> tuple[Template, str]:
        """The template of a reference and the reference's tag, which it may lack. Raises ApiError: 400, 404."""
        name, tag = split_reference(reference)
        template = self.find(name)
        if template is None:
            raise ApiError(404, f"template '{name}' not found")
        return template, tag

    def resolve(self, reference: str) -> Found:
        """What sandboxes are made of. Raises ApiError: 400 for a malformed reference, 404 for an unknown one."""
        template, tag = self.get(reference)
        entry = template.tags.get(tag)
        build = entry[0] if entry is not None else template.builds.get(tag)  # a build's id names it, too
        if build is None:
            raise ApiError(404, f"tag '{tag}' does not exist for template '{split_reference(reference)[0]}'")
        return Found(template, tag, build)

    def add(self, template: Template) -> None:
        """Raises ApiError(409) when its id or a name is taken."""
        taken = next((name for name in (template.template_id, *template.names) if self.find(name) is not None), None)
        if taken is not None:
            raise ApiError(409, f"there is a template '{taken}' already")
        self._templates[template.template_id] = template
        for name in template.names:
            self._by_name[name] = template

    def remove(self, template: Template) -> list[Build]:
        """Forget it and its names; its builds, whose images nobody can reach by a name any more."""
        del self._templates[template.template_id]
        for name in template.names:
            del self._by_name[name]
        return list(template.builds.values())

    def assign(self, template: Template, build: Build, tags: list[str], now: datetime) -> list[Build]:
        """Let tags name a build of the template; the builds that none names any more."""
        before = template.builds
        for tag in tags:
            template.tags.pop(tag, None)
            template.tags[tag] = (build, now)
        template.updated_at = now
        return _lost(before, template)

    def unassign(self, template: Template, tags: list[str]) -> list[Build]:
        """Take tags away; the builds that none names any more. Raises ApiError(404), and nothing is changed then."""
        missing = next((tag for tag in tags if tag not in template.tags), None)
        if missing is not None:
            raise ApiError(
                404, f"tag '{missing}' does not exist for template '{template.alias or template.template_id}'"
            )
        before = template.builds
        for tag in tags:
            template.tags.pop(tag, None)
        return _lost(before, template)

    def count(self, template_id: str, now: datetime) -> None:
        """A sandbox was made of it."""
        template = self._templates.get(template_id)
        if template is not None:
            template.spawned += 1
            template.last_spawned_at = now


def _lost(before: Mapping[str, Build], template: Template) -> list[Build]:
    return [build for build_id, build in before.items() if build_id not in template.builds]
