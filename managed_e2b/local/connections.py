"""How many clients may be connected: half of the descriptors that this process may have. The rest is for sandboxes."""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol


def most_connections() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def backlog() -> int:
    """How many connections may wait to be accepted. asyncio accepts as many at once, before one of them can be cut."""
    return min(2048, most_connections() // 2)  # a burst of a thousand clients should not have to try again


class BoundedProtocol(H11Protocol):
    """uvicorn's connection; one too many is cut at once, before anything is read.

    Without the bound, any process of this host could take all descriptors by connecting, which needs no key: then no
    command could start and no connection be accepted, and asyncio would write a traceback for each try.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
