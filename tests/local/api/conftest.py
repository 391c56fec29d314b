"""The control plane and gateway over real HTTP, in front of guests that exist only as Python objects.

`FakeRuntime` and `FakeGuest` keep the contract of `runtime.base`; what they can't do here (spawn, call) fails loudly.
A guest's port is a real listening socket of this test, so the port proxy is driven for real.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from managed_e2b.local.clock import Instant
from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.runtime.base import (
    PLAIN,
    Command,
    GuestError,
    GuestGone,
    GuestProcess,
    GuestSpec,
    Recipe,
    Reply,
    RuntimeUnavailable,
    Usage,
    User,
)
from managed_e2b.local.runtime.limits import Enforced
from managed_e2b.local.server import LocalServer

API_KEY = "e2b_" + "0" * 40
PATIENCE = 10.0


class FakeGuest:
    """A sandbox without processes, whose files are the one text `files`. `gates` hold an operation until the test
    opens it."""

    def __init__(self, sandbox_id: str, images: dict[str, str], image: str) -> None:
        self.sandbox_id = sandbox_id
        self.images = images
        self.files = images[image]
        self.dead = asyncio.Event()
        self.frozen = False
        self.kills = 0
        self.kill_error: Exception | None = None
        self.freeze_error: Exception | None = None
        self.kill_gate = asyncio.Event()
        self.freeze_gate = asyncio.Event()
        self.killing = asyncio.Event()
        self.freezing = asyncio.Event()
        self.kill_gate.set()
        self.freeze_gate.set()
        self.commit_error: Exception | None = None
        self.commit_gate = asyncio.Event()
        self.commit_gate.set()
        self.committing = asyncio.Event()
        self.ports: dict[int, int] = {}

    async def spawn(self, command: Command) -> GuestProcess:
        raise AssertionError("no processes here")

    async def call(self, op: str, fds: Sequence[int] = (), **args: Any) -> Reply:
        raise AssertionError("no files here")

    async def user(self, name: str) -> User:
        raise KeyError(name)

    async def way_out(self) -> tuple[int, int]:
        raise GuestError(errno.EOPNOTSUPP, "there is no way out of a fake")

    async def connect(self, port: int) -> int:
        if port not in self.ports:
            raise GuestError(errno.ECONNREFUSED, "connection refused")
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.ports[port]))
        return sock.detach()

    async def freeze(self) -> None:
        self.freezing.set()
        await self.freeze_gate.wait()
        if self.freeze_error is not None:
            raise self.freeze_error
        self.frozen = True

    async def thaw(self) -> None:
        self.frozen = False

    async def commit(self, image: str) -> None:
        self.committing.set()
        await self.commit_gate.wait()
        if self.dead.is_set():
            raise GuestGone(self.sandbox_id)
        if self.commit_error is not None:
            raise self.commit_error
        assert image not in self.images
        self.images[image] = self.files

    async def usage(self) -> Usage:
        return Usage(2, 12.5, 1000, 2000, 0, 3000, 4000)

    async def kill(self) -> None:
        self.kills += 1
        self.killing.set()
        await self.kill_gate.wait()
        if self.kill_error is not None:
            raise self.kill_error
        self.dead.set()


class FakeRuntime:
    enforced = Enforced(frozenset({"memory", "cpu", "pids"}), disk_bytes=10240 * 1024 * 1024)

    def __init__(self) -> None:
        self.guests: list[FakeGuest] = []
        self.images = {"base": ""}
        self.create_gate = asyncio.Event()
        self.create_gate.set()
        self.creating = asyncio.Event()
        self.create_error: Exception | None = None
        self.closed = False
        self.failure = asyncio.Event()

    async def start(self) -> None:
        pass

    async def failed(self) -> RuntimeUnavailable:
        await self.failure.wait()
        return RuntimeUnavailable("the runtime failed")

    async def create(self, sandbox_id: str, spec: GuestSpec = PLAIN) -> FakeGuest:
        self.creating.set()
        await self.create_gate.wait()
        if self.create_error is not None:
            raise self.create_error
        if spec.image not in self.images:
            raise KeyError(spec.image)
        assert all(guest.sandbox_id != sandbox_id for guest in self.alive)
        guest = FakeGuest(sandbox_id, self.images, spec.image)
        self.guests.append(guest)
        return guest

    def offer(self, image: str, recipe: Recipe) -> None:
        pass

    async def remove_image(self, image: str) -> None:
        del self.images[image]

    async def close(self) -> None:
        self.closed = True
        for guest in self.guests:
            guest.dead.set()

    @property
    def alive(self) -> list[FakeGuest]:
        return [guest for guest in self.guests if not guest.dead.is_set()]


class FakeEnvd:
    """Answers with what it was asked; `/stream` stays open until it is aborted."""

    def __init__(self, ctx: EnvdContext) -> None:
        self.ctx = ctx
        self.aborted = asyncio.Event()
        self.abort_message = ""
        self.streaming = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            self.streaming.set()
            await self.aborted.wait()
            await send({"type": "http.response.body", "body": self.abort_message.encode()})
            return
        status = 204 if scope["path"] == "/health" else 200
        body = json.dumps({"envd": self.ctx.sandbox_id, "path": scope["path"], "method": scope["method"]}).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"" if status == 204 else body})

    async def abort(self, message: str) -> None:
        self.abort_message = message
        self.aborted.set()


class StepClock:
    """A clock that a test moves; timers that are due must be rung by `registry.expire_due()`."""

    def __init__(self) -> None:
        self._now = Instant(1000.0, datetime(2026, 1, 1, tzinfo=UTC))

    def read(self) -> Instant:
        return self._now

    def step(self, seconds: float) -> None:
        self._now = Instant(self._now.monotonic + seconds, self._now.wall + timedelta(seconds=seconds))


@dataclass
class World:
    """A running server and what stands behind it."""

    server: LocalServer
    runtime: FakeRuntime
    clock: StepClock
    api: httpx.AsyncClient
    anonymous: httpx.AsyncClient
    envd: type[FakeEnvd] = FakeEnvd

    async def create(self, path: str = "/v2/sandboxes", **body: Any) -> dict[str, Any]:
        answer = await self.api.post(path, json={"templateID": "base", **body})
        assert answer.status_code == 201, answer.text
        created: dict[str, Any] = answer.json()
        self.clock.step(0.001)  # so that starts differ
        return created

    def guest(self, sandbox: dict[str, Any]) -> FakeGuest:
        """The one it has now, or had last."""
        return next(guest for guest in reversed(self.runtime.guests) if guest.sandbox_id == sandbox["sandboxID"])

    async def listed(self, **params: Any) -> list[str]:
        answer = await self.api.get("/v2/sandboxes", params=params)
        assert answer.status_code == 200, answer.text
        return [item["sandboxID"] for item in answer.json()]

    async def expire(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        self.clock.step(seconds)
        self.server.registry.expire_due()

    def envd_headers(self, sandbox: dict[str, Any], port: int = 49983) -> dict[str, str]:
        return {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": str(port)}


Serve = Callable[..., Awaitable[World]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server; `clock=None` gives it the host's own. Whatever the test did, nothing of it may be left."""
    async with contextlib.AsyncExitStack() as stack:
        runtime = FakeRuntime()

        async def start(*, clock: StepClock | None, **options: Any) -> World:
            server = LocalServer(api_key=API_KEY, runtime=runtime, envd=FakeEnvd, clock=clock, **options)
            await stack.enter_async_context(server)
            key = {"X-API-KEY": API_KEY}
            api, anonymous = (
                httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=PATIENCE)
                for headers in (key, {})
            )
            await stack.enter_async_context(api)
            await stack.enter_async_context(anonymous)
            return World(server, runtime, clock or StepClock(), api, anonymous)

        yield start
    assert runtime.closed
    assert not runtime.alive


@pytest.fixture
async def world(serve: Serve) -> World:
    return await serve(clock=StepClock())


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait for a condition that only the event loop can bring about."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 -- the condition has no event of its own
                await asyncio.sleep(0.005)

    return wait


@pytest.fixture
def runtime_unavailable() -> RuntimeUnavailable:
    return RuntimeUnavailable("this host cannot run sandboxes: do this")
