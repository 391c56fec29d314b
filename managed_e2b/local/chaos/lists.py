"""Lists that lie. Pure: snapshots in, pages out."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from managed_e2b.local.api import views
from managed_e2b.local.chaos.rules import EmptyList, ListFault, LossyList, RepeatingList, StaleList, TruncatedList
from managed_e2b.local.listing import Page, Query, encode_token, select
from managed_e2b.local.model import Sandbox

KEPT = 21
"""Snapshots that are kept: the present one and as many as `StaleList.calls` can ask for."""


@dataclass(frozen=True)
class Seen:
    """A sandbox as it was at one moment: what lists filter and sort by, and what they show."""

    sandbox_id: str
    started_at: datetime
    shown_state: str | None
    metadata: Mapping[str, str]
    template_names: frozenset[str]
    view: Mapping[str, Any]


def snapshot(sandboxes: Iterable[Sandbox]) -> tuple[Seen, ...]:
    """All that a list could show now."""
    return tuple(
        Seen(box.sandbox_id, box.started_at, box.shown_state, box.metadata, box.template_names, views.listed(box))
        for box in sandboxes
    )


def lie(
    history: Sequence[Sequence[Seen]], query: Query, faults: Sequence[tuple[ListFault, random.Random]]
) -> Page[Seen]:
    """The page that answers `query`, as the faults leave it. `history`: the snapshots of all lists, the last is now."""
    shown = history[-1]
    for fault, _ in faults:
        match fault:
            case StaleList():
                shown = history[max(0, len(history) - 1 - fault.calls)]
            case RepeatingList():
                query = replace(query, cursor=None)
            case _:
                pass
    page = select(shown, query)
    for fault, dice in faults:
        match fault:
            case EmptyList():
                page = Page([], None)
            case LossyList():
                page = replace(page, items=[item for item in page.items if dice.random() >= fault.fraction])
            case TruncatedList():
                page = Page(page.items[: fault.keep], None)
            case RepeatingList() if page.items:
                page = replace(page, next_token=encode_token(page.items[-1], ascending=query.ascending))
            case _:
                pass
    return page
