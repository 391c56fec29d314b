"""envd of one sandbox: what answers on its port 49983."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

from e2b.envd.filesystem.filesystem_connect import FilesystemASGIApplication
from e2b.envd.process.process_connect import ProcessASGIApplication
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from managed_e2b.local.envd.auth import UNAUTHORIZED, token_accepted
from managed_e2b.local.envd.codecs import CODECS
from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.envd.files import files_endpoint
from managed_e2b.local.envd.filesystem import FilesystemService
from managed_e2b.local.envd.process import ProcessService
from managed_e2b.local.envd.streams import Calls
from managed_e2b.local.runtime.base import GuestGone

# One message of an RPC in bytes, its JSON as it comes. Input for a process is base64 in there, so this is 48 MB of it.
MESSAGE_LIMIT = 64 * 1024 * 1024
MIB = 1024 * 1024


class Envd:
    """An ASGI application. Construct it in the event loop that serves it, while the sandbox lives.

    When the sandbox dies, by whatever cause, all open streams end with `unavailable` and everything is let go of;
    whoever is in front answers new requests then.
    """

    def __init__(self, ctx: EnvdContext) -> None:
        self._ctx = ctx
        self._calls = Calls()
        self.processes = ProcessService(ctx)
        self.filesystem = FilesystemService(ctx)
        self._process_app = ProcessASGIApplication(self.processes, read_max_bytes=MESSAGE_LIMIT, codecs=CODECS)
        self._filesystem_app = FilesystemASGIApplication(self.filesystem, codecs=CODECS)
        self._plain: dict[str, Callable[[], Awaitable[Response]]] = {"/metrics": self._metrics, "/envs": self._envs}
        self._watcher = asyncio.create_task(self._watch_sandbox())

    @property
    def open_calls(self) -> int:
        """RPCs in progress, streams included."""
        return len(self._calls)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"envd does not speak {scope['type']}")
        path = scope["path"]
        if path == "/health":
            response = _only_get(scope) or Response(status_code=HTTPStatus.NO_CONTENT)
        elif path == "/files":  # takes a signature in place of the token, and so does its own authentication
            await self._calls.serve(partial(files_endpoint, self._ctx), scope, receive, send)
            return
        elif not token_accepted(self._ctx.access_token, scope["headers"]):
            response = error_response(HTTPStatus.UNAUTHORIZED, UNAUTHORIZED)
        elif path.startswith("/process.Process/"):
            await self._calls.serve(self._process_app, scope, receive, send)
            return
        elif path.startswith("/filesystem.Filesystem/"):
            await self._calls.serve(self._filesystem_app, scope, receive, send)
            return
        elif path in self._plain:
            response = _only_get(scope) or await self._plain[path]()
        else:
            response = error_response(HTTPStatus.NOT_FOUND, f"no such endpoint: {path}")
        await response(scope, receive, send)

    async def abort(self, message: str) -> None:
        """End every open stream with `unavailable` and this message, as when the sandbox is killed, paused or expires.

        Call it before the sandbox goes, so that no stream sees its process die first. The processes are not touched,
        and envd goes on answering: a sandbox that is resumed keeps its envd.
        """
        self._calls.abort(message)

    async def _watch_sandbox(self) -> None:
        await self._ctx.guest.dead.wait()
        await self.abort(f"the connection to sandbox {self._ctx.sandbox_id} ended before the stream completed")
        self.processes.close()
        self.filesystem.close()

    async def _metrics(self) -> Response:
        try:
            usage = await self._ctx.guest.usage()
        except GuestGone:
            return error_response(HTTPStatus.BAD_GATEWAY, "The sandbox was not found")
        return JSONResponse(
            {
                "ts": int(time.time()),
                "cpu_count": usage.cpu_count,
                "cpu_used_pct": usage.cpu_used_pct,
                "mem_total": usage.mem_total,
                "mem_used": usage.mem_used,
                "mem_cache": usage.mem_cache,
                "mem_total_mib": usage.mem_total // MIB,
                "mem_used_mib": usage.mem_used // MIB,
                "disk_used": usage.disk_used,
                "disk_total": usage.disk_total,
            }
        )

    async def _envs(self) -> Response:
        return JSONResponse(self._ctx.env_vars)


def error_response(status: HTTPStatus, message: str) -> Response:
    """An error as envd words it outside of RPCs: the status again as `code`, and what happened."""
    return JSONResponse({"code": status.value, "message": message}, status_code=status)


def _only_get(scope: Scope) -> Response | None:
    if scope["method"] in ("GET", "HEAD"):
        return None
    return error_response(HTTPStatus.METHOD_NOT_ALLOWED, f"{scope['path']} answers GET only")
