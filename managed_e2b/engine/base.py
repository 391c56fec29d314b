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
from ..rules.leases import SECOND
from ..rules.limits import Caps
from . import host
from .complaints import Complaints
from .driver import Driver
from .line import Line
from .patience import Hold


class Scope:
    """Somebody uses a sandbox: the frame of an `acquire`, its handle, the native object. Dropped, nobody does."""

    __slots__ = ("__weakref__", "dropped", "ticket")

    def __init__(self, ticket: str, dropped: Callable[[str], object]) -> None:
        self.ticket = ticket
        # The collector may call this on any thread, inside any lock: nothing but an append is safe there.
        self.dropped = weakref.finalize(self, dropped, ticket)
        self.dropped.atexit = False


@dataclass
class Made:
    """A sandbox that was made here."""

    sandbox_id: str
    is_dead: bool = False
    """It is proved dead, and the ledger could not be told."""


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

    end_command: Callable[..., None] = lambda *_: None
    """Ends a command that nobody waits for any more, on the blocking driver: see `commands.end`."""

    began: dict[str, tuple[int, float]] = field(default_factory=dict)
    """When the sandboxes in use here were asked for: by the ledger's clock, and by one that nobody sets."""

    unidentified: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Sandboxes in use here whose rows do not tell yet what they are: id and looks so far, by ticket."""

    made: dict[str, Made] = field(default_factory=dict)
    """What was made here and whose row has not ended, by ticket: so it can be ended when the ledger cannot be asked."""

    line: Line = field(default_factory=Line)
    calls: Hold = field(default_factory=Hold)
    """Until when the endpoint's control plane wants to be left alone, creates apart."""

    complaints: Complaints = field(default_factory=Complaints)

    pid: int = field(default_factory=os.getpid)

    def is_ours(self) -> bool:
        """False in a forked child: it owns nothing, and what its parent holds is none of its business."""
        return os.getpid() == self.pid

    def now_of(self, ticket: str) -> int:
        """The time by which a row of ours is judged: the ledger's clock, without what it was set by since its create.

        A clock that somebody sets three days ahead must not end what has an hour left, nor one set back keep it.
        """
        began = self.began.get(ticket)
        return self.book.now() if began is None else began[0] + int((host.steady() - began[1]) * SECOND)

    def open_scope(self) -> Scope:
        """A new ticket, made before anything is written or sent."""
        return Scope(uuid.uuid4().hex, self.abandoned.append)


@dataclass
class Acquired:
    """A running sandbox in somebody's hands."""

    scope: Scope
    sandbox_id: str
    sandbox: Any
    """The native `e2b.Sandbox` or `e2b.AsyncSandbox`."""
    released: bool = False
    """Whether its `with` block has been left."""
    kept: bool = False
    """Whether it outlives its block, as `keep_on_error` asks for."""
    paused: bool = False
    """Whether it was found paused by somebody else when it was last looked at."""

    @property
    def ticket(self) -> str:
        return self.scope.ticket

    def keep(self) -> None:
        """Let it outlive its block, and all that holds it."""
        self.kept = True
        self.scope.dropped.detach()
