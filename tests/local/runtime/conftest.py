"""Real sandboxes of this host, one runtime a module. Where the host cannot run any, the tests say what it lacks."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from managed_e2b.local.runtime.base import PLAIN, GuestSpec, RuntimeUnavailable
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime
from managed_e2b.local.runtime.guest import BubblewrapGuest

from .boxes import Box


@pytest.fixture(scope="session")
def data_dir() -> Iterator[Path]:
    """One for all runtimes of the session, which leave the layers in it: what else is there fails to be removed."""
    place = Path(tempfile.mkdtemp(prefix="me2b-runtime-tests-"))
    yield place
    for layers in list(place.rglob("sandboxes/layers-*")):
        shutil.rmtree(layers)  # as their owner may
    for directory in sorted(place.rglob("*"), reverse=True):
        directory.rmdir()
    place.rmdir()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(data_dir: Path) -> AsyncIterator[BubblewrapRuntime]:
    runtime = BubblewrapRuntime(data_dir)
    try:
        await runtime.start()
    except RuntimeUnavailable as error:
        pytest.skip(f"no sandboxes on this host: {error}")
    yield runtime
    await runtime.close()


@pytest_asyncio.fixture(loop_scope="module")
async def make_box(runtime: BubblewrapRuntime) -> AsyncIterator[Callable[..., Awaitable[Box]]]:
    made: list[BubblewrapGuest] = []

    async def make(spec: GuestSpec = PLAIN) -> Box:
        guest = await runtime.create(f"t{secrets.token_hex(6)}", spec)
        made.append(guest)
        return Box(guest, runtime)

    yield make
    for guest in made:
        await guest.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def box(make_box: Callable[..., Awaitable[Box]]) -> Box:
    return await make_box()


@pytest.fixture
def freezer(runtime: BubblewrapRuntime) -> None:
    """For tests of what only control groups can do."""
    if not runtime.enforced.freezer:
        pytest.skip(f"pauses are signals on this host: {'; '.join(runtime.enforced.missing)}")


@pytest.fixture
def two_ids(runtime: BubblewrapRuntime) -> None:
    """For tests of what needs root and `user` to be two."""
    if not runtime.ids.full:
        pytest.skip("this host has one id for a sandbox: install newuidmap and give this user a range in /etc/subuid")
