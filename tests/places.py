"""Directories for the local servers of tests, and servers on them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime
from managed_e2b.local.server import LocalServer


@contextmanager
def place_of_servers(prefix: str) -> Iterator[Path]:
    """Where servers keep their files; what outlives them belongs to ids of sandboxes, and a last one removes it."""
    place = Path(tempfile.mkdtemp(prefix=prefix))
    yield place
    asyncio.run(_remove_kept(place))
    shutil.rmtree(place)


async def _remove_kept(place: Path) -> None:
    runtime = BubblewrapRuntime(place, cache_bytes=0)
    try:
        await runtime.start()
    except RuntimeUnavailable:
        return
    await runtime.close()


@asynccontextmanager
async def server_at(data_dir: Path) -> AsyncIterator[LocalServer]:
    """A server of this process. Skips where the host cannot run sandboxes."""
    server = LocalServer(runtime=BubblewrapRuntime(data_dir))
    try:
        await server.start()
    except RuntimeUnavailable as error:
        pytest.skip(f"no sandboxes on this host: {error}")
    yield server
    await server.close()
