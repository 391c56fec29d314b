"""The backend's list, read with bounds. It is a clue: it lags, loses, breaks off and repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import BackendError, RateLimitedError
from ..models import RemoteSandbox
from .base import TICKET, Engine
from .patience import PATIENCE, patiently

MAX_PAGES = 100
"""The most pages of a list that one pass reads."""

LOOKUP_PAGES = 20
"""The most pages of a list that a lookup by ticket reads."""


@dataclass(frozen=True)
class Listing:
    """What a list showed, by id. `cut`: why it was not read to its end. `error`: what broke it off, if that did."""

    found: Mapping[str, RemoteSandbox]
    cut: str | None = None
    error: BackendError | None = None


async def read(
    engine: Engine,
    metadata: Mapping[str, str] | None = None,
    *,
    pages: int = MAX_PAGES,
    cut: Callable[[int], str | None] = lambda _count: None,
    patience: float = PATIENCE,
) -> Listing:
    """Read the list of running and paused sandboxes, at most `pages` pages, until `cut(count)` says why to end.

    When it is answered by 429 it is read again from its beginning, for about `patience` seconds.
    """
    try:
        return await patiently(engine, _read, engine, metadata, pages, cut, patience=patience)
    except RateLimitedError as error:
        return Listing({}, f"the list broke off: {error}", error)


async def _read(
    engine: Engine, metadata: Mapping[str, str] | None, pages: int, cut: Callable[[int], str | None]
) -> Listing:
    found: dict[str, RemoteSandbox] = {}
    count = 0
    why: str | None = None
    try:
        async for page in engine.driver.sdk.pages(metadata):
            fresh = {item.sandbox_id: item for item in page if item.sandbox_id not in found}
            found |= fresh
            count += 1
            if page and not fresh:
                why = "the list repeats itself"
            elif count >= pages:
                why = f"{pages} pages of the list were read"
            else:
                why = cut(len(found))
            if why is not None:
                break
    except RateLimitedError:
        raise
    except BackendError as error:
        return Listing(found, f"the list broke off: {error}", error)
    return Listing(found, why)


async def everything(engine: Engine) -> list[RemoteSandbox]:
    """What is listed as running or paused for this key. A clue, never a proof. Raises BackendError."""
    listing = await read(engine)
    if listing.error is not None:
        raise listing.error
    return list(listing.found.values())


async def lookup(engine: Engine, ticket: str, patience: float = PATIENCE) -> list[str]:
    """Ids of sandboxes that carry a ticket, each once. An empty answer proves nothing. Raises BackendError."""
    listing = await read(engine, {TICKET: ticket}, pages=LOOKUP_PAGES, patience=patience)
    if listing.error is not None:
        raise listing.error
    # Compared here too: an endpoint that ignores the filter must not cost a stranger's sandbox.
    return [item.sandbox_id for item in listing.found.values() if item.metadata.get(TICKET) == ticket]
