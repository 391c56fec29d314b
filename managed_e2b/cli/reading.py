"""Reading without taking part: what the ledger and the backend say, with no owner registered and nothing made."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from managed_e2b.drivers.base import run
from managed_e2b.drivers.sdk import Sdk
from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.models import RemoteSandbox, SandboxRecord, State
from managed_e2b.rules.states import TERMINAL
from managed_e2b.settings import E2BConfig

OPEN: frozenset[State] = frozenset(State) - TERMINAL
"""The states of a sandbox that is wanted or may be running."""


def ledger_records(db: str, states: Collection[State] | None = None) -> list[SandboxRecord] | None:
    """The ledger's rows in those states (None: in any); None when there is no such ledger, which is not made then.

    Raises LedgerError when it cannot be opened.
    """
    is_file = "://" not in db
    if is_file and Path(db).parent.is_dir() and not Path(db).exists():
        return None
    ledger = Ledger(open_engine(db))
    try:
        return ledger.records(states_=states)
    finally:
        ledger.close()


def list_remote(config: E2BConfig) -> list[RemoteSandbox]:
    """Running and paused sandboxes, by the backend's own list. Raises BackendError."""

    async def collect() -> list[RemoteSandbox]:
        return [sandbox async for page in Sdk(config, is_async=False).pages() for sandbox in page]

    return run(collect())
