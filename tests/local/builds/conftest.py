"""A local server with real sandboxes, one for all tests of builds, and a real registry beside it where there is one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2b import AsyncSandbox, AsyncTemplate, LogEntry

from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.server import LocalServer

from ...places import place_of_servers
from . import images


@dataclass
class World:
    """The server as the SDK sees it."""

    server: LocalServer
    logs: list[LogEntry] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        return {"api_url": self.server.url, "sandbox_url": self.server.url, "api_key": self.server.api_key}

    @property
    def root(self) -> str:
        """The name that root's files show: where the host gives one id only, `user` is its name."""
        return "user" if self.server._runtime.library.one_id else "root"

    async def build(self, template: Any, name: str, **more: Any) -> Any:
        """What the SDK returns; `logs` holds what the build said."""
        self.logs = []
        return await AsyncTemplate.build(template, name, on_build_logs=self.logs.append, **more, **self.options)

    async def create(self, name: str, **more: Any) -> AsyncSandbox:
        return await AsyncSandbox.create(name, **more, **self.options)

    async def output(self, name: str, command: str) -> str:
        """Of a command in a new sandbox."""
        async with await self.create(name) as sandbox:
            return (await sandbox.commands.run(command)).stdout

    def said(self, part: str) -> list[str]:
        return [entry.message for entry in self.logs if part in entry.message]


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    with place_of_servers("me2b-build-tests-") as place:
        yield place


@pytest.fixture(scope="session")
def registry() -> Iterator[images.Registry]:
    if not images.available():
        pytest.skip("no docker-registry here (Debian: apt-get install docker-registry)")
    place = Path(tempfile.mkdtemp(prefix="me2b-registry-"))
    with images.serve(place) as host:
        yield images.Registry(host)
    shutil.rmtree(place)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(place: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    mirrors = {}
    if images.available():
        mirrors["docker.io"] = f"http://{request.getfixturevalue('registry').host}"
    server = LocalServer(data_dir=place, registry_mirrors=mirrors)
    try:
        await server.start()
    except RuntimeUnavailable as error:
        pytest.skip(f"no sandboxes on this host: {error}")
    yield World(server)
    await server.close()
