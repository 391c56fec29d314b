"""Lists of sandboxes: filters, order and pages. Pure.

The order is by start, newest first, ties by id; ascending is the exact reverse. A page token names the last
item of the page before by its place in that order, so it stays good when that item is gone.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Generic, Protocol, TypeVar
from urllib.parse import unquote_plus

from managed_e2b.local.clock import rfc3339
from managed_e2b.local.errors import bad_request

MAX_LIMIT = 100
STATES = frozenset({"running", "paused"})


class Listable(Protocol):
    @property
    def sandbox_id(self) -> str: ...
    @property
    def started_at(self) -> datetime: ...
    @property
    def shown_state(self) -> str | None: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def template_names(self) -> frozenset[str]: ...


T = TypeVar("T", bound=Listable)
U = TypeVar("U")


@dataclass(frozen=True)
class Query:
    """What a list was asked for. `cursor` is the (start, id) of the last item already seen; no `limit` is no paging."""

    states: frozenset[str] = STATES
    metadata: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    started_after: datetime | None = None
    ascending: bool = False
    limit: int | None = MAX_LIMIT
    cursor: tuple[datetime, str] | None = None


@dataclass(frozen=True)
class Page(Generic[U]):
    items: Sequence[U]
    next_token: str | None


def select(sandboxes: Iterable[T], query: Query) -> Page[T]:
    """The page of `sandboxes` that `query` asks for."""
    return page_of(
        [sandbox for sandbox in sandboxes if _matches(sandbox, query)],
        lambda sandbox: (sandbox.started_at, sandbox.sandbox_id),
        limit=query.limit,
        cursor=query.cursor,
        ascending=query.ascending,
    )


def page_of(
    found: Iterable[U],
    place: Callable[[U], tuple[datetime, str]],
    *,
    limit: int | None,
    cursor: tuple[datetime, str] | None,
    ascending: bool = False,
) -> Page[U]:
    """A page of anything that has a moment and an id, in the order of all lists."""
    ordered = sorted(found, key=lambda item: _place(*place(item)), reverse=ascending)
    if cursor is not None:
        seen = _place(*cursor)
        ordered = [item for item in ordered if _is_after(_place(*place(item)), seen, ascending)]
    page = ordered[:limit]
    more = len(ordered) > len(page)
    return Page(page, _token(*place(page[-1]), ascending=ascending) if more else None)


def _matches(sandbox: Listable, query: Query) -> bool:
    return (
        sandbox.shown_state in query.states
        and query.metadata.items() <= sandbox.metadata.items()
        and (query.template is None or query.template in sandbox.template_names)
        and (query.started_after is None or sandbox.started_at >= query.started_after)
    )


def _place(moment: datetime, name: str) -> tuple[int, str]:
    """Sorts newest first, then by id. Whole microseconds: a float would make two starts equal."""
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return -((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds), name


def _is_after(place: tuple[int, str], seen: tuple[int, str], ascending: bool) -> bool:
    return place < seen if ascending else place > seen


def encode_token(last: Listable, *, ascending: bool) -> str:
    return _token(last.started_at, last.sandbox_id, ascending=ascending)


def _token(moment: datetime, name: str, *, ascending: bool) -> str:
    text = f"{rfc3339(moment)}__{name}" + ("__asc" if ascending else "")
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_token(token: str, *, ascending: bool) -> tuple[datetime, str]:
    """The cursor a token stands for. Raises ApiError(400) for a token of another order, or not of ours."""
    try:
        text = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
        started, sandbox_id, *order = text.split("__")
        moment = datetime.fromisoformat(started)
    except (binascii.Error, ValueError) as error:
        raise bad_request("Invalid next token") from error
    if moment.tzinfo is None or not sandbox_id or order != (["asc"] if ascending else []):
        raise bad_request("Invalid next token")
    return moment, sandbox_id


def parse_query(params: Mapping[str, str]) -> Query:
    """A list's query string, decoded once by the web framework. Raises ApiError(400)."""
    order = params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("Invalid order, expected 'asc' or 'desc'")
    ascending = order == "asc"
    token = params.get("nextToken")
    return Query(
        states=_parse_states(params.get("state")),
        metadata=parse_metadata(params.get("metadata", "")),
        template=_parse_template(params.get("template")),
        started_after=_parse_time(params.get("startedAfter")),
        ascending=ascending,
        limit=_parse_limit(params.get("limit")),
        cursor=decode_token(token, ascending=ascending) if token else None,
    )


def parse_metadata(raw: str) -> dict[str, str]:
    """The metadata filter: `key=value` pairs joined by `&`, quoted as a whole and each part once more."""
    pairs = {}
    for pair in filter(None, _unquote(raw).split("&")):
        key, _, value = pair.partition("=")
        pairs[_unquote(key)] = _unquote(value)
    return pairs


_BROKEN_QUOTE = re.compile(r"%(?![0-9A-Fa-f]{2})")


def _unquote(text: str) -> str:
    if _BROKEN_QUOTE.search(text):
        raise bad_request("Invalid metadata filter: broken percent-encoding")
    try:
        return unquote_plus(text, errors="strict")
    except UnicodeDecodeError as error:
        raise bad_request("Invalid metadata filter: not UTF-8") from error


def _parse_states(raw: str | None) -> frozenset[str]:
    states = frozenset(filter(None, (raw or "").split(",")))
    if not states <= STATES:
        raise bad_request("Invalid state, expected 'running' or 'paused'")
    return states or STATES


def _parse_template(raw: str | None) -> str | None:
    if raw and ":" in raw:
        raise bad_request("Invalid template filter: it must not hold a tag")
    return raw or None


def _parse_time(raw: str | None) -> datetime | None:
    if not raw:
        return None
    try:
        # a plus sign that was not quoted arrives as a space
        moment = datetime.fromisoformat(raw.replace(" ", "+"))
    except ValueError as error:
        raise bad_request("Invalid startedAfter, expected an RFC 3339 time") from error
    if moment.tzinfo is None:
        raise bad_request("Invalid startedAfter, expected an RFC 3339 time with a zone")
    return moment


def _parse_limit(raw: str | None) -> int:
    if raw is None:
        return MAX_LIMIT
    if not re.fullmatch(r"[0-9]{1,9}", raw) or not 1 <= int(raw) <= MAX_LIMIT:
        raise bad_request(f"Invalid limit, expected 1 to {MAX_LIMIT}")
    return int(raw)
