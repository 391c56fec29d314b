"""The HTTP rules of `/files`, as functions without I/O: encodings, ranges, dispositions, metadata headers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from email.utils import formatdate, parsedate_to_datetime
from urllib.parse import quote

from managed_e2b.local.runtime.agent_entries import XATTR_PREFIX

Headers = Iterable[tuple[bytes, bytes]]

GZIP = "gzip"
IDENTITY = "identity"

METADATA_PREFIX = b"x-metadata-"
METADATA_KEY_LIMIT = 255 - len(XATTR_PREFIX)  # bytes: the kernel's limit for the name of an xattr
METADATA_TOTAL_LIMIT = 4096  # bytes of names and values: what ext4 keeps for one file

_RANGE = re.compile(r"bytes=\s*(\d*)\s*-\s*(\d*)\s*\Z")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]")


class NotAcceptable(Exception):
    """The client takes no encoding that we have."""


class RangeNotSatisfiable(Exception):
    """The range begins behind the end of the file."""


class InvalidMetadata(Exception):
    """Metadata that no file could carry; the message says why."""


def header(headers: Headers, name: bytes) -> str:
    """The first value of a header; empty when there is none."""
    return next((value.decode("latin-1").strip() for key, value in headers if key == name), "")


def qualities(accept: str) -> dict[str, float]:
    """The codings of an Accept-Encoding header with their weights. A weight that is no number counts as 1."""
    found: dict[str, float] = {}
    for item in accept.split(","):
        coding, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 1.0
        if coding:
            found[coding] = quality
    return found


def response_encoding(accept: str, *, partial: bool) -> str:
    """Which encoding a download gets. `partial` answers, and conditional ones, are never compressed.

    Gzip only for clients that ask for it alone: HTTP libraries offer it on every request by themselves, and between two
    processes of one machine it costs much more time than it saves. Raises NotAcceptable.
    """
    weights = qualities(accept)
    plain = weights.get(IDENTITY, weights.get("*", 1.0)) > 0
    gzip = weights.get(GZIP, weights.get("*", 0.0)) > 0
    alone = GZIP in weights and not set(weights) - {GZIP, IDENTITY, "*"}
    asked = gzip and alone and weights[GZIP] >= weights.get(IDENTITY, 0.0)
    if plain and (partial or not asked):
        return IDENTITY
    if gzip and not partial and (asked or not plain):
        return GZIP
    raise NotAcceptable


def is_partial(headers: Headers) -> bool:
    """Whether the request is for a part, or conditional."""
    names = {name for name, _ in headers}
    return not names.isdisjoint({b"range", b"if-modified-since", b"if-none-match", b"if-range"})


def byte_range(value: str, size: int) -> tuple[int, int] | None:
    """Start and end (exclusive) of the range asked for; None for the whole file.

    Several ranges, and what is no range of bytes, get the whole file, as RFC 9110 allows. Raises RangeNotSatisfiable.
    """
    match = _RANGE.match(value)
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        length = min(int(match[2]), size)
        if length == 0:
            raise RangeNotSatisfiable
        return size - length, size
    start = int(match[1])
    if match[2] and int(match[2]) < start:
        return None
    if start >= size:
        raise RangeNotSatisfiable
    return start, min(int(match[2]) + 1, size) if match[2] else size


def not_modified_since(value: str, mtime: int) -> bool:
    """Whether a file changed at `mtime` (seconds) is unchanged for the date in If-Modified-Since or If-Range."""
    try:
        return mtime <= parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError):
        return False


def http_date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


def inline(name: bytes) -> str:
    """A Content-Disposition for a file of this name, whatever bytes are in it."""
    text = name.decode("latin-1")
    if _TOKEN.match(text):
        return f"inline; filename={text}"
    if not _NOT_PRINTABLE.search(text):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'inline; filename="{escaped}"'
    return f"inline; filename*=utf-8''{quote(name, safe='')}"


def metadata_of(headers: Headers) -> dict[str, str]:
    """The metadata that an upload's X-Metadata-* headers carry, validated. Raises InvalidMetadata."""
    found: dict[str, str] = {}
    for name, value in headers:
        lowered = name.lower()
        if lowered.startswith(METADATA_PREFIX) and lowered != METADATA_PREFIX:
            key = lowered.removeprefix(METADATA_PREFIX).decode("latin-1")
            found.setdefault(key, value.decode("latin-1"))
    for key, text in found.items():
        if len(key) > METADATA_KEY_LIMIT:
            raise InvalidMetadata(f'metadata key "{key}" exceeds {METADATA_KEY_LIMIT} bytes')
        for label, part in (("key", key), (f'value for key "{key}"', text)):
            if wrong := _NOT_PRINTABLE.search(part):
                byte = f"0x{ord(wrong[0]):02x} at offset {wrong.start()}"
                raise InvalidMetadata(f"metadata {label} contains non-printable-ASCII byte {byte}")
    total = sum(len(XATTR_PREFIX) + len(key) + len(text) for key, text in found.items())
    if total > METADATA_TOTAL_LIMIT:
        raise InvalidMetadata(f"total metadata size {total} exceeds {METADATA_TOTAL_LIMIT} bytes")
    return found
