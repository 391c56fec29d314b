"""Owners that died, and what they left: in the ledger and at the backend."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from managed_e2b.engine import host
from managed_e2b.ledger import Ledger
from managed_e2b.models import Host
from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.limits import Caps, Go

from .conftest import Face, settle

ELSEWHERE = Host("another machine", "its boot", "pid:[1]")


@dataclass
class Estate:
    """What a dead owner left. `held` keeps its contexts from the garbage collector."""

    lifecycle: Any
    handles: list[Any]
    held: list[Any]

    @property
    def owner(self) -> str:
        return str(self.lifecycle.owner_id)

    @property
    def ids(self) -> list[str]:
        return [handle.sandbox_id for handle in self.handles]


async def entered(face: Face, context: Any) -> Any:
    """Enter a context that nobody will leave."""
    return await settle(context.__aenter__() if face.name == "async" else context.__enter__())


async def die(lifecycle: Any) -> None:
    """As after a SIGKILL: it does nothing any more, and the ledger can tell that it is dead."""
    lifecycle._keeper.stop(10)
    lifecycle._book.close_owner(lifecycle.owner_id)


async def estate(face: Face, count: int = 1, **request: Any) -> Estate:
    """An owner that died with `count` sandboxes running."""
    lifecycle = face.open(opening_reap=False, watchdog=False, max_concurrent=count)
    held = [lifecycle.acquire(**request) for _ in range(count)]
    handles = [await entered(face, context) for context in held]
    await die(lifecycle)
    return Estate(lifecycle, handles, held)


def owner_row(book: Ledger, *, on: Host | None = None, dead: bool = False) -> str:
    """An owner in the ledger: of this host with a process that is gone when `dead`, else of the living one here."""
    owner, here = uuid.uuid4().hex, host.here()
    started = host.process_started(1) or 1
    book.open_owner(owner, on or here, 1, started + dead, "test", 600 * SECOND)
    return owner


def queued_row(book: Ledger, owner: str, account: str, **metadata: str) -> str:
    """A row in line: nothing was sent."""
    ticket = uuid.uuid4().hex
    book.enqueue(
        ticket, owner=owner, account=account, source=("template", "base"), timeout=600, lease=300,
        metadata=metadata, sdk_version="test",
    )  # fmt: skip
    return ticket


def creating_row(book: Ledger, owner: str, account: str, **metadata: str) -> str:
    """A row whose create may have been sent."""
    ticket = queued_row(book, owner, account, **metadata)
    assert isinstance(book.turn(ticket, owner, account, Caps(10_000)), Go)
    return ticket


def running_row(book: Ledger, owner: str, account: str, sandbox_id: str, **metadata: str) -> str:
    """A row of a sandbox that runs, as the ledger believes."""
    ticket = creating_row(book, owner, account, **metadata)
    assert book.running(ticket, owner, sandbox_id, sent_at=book.now(), remote=300) is not None
    return ticket
