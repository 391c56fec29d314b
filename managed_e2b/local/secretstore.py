"""Secrets: which there are, in which version, with which metadata. Their values are not kept.

On E2B a secret's value comes into a request on its way out of a sandbox, by a rule of the sandbox's network. The local
server applies no such rules, and refuses them, so nothing here could ever use a value: what is not kept cannot leak.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from managed_e2b.local.clock import Clock
from managed_e2b.local.errors import ApiError, bad_request
from managed_e2b.local.listing import Page, page_of

MOST_SECRETS = 1000
MAX_NAME = 128
MAX_ENTRIES = 32
"""Of metadata; the other limits are in bytes."""
MAX_KEY = 128
MAX_ENTRY_VALUE = 1024
MAX_METADATA = 8192
MAX_VALUE = 65536

ID_PREFIX = "sec_"
_ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ID = re.compile(rf"{ID_PREFIX}[{_ID_ALPHABET}]{{26}}")
_NAME = re.compile(r"[a-z0-9_-]+")


@dataclass(frozen=True)
class Secret:
    secret_id: str
    name: str
    version: int
    metadata: Mapping[str, str]
    created_at: datetime
    updated_at: datetime


class SecretStore:
    """The secrets of one server; they end with it. Names are lower-cased. A selector is a name or an id."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._secrets: dict[str, Secret] = {}  # by id

    def __iter__(self) -> Iterator[Secret]:
        return iter(list(self._secrets.values()))

    def page(self, limit: int, cursor: tuple[datetime, str] | None) -> Page[Secret]:
        """Newest first."""
        return page_of(self, lambda secret: (secret.created_at, secret.secret_id), limit=limit, cursor=cursor)

    def get(self, selector: str) -> Secret:
        """Raises ApiError: 400 for what is neither a name nor an id, 404."""
        wanted = selector.strip().lower()
        if wanted.startswith(ID_PREFIX):
            if not _ID.fullmatch(wanted):
                raise _invalid("what begins with sec_ is the id of a secret, and this is none")
            found = self._secrets.get(wanted)
        else:
            name = normal_name(selector)
            found = next((secret for secret in self if secret.name == name), None)
        if found is None:
            raise ApiError(404, "Secret not found")
        return found

    def create(self, name: str, value: str, metadata: Mapping[str, str]) -> Secret:
        """Its first version. Raises ApiError: 400, and 409 for a name that is taken and for too many secrets."""
        name = normal_name(name)
        check(value, metadata)
        if any(secret.name == name for secret in self):
            raise ApiError(409, f"Secret with name '{name}' already exists")
        if len(self._secrets) >= MOST_SECRETS:
            raise ApiError(409, f"there are {MOST_SECRETS} secrets already")
        now = self._clock.read().wall
        secret = Secret(_new_id(), name, 1, dict(metadata), now, now)
        self._secrets[secret.secret_id] = secret
        return secret

    def update(self, selector: str, value: str, metadata: Mapping[str, str] | None) -> Secret:
        """One version more; `metadata` None stays as it is. Raises ApiError: 400, 404."""
        before = self.get(selector)
        kept = before.metadata if metadata is None else dict(metadata)
        check(value, kept)
        now = self._clock.read().wall
        secret = replace(before, version=before.version + 1, metadata=kept, updated_at=now)
        self._secrets[secret.secret_id] = secret
        return secret

    def delete(self, selector: str) -> None:
        """Raises ApiError: 400, 404."""
        del self._secrets[self.get(selector).secret_id]


def normal_name(name: str) -> str:
    """As names are kept. Raises ApiError(400). Pure."""
    normal = name.strip().lower()
    if len(normal) > MAX_NAME or not _NAME.fullmatch(normal) or normal.startswith(ID_PREFIX):
        raise _invalid(f"a name has letters, digits, '_' and '-', {MAX_NAME} at most, and does not begin with sec_")
    return normal


def check(value: str, metadata: Mapping[str, str]) -> None:
    """Raises ApiError(400), which shows nothing of what was sent. Pure."""
    if len(_bytes(value)) > MAX_VALUE:
        raise _invalid(f"a value has at most {MAX_VALUE} bytes")
    if len(metadata) > MAX_ENTRIES:
        raise _invalid(f"metadata has at most {MAX_ENTRIES} entries")
    if any(len(_bytes(key)) > MAX_KEY or len(_bytes(text)) > MAX_ENTRY_VALUE for key, text in metadata.items()):
        raise _invalid(f"a key of metadata has at most {MAX_KEY} bytes, what it stands for {MAX_ENTRY_VALUE}")
    if sum(len(_bytes(key)) + len(_bytes(text)) for key, text in metadata.items()) > MAX_METADATA:
        raise _invalid(f"metadata has at most {MAX_METADATA} bytes")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _new_id() -> str:
    first = secrets.choice(_ID_ALPHABET[:8])  # 26 digits of five bits are two more than an id has
    return ID_PREFIX + first + "".join(secrets.choice(_ID_ALPHABET) for _ in range(25))


def _invalid(reason: str) -> ApiError:
    return bad_request(f"Invalid secrets request: {reason}")
