"""Volumes that outlive their server, and servers that come after and beside it."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from e2b import AsyncSandbox, AsyncVolume
from e2b.exceptions import AuthenticationException, ServiceBusyException, VolumeException

from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.server import LocalServer


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="me2b-kept-"))
    yield place
    shutil.rmtree(place)


@pytest.fixture
def data_dir(place: Path) -> Iterator[Path]:
    """With no volume in it. The layers of `base` stay."""
    yield place
    for shelf in place.glob("sandboxes/volumes-*"):
        shutil.rmtree(shelf)


@asynccontextmanager
async def served(place: Path, *, keep: bool = True) -> AsyncIterator[LocalServer]:
    server = LocalServer(data_dir=place, keep_volumes=keep)
    try:
        await server.start()
    except RuntimeUnavailable as error:
        pytest.skip(f"no sandboxes on this host: {error}")
    try:
        yield server
    finally:
        await server.close()


def api(server: LocalServer) -> dict[str, Any]:
    return {"api_key": server.api_key, "api_url": server.url}


async def names(server: LocalServer) -> list[str]:
    return [volume.name for volume in await AsyncVolume.list(**api(server))]


def kept(place: Path) -> Path:
    (shelf,) = place.glob("sandboxes/volumes-*")
    return shelf


async def test_the_next_server_has_the_volumes(data_dir):
    async with served(data_dir) as server:
        volume = await AsyncVolume.create("kept", **api(server))
        other = await AsyncVolume.create("removed", **api(server))
        await volume.write_file("/f", "of the first", api_url=server.url)
        await AsyncVolume.destroy(other.volume_id, **api(server))
        sandbox = await AsyncSandbox.create(volume_mounts={"/data": "kept"}, sandbox_url=server.url, **api(server))
        await sandbox.commands.run("mkdir /data/d && echo inside > /data/d/g")
    async with served(data_dir) as server:
        sandbox = await AsyncSandbox.create(volume_mounts={"/data": "kept"}, sandbox_url=server.url, **api(server))
        assert (await sandbox.commands.run("cat /data/f /data/d/g; id -un")).stdout == "of the firstinside\nuser\n"
        assert await names(server) == ["kept"]
        with pytest.raises((VolumeException, AuthenticationException)):
            await volume.read_file("/f", api_url=server.url)  # tokens end with their server
        again = await AsyncVolume.connect(volume.volume_id, **api(server))
        assert await again.read_file("/d/g", api_url=server.url) == "inside\n"
        with pytest.raises(VolumeException, match="already exists"):
            await AsyncVolume.create("kept", **api(server))
    files = [path for path in kept(data_dir).glob("*/*") if path.is_dir()]
    assert [path.name for path in files] == [volume.volume_id]


async def test_one_server_at_a_time_has_them(data_dir):
    async with served(data_dir) as first, served(data_dir) as second, served(data_dir, keep=False) as third:
        await AsyncVolume.create("mine", **api(first))
        with pytest.raises(ServiceBusyException, match="another server keeps the volumes"):
            await names(second)
        with pytest.raises(ServiceBusyException, match="--forget-volumes"):
            await AsyncSandbox.create(volume_mounts={"/data": "mine"}, sandbox_url=second.url, **api(second))
        sandbox = await AsyncSandbox.create(sandbox_url=second.url, **api(second))
        await sandbox.kill()
        assert await names(third) == []
        await AsyncVolume.create("mine", **api(third))
        await first.close()
        assert await names(second) == ["mine"]
    assert len(list(kept(data_dir).glob("files/*"))) == 1


async def test_what_a_server_that_died_left_by_half_is_removed(data_dir):
    async with served(data_dir) as server:
        whole = await AsyncVolume.create("whole", **api(server))
    shelf = kept(data_dir)
    half, lost = str(uuid.uuid4()), str(uuid.uuid4())
    (shelf / "files" / half / "deep").mkdir(parents=True)
    if os.geteuid() == 0:
        owner = (shelf / "files").stat()
        for path in (shelf / "files" / half, shelf / "files" / half / "deep"):
            os.chown(path, owner.st_uid, owner.st_gid)
    (shelf / "names" / lost).write_text("lost")
    async with served(data_dir) as server:
        assert [volume.volume_id for volume in await AsyncVolume.list(**api(server))] == [whole.volume_id]
    assert [path.name for path in (shelf / "files").iterdir()] == [whole.volume_id]
    assert [path.name for path in (shelf / "names").iterdir()] == [whole.volume_id]


async def test_nobody_else_on_the_host_reaches_the_files(data_dir):
    async with served(data_dir) as server:
        await AsyncVolume.create("closed", **api(server))
    assert (kept(data_dir) / "files").stat().st_mode & 0o077 == 0
    assert (kept(data_dir) / "names").stat().st_mode & 0o077 == 0
