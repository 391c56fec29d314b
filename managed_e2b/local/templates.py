"""The templates a sandbox can be made from, and how their names are read.

A reference is `name`, `name:tag` or `namespace/name:tag`, in lower case; the tag of an untagged one is `default`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from managed_e2b.local.errors import ApiError, bad_request

DEFAULT_TAG = "default"

_NAME = re.compile(r"(?:[a-z0-9_-]+/)?[a-z0-9_-]+")
_TAG = re.compile(r"[a-z0-9_.-]+")


@dataclass(frozen=True)
class Template:
    template_id: str
    alias: str
    build_id: str
    image: str = "base"
    """The runtime's name of its files."""
    tags: frozenset[str] = frozenset({DEFAULT_TAG})


BASE = Template(template_id="base", alias="base", build_id="00000000-0000-4000-8000-000000000000")


def split_reference(reference: str) -> tuple[str, str]:
    """The name and tag of a reference. Raises ApiError(400) for what can't be one."""
    name, colon, tag = reference.strip().lower().partition(":")
    if not _NAME.fullmatch(name) or (colon and not _TAG.fullmatch(tag)):
        raise bad_request("Invalid template reference, expected name or name:tag")
    return name, tag or DEFAULT_TAG


class TemplateCatalog:
    """Which templates exist."""

    def __init__(self, templates: tuple[Template, ...] = (BASE,)) -> None:
        self._by_name = {name: template for template in templates for name in (template.template_id, template.alias)}

    def __iter__(self) -> Iterator[Template]:
        return iter(dict.fromkeys(self._by_name.values()))

    def find(self, name: str) -> Template | None:
        return self._by_name.get(name)

    def resolve(self, reference: str) -> Template:
        """The template of a reference. Raises ApiError: 400 for a malformed one, 404 for an unknown one."""
        name, tag = split_reference(reference)
        template = self.find(name)
        if template is None:
            raise ApiError(404, f"template '{name}' not found")
        if tag not in template.tags:
            raise ApiError(404, f"tag '{tag}' does not exist for template '{name}'")
        return template
