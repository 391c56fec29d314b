"""What every part of the engine works with."""

from __future__ import annotations

import collections
import os
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..ledger import Ledger
from ..rules.cleanup import OWNER as OWNER
from ..rules.cleanup import TICKET as TICKET
from ..rules.limits import Caps
from .driver import Driver


class Scope:
    """Somebody uses a sandbox: the frame of an `acquire`, its handle, the native object. Dropped, nobody does."""

    __slots__ = ("__weakref__", "ticket")

    def __init__(self, ticket: str) -> None:
        self.ticket = ticket


@dataclass
class Engine:
    """One lifecycle's engine. `clean` releases a ticket on the blocking driver, whatever the face: see `finish`."""

    driver: Driver
    book: Ledger
    account: str
    owner: str
    caps: Caps
    lease: int
    clean: Callable[..., bool]
    abandoned: collections.deque[str] = field(default_factory=collections.deque)
    """Tickets whose scope was dropped without a release; the keeper releases them."""

    pid: int = field(default_factory=os.getpid)

    def is_ours(self) -> bool:
        """False in a forked child: it owns nothing, and what its parent holds is none of its business."""
        return os.getpid() == self.pid

    def open_scope(self) -> Scope:
        """A new ticket, made before anything is written or sent."""
        scope = Scope(uuid.uuid4().hex)
        # The collector may call this on any thread, inside any lock: nothing but an append is safe here.
        weakref.finalize(scope, self.abandoned.append, scope.ticket).atexit = False
        return scope


@dataclass
class Acquired:
    """A running sandbox in somebody's hands."""

    scope: Scope
    sandbox_id: str
    sandbox: Any
    """The native `e2b.Sandbox` or `e2b.AsyncSandbox`."""
    released: bool = False
    """Whether its `with` block has been left."""

    @property
    def ticket(self) -> str:
        return self.scope.ticket
