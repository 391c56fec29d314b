"""Does what the rules say, in front of the control plane and of the sandboxes.

The control plane's answers are short, so each is made first and then told, changed, or kept from the client. Those of a
sandbox are streams: they pass through, and "after the effect" is the moment before the first byte of the answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from managed_e2b.local.api.app import error_response
from managed_e2b.local.api.schemas import MAX_BODY
from managed_e2b.local.chaos.api import ChaosApi
from managed_e2b.local.chaos.director import Director, Plan, Subject, World
from managed_e2b.local.chaos.exchange import Exchange
from managed_e2b.local.chaos.journal import Journal
from managed_e2b.local.chaos.lists import KEPT, Seen, lie, snapshot
from managed_e2b.local.chaos.ops import control_plane_op, sandbox_op
from managed_e2b.local.chaos.rules import Script
from managed_e2b.local.chaos.streams import Cutter
from managed_e2b.local.clock import Clock
from managed_e2b.local.errors import ApiError
from managed_e2b.local.listing import Query, parse_metadata, parse_query
from managed_e2b.local.model import State
from managed_e2b.local.sandboxes import CLOSE_TIMEOUT, SandboxRegistry

log = logging.getLogger(__name__)

OWN_PATHS = "/me2b/"
"""What tests ask the server by: no fault touches it."""

_PLACE: ContextVar[object] = ContextVar("me2b_chaos_place", default=None)
"""Of the create that is being done: the tasks that do it inherit it."""


class ChaosLayer:
    """The faults of one server. `script`: what is in force from the start."""

    def __init__(self, registry: SandboxRegistry, clock: Clock, script: Script) -> None:
        self._registry = registry
        self._clock = clock
        self.director = Director(script)
        self.journal = Journal(registry.counters)
        self._history: deque[tuple[Seen, ...]] = deque(maxlen=KEPT)
        self._creating: set[object] = set()
        registry.on_made = self._made
        self._settled_keys: deque[str] = deque(maxlen=1000)
        self._hanging: set[asyncio.Future[bool]] = set()
        self._delayed: set[asyncio.Future[None]] = set()
        self._deaths: set[asyncio.Task[None]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # --- what tests ask for

    def release(self) -> int:
        """Let the requests that hang go on. Returns how many there were."""
        return self._open(go_on=True)

    def drop(self) -> None:
        """End the connections of the requests that hang or are late: none has an effect that it did not have yet."""
        self._open(go_on=False)
        for gate in self._delayed:
            if not gate.done():
                gate.set_result(None)

    def _open(self, *, go_on: bool) -> int:
        waiting = [gate for gate in self._hanging if not gate.done()]
        for gate in waiting:
            gate.set_result(go_on)
        return len(waiting)

    async def close(self) -> None:
        """Nothing hangs or is late, and nobody dies any more."""
        self.drop()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._deaths:
            await asyncio.wait(set(self._deaths), timeout=CLOSE_TIMEOUT)

    # --- the control plane

    def routes(self) -> list[Route]:
        """Where tests ask."""
        return ChaosApi(self).routes()

    def around(self, app: ASGIApp) -> ASGIApp:
        """The control plane with its faults; callers have proved that they have the key."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            path: str = scope["path"]
            if path.startswith(OWN_PATHS) or path == "/health":
                await app(scope, receive, send)
            else:
                await self._control_plane(app, scope, receive, send)

        return serve

    async def _control_plane(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        op, sandbox_id = control_plane_op(scope["method"], scope["path"])
        exchange = Exchange(receive, send, self._hanging, self._delayed)
        metadata = self._metadata_of(sandbox_id)
        if op == "create":
            metadata = _metadata_in(await exchange.peek(MAX_BODY))
        elif op == "list":
            self._history.append(snapshot(self._registry))
        key = Headers(scope=scope).get("idempotency-key")
        known = key is not None and (key in self._settled_keys or key in self._creating)
        subject = Subject(op, sandbox_id, metadata, replay=op == "create" and known)
        plan = self._begin(exchange, subject, scope["method"])
        with exchange:
            with self._place(subject, plan, key):
                for step in plan.before:
                    if not await exchange.take(step):
                        return
                answer = await self._effect(app, scope, exchange, plan)
            exchange.entry.effect = answer.status_code
            if op == "create" and answer.status_code == 201:
                self._created(exchange, subject, plan, answer)
                if key is not None:
                    self._settled_keys.append(key)
            for step in plan.after:
                if not await exchange.take(step):
                    return
            await exchange.answer(answer, scope)

    @contextmanager
    def _place(self, subject: Subject, plan: Plan, key: str | None) -> Iterator[None]:
        """Count a create that was let in until its sandbox counts: nobody else must be let into its place meanwhile."""
        if subject.op != "create" or subject.replay or plan.refused:
            yield
            return
        place = key or object()
        self._creating.add(place)
        before = _PLACE.set(place)
        try:
            yield
        finally:
            _PLACE.reset(before)
            self._creating.discard(place)

    def _made(self) -> None:
        self._creating.discard(_PLACE.get())

    async def _effect(self, app: ASGIApp, scope: Scope, exchange: Exchange, plan: Plan) -> Response:
        if plan.lists:
            try:
                return self._lying_list(scope, plan)
            except ApiError as error:
                return error_response(error)
        return await _captured(app, scope, exchange.receive)

    def _lying_list(self, scope: Scope, plan: Plan) -> Response:
        params = QueryParams(scope["query_string"])
        if scope["path"] == "/sandboxes":
            metadata = parse_metadata(params.get("metadata", ""))
            query = Query(states=frozenset({"running"}), metadata=metadata, limit=None)
        else:
            query = parse_query(params)
        page = lie(self._history, query, plan.lists)
        headers = {"X-Total-Running": str(sum(1 for item in page.items if item.shown_state == "running"))}
        if page.next_token is not None:
            headers["X-Next-Token"] = page.next_token
        return JSONResponse([dict(item.view) for item in page.items], headers=headers)

    def _created(self, exchange: Exchange, subject: Subject, plan: Plan, answer: Response) -> None:
        sandbox_id: str = json.loads(bytes(answer.body))["sandboxID"]
        exchange.entry.sandbox_id = sandbox_id
        self.journal.created(sandbox_id, subject.metadata)
        if plan.death is not None and not subject.replay:
            loop = asyncio.get_running_loop()
            self._timers[sandbox_id] = loop.call_later(plan.death, self._begin_death, sandbox_id)

    def _begin_death(self, sandbox_id: str) -> None:
        self._timers.pop(sandbox_id, None)
        sandbox = self._registry.find(sandbox_id)
        if sandbox is not None:
            task = asyncio.get_running_loop().create_task(sandbox.guest.kill())
            self._deaths.add(task)
            task.add_done_callback(self._died)

    def _died(self, task: asyncio.Task[None]) -> None:
        self._deaths.discard(task)
        if (error := task.exception()) is not None:
            log.error("an early death failed", exc_info=error)

    # --- the sandboxes

    async def sandbox(
        self, app: ASGIApp, sandbox_id: str, port: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """One request to a port of a sandbox, which `app` serves."""
        op = sandbox_op(scope["method"], scope["path"], port)
        exchange = Exchange(receive, send, self._hanging, self._delayed)
        subject = Subject(op, sandbox_id, self._metadata_of(sandbox_id))
        plan = self._begin(exchange, subject, scope["method"])
        with exchange:
            for step in plan.before:
                if not await exchange.take(step):
                    return
            await self._pass_on(app, plan, exchange, scope)

    async def _pass_on(self, app: ASGIApp, plan: Plan, exchange: Exchange, scope: Scope) -> None:
        """Serve it, and stop serving once a fault has had the last word."""
        over = asyncio.Event()
        cutter: Cutter | None = None

        async def stop() -> None:
            over.set()
            await asyncio.Event().wait()  # until it is cancelled: the server must not go on to the next message

        async def watched_send(message: Message) -> None:
            nonlocal cutter
            if message["type"] == "http.response.start":
                exchange.entry.effect = message["status"]
                for step in plan.after:
                    if not await exchange.take(step):
                        await stop()
                if plan.cut is not None and (codec := _codec(message)) is not None:
                    cutter = Cutter(plan.cut, codec)
            elif cutter is not None:
                passed = cutter.feed(message.get("body", b""))
                if cutter.over:
                    await exchange.cut(passed, cutter)
                    await stop()
                message = {**message, "body": passed}
            await exchange.send(message)

        inner = asyncio.ensure_future(_run(app, scope, exchange.receive, watched_send))
        stopped = asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait((inner, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not over.is_set():
                inner.result()
        finally:
            for task in (inner, stopped):
                task.cancel()
            await asyncio.gather(inner, stopped, return_exceptions=True)

    # --- both

    def _begin(self, exchange: Exchange, subject: Subject, method: str) -> Plan:
        now = self._clock.read()
        running = sum(1 for box in self._registry if box.is_in(State.RUNNING))
        plan = self.director.plan(subject, World(running + len(self._creating), now.monotonic))
        exchange.entry = self.journal.begin(subject, method, now.wall.timestamp(), plan.struck)
        return plan

    def _metadata_of(self, sandbox_id: str | None) -> Mapping[str, str]:
        sandbox = None if sandbox_id is None else self._registry.find(sandbox_id)
        return {} if sandbox is None else sandbox.metadata


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


async def _captured(app: ASGIApp, scope: Scope, receive: Receive) -> Response:
    """The whole answer of an application that answers shortly."""
    answer = Response()
    body = bytearray()

    async def keep(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status_code = message["status"]
            answer.raw_headers = list(message.get("headers", []))
        else:
            body.extend(message.get("body", b""))

    await app(scope, receive, keep)
    answer.body = bytes(body)
    return answer


def _codec(start: Message) -> Any:
    kinds = [value for name, value in start.get("headers", []) if name.lower() == b"content-type"]
    return {b"application/connect+json": "json", b"application/connect+proto": "proto"}.get(b"".join(kinds))


def _metadata_in(body: bytes) -> Mapping[str, str]:
    """The metadata that a create asks for; none when the body is nonsense, which is the control plane's to say."""
    try:
        metadata = json.loads(body)["metadata"]
        return {str(name): str(value) for name, value in metadata.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
