"""The file agent, asked directly about files of this host, and envd's file services in front of it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from managed_e2b.local.runtime import agent_ops


class Ask:
    """Calls an operation as the server does, arguments and value through JSON. `fds` are what it handed out."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def __call__(self, op: str, **args: Any) -> Any:
        value, fds = agent_ops.HANDLERS[op](json.loads(json.dumps(args)), [])
        self.fds += fds
        return json.loads(json.dumps(value))

    def whole(self, op: str, **args: Any) -> tuple[list[Any], Any]:
        """An operation done in slices, to its end: the items and the result."""
        answer = self(op, **args)
        items = answer["items"]
        while answer["job"] is not None:
            answer = self("job", job=answer["job"])
            items += answer["items"]
        return items, answer["result"]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ask() -> Iterator[Ask]:
    gc.collect()  # what an earlier test left to the collector must not go in between
    before = open_descriptors()
    ask = Ask()
    yield ask
    for fd in ask.fds:
        os.close(fd)
    agent_ops._watches.close()
    assert open_descriptors() == before


@pytest.fixture
def me() -> dict[str, int]:
    return {"uid": os.getuid(), "gid": os.getgid()}


@pytest.fixture
def fails() -> Callable[..., AbstractContextManager[None]]:
    """Expect an OSError with one of these numbers."""

    @contextmanager
    def expected(*codes: int) -> Iterator[None]:
        with pytest.raises(OSError, match="Errno") as caught:
            yield
        assert caught.value.errno in codes

    return expected


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in ("b/inner/deep", "a", "c"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "b" / "file").write_text("")
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "link").symlink_to("b")
    return tmp_path


@pytest.fixture
def xattrs(tmp_path: Path) -> None:
    try:
        os.setxattr(tmp_path, "user.e2b.probe", b"")
        os.removexattr(tmp_path, "user.e2b.probe")
    except OSError:
        pytest.skip("the filesystem of the tests has no user xattrs")


@pytest.fixture
async def http(served: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, headers=served.headers, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def in_thread() -> Callable[..., Awaitable[Any]]:
    """Call the sync SDK while the server goes on in this thread's loop."""
    return asyncio.to_thread


def links_of_descriptors() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return links


@pytest.fixture
def nothing_open(tmp_path: Path, until: Any) -> Callable[[], Awaitable[None]]:
    """Wait until no file of the sandbox is open in the server; its threads may need a moment to let go."""

    async def wait() -> None:
        await until(lambda: not any(link.startswith(str(tmp_path)) for link in links_of_descriptors()))

    return wait
