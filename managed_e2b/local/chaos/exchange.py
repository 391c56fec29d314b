"""One request and its answer, on which faults are carried out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import MutableSet
from http import HTTPStatus
from types import TracebackType

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from managed_e2b.local.chaos.director import Step
from managed_e2b.local.chaos.journal import Entry
from managed_e2b.local.chaos.rules import Delay, Drop, Hang, Status
from managed_e2b.local.chaos.streams import Cutter
from managed_e2b.local.chaos.wire import current_connection


class Exchange:
    """`receive` and `send` are for whoever serves the request; `entry` is what the journal says of it.

    Use it as a context for the time it is served. `hanging`: where requests that hang wait for being released.
    `delayed`: where those that are late wait, for their time or for being dropped.
    """

    entry: Entry

    def __init__(
        self,
        receive: Receive,
        send: Send,
        hanging: MutableSet[asyncio.Future[bool]],
        delayed: MutableSet[asyncio.Future[None]],
    ) -> None:
        self._receive = receive
        self._send = send
        self._hanging = hanging
        self._delayed = delayed
        self._ahead: deque[Message] = deque()
        self._read = False
        self._connection = current_connection()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.entry.state in ("open", "hanging"):
            self.entry.state = "dropped"

    async def receive(self) -> Message:
        """The request as it comes, what was read ahead first."""
        message = self._ahead.popleft() if self._ahead else await self._receive()
        self._read = self._read or message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Tell the client."""
        if message["type"] == "http.response.start":
            self.entry.status = message["status"]
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.entry.state = "answered"

    async def peek(self, limit: int) -> bytes:
        """The request's body, at most what comes before it is longer than `limit`; `receive` gives it all again."""
        body = bytearray()
        while len(body) <= limit:
            message = await self._receive()
            self._ahead.append(message)
            body += message.get("body", b"")
            if message["type"] != "http.request" or not message.get("more_body", False):
                break
        return bytes(body)

    async def answer(self, response: Response, scope: Scope) -> None:
        await response(scope, self.receive, self.send)

    async def take(self, step: Step) -> bool:
        """Carry out a fault; False when it had the last word."""
        match step:
            case Delay():
                return await self._delay(step.seconds)
            case Hang():
                return await self._hang()
            case Status():
                await self._drain()
                await self.answer(_refusal(step), {"type": "http"})
                return False
            case Drop():
                await self._end(step.how)
                return False

    async def cut(self, passed: bytes, cutter: Cutter) -> None:
        """End the answer where the cutter says, after what it let pass."""
        match cutter.how:
            case "reset" | "close" as how:
                await self.send({"type": "http.response.body", "body": passed, "more_body": True})
                await self._end(how)
            case _:
                await self.send({"type": "http.response.body", "body": passed + cutter.last_words()})

    async def _end(self, how: str) -> None:
        self.entry.state = "dropped"
        await (self._connection.reset() if how == "reset" else self._connection.close())

    async def _delay(self, seconds: float) -> bool:
        """Wait so long, whether or not the client does. False when a test dropped it meanwhile."""
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._delayed.add(gate)
        try:
            await asyncio.wait((gate,), timeout=seconds)
        finally:
            self._delayed.discard(gate)
        if not gate.done():
            return True
        await self._end("reset")
        return False

    async def _hang(self) -> bool:
        """Wait until a test lets it go on (True), or the client has left."""
        gate: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        left = asyncio.ensure_future(self._connection.lost.wait())
        self._hanging.add(gate)
        self.entry.state = "hanging"
        try:
            await asyncio.wait((gate, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hanging.discard(gate)
            left.cancel()
        if gate.done() and gate.result():
            self.entry.state = "open"
            return True
        await self._end("reset")
        return False

    async def _drain(self) -> None:
        """Read the request to its end: a client that is still sending must not see its connection reset."""
        while not self._read:
            await self.receive()


def _refusal(step: Status) -> Response:
    if step.body is not None:
        return JSONResponse(step.body, step.status, headers=step.headers)
    if step.status < 400:
        return Response(status_code=step.status, headers=step.headers)
    message = step.message or HTTPStatus(step.status).phrase
    return JSONResponse({"code": step.status, "message": message}, step.status, headers=step.headers)
