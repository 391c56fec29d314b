"""What a sandbox really is: the id that its template's name stood for, and its agent's version, into its row.

The SDK does not pass on what the answer to a create says of it. It is asked for beside the use of a sandbox, never in
front of it: by the keeper, for all new ones with one list; by the release, after a block that was shorter than that.
"""

from __future__ import annotations

from ..errors import BackendError
from ..models import RemoteSandbox, SandboxRecord
from .base import OWNER, Engine
from .listing import read
from .patience import patiently

LOOKS = 5
"""How often a new sandbox is looked for in lists, which lag. Its release asks by its id."""


async def identify_new(engine: Engine) -> None:
    """Fill in the rows of `engine.unidentified` that the backend lists. A list that fails is one look."""
    due = list(engine.unidentified.items())
    if not due or engine.calls.left():  # it can wait for an endpoint that wants to be left alone
        return
    listing = await read(engine, {OWNER: engine.owner}, patience=0.0)
    for ticket, (sandbox_id, looks) in due:
        found = listing.found.get(sandbox_id)
        if found is not None:
            await _write(engine, ticket, found)
        if found is not None or looks + 1 >= LOOKS:
            engine.unidentified.pop(ticket, None)
        elif ticket in engine.unidentified:
            engine.unidentified[ticket] = sandbox_id, looks + 1


async def identify(engine: Engine, record: SandboxRecord) -> None:
    """Fill in one row whose sandbox is about to be killed, if nobody has. It is asked for once."""
    if record.template_id is not None or record.sandbox_id is None:
        return
    try:
        found = await patiently(engine, engine.driver.sdk.info, record.sandbox_id, patience=0.0)
    except BackendError:
        return  # no reason to wait with the kill, which will find out what is wrong
    if found is not None:
        await _write(engine, record.ticket, found)


async def _write(engine: Engine, ticket: str, found: RemoteSandbox) -> None:
    await engine.driver.ledger(engine.book.identified, ticket, found.template, found.envd_version)
