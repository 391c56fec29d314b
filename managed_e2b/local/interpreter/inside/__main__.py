"""The service on port 49999: contexts, and `/execute`, whose answer is one JSON object a line as they come."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import shutil
import signal
from contextlib import aclosing
from functools import partial
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.web import Application, RequestHandler

from . import outputs
from .contexts import DEFAULT_LANGUAGE, Context, Contexts, MakeKernel, Refused, check_variables
from .jupyter_kernel import JupyterKernel
from .node_kernel import NodeKernel

PORT = 49999
_MAX_BODY = 100 * 1024 * 1024
_KEEP_ALIVE_SECONDS = 640


class _Handler(RequestHandler):
    """`data` is the body, a JSON object."""

    contexts: Contexts
    data: dict[str, Any]

    def initialize(self, contexts: Contexts) -> None:
        self.contexts = contexts
        self._work: asyncio.Task[Any] | None = None

    def prepare(self) -> None:
        try:
            data = json.loads(self.request.body or b"{}")
        except ValueError as error:
            raise Refused(422, f"The body is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise Refused(422, "The body is not a JSON object")
        self.data = data
        self._work = asyncio.current_task()

    def on_connection_close(self) -> None:
        if self._work is not None:
            self._work.cancel()  # nobody waits any more

    def text(self, name: str) -> str | None:
        value = self.data.get(name)
        if value is not None and not isinstance(value, str):
            raise Refused(422, f"{name} is not a string")
        return value

    def write_error(self, status_code: int, **about: Any) -> None:
        error = about.get("exc_info", (None, None))[1]
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        if isinstance(error, Refused):
            self.set_status(error.status)
            self.finish(error.message)
        else:
            self.finish(self._reason)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, Refused | asyncio.CancelledError):
            super().log_exception(typ, value, tb)


class _Health(_Handler):
    def get(self) -> None:
        self.finish('"OK"')


class _Execute(_Handler):
    async def post(self) -> None:
        code, variables = self.text("code"), self.data.get("env_vars") or {}
        if code is None:
            raise Refused(422, "code is missing")
        if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
            raise Refused(422, "env_vars is not an object of strings")
        check_variables(variables)
        context = self._context()
        await context.ready()
        self.set_header("Content-Type", "application/x-ndjson")
        with contextlib.suppress(StreamClosedError):
            async with aclosing(context.execute(code, variables)) as events:
                async for event in events:
                    await self._tell(event)
            await self._tell(outputs.END)

    def _context(self) -> Context:
        language, context_id = self.text("language"), self.text("context_id")
        if language and context_id:
            raise Refused(400, "Only one of context_id or language can be provided")
        return self.contexts.get(context_id) if context_id else self.contexts.default(language)

    async def _tell(self, event: outputs.Event) -> None:
        self.write(json.dumps(event) + "\n")
        await self.flush()


class _Contexts(_Handler):
    def get(self) -> None:
        self._answer([_shown(context) for context in self.contexts])

    async def post(self) -> None:
        self._answer(_shown(await self.contexts.create(self.text("language"), self.text("cwd"))))

    def _answer(self, value: Any) -> None:
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))


class _Context(_Handler):
    async def delete(self, context_id: str) -> None:
        await self.contexts.remove(context_id)
        self.finish("null")


class _Restart(_Handler):
    async def post(self, context_id: str) -> None:
        await self.contexts.get(context_id).restart()
        self.finish("null")


def _shown(context: Context) -> dict[str, str]:
    return {"id": context.id, "language": context.language, "cwd": context.cwd}


def kernels() -> dict[str, MakeKernel]:
    """What this sandbox can run."""
    found: dict[str, MakeKernel] = {"python": partial(JupyterKernel, "me2b-python", "python")}
    if importlib.util.find_spec("bash_kernel") is not None:
        found["bash"] = partial(JupyterKernel, "me2b-bash", "bash")
    if (node := shutil.which("node")) is not None:
        found["javascript"] = partial(NodeKernel, node, False)
        if NodeKernel.strips_types(node):
            found["typescript"] = partial(NodeKernel, node, True)
    return found


async def serve(contexts: Contexts) -> None:
    """Until SIGTERM."""
    given = {"contexts": contexts}
    application = Application(
        [
            ("/health", _Health, given),
            ("/execute", _Execute, given),
            ("/contexts", _Contexts, given),
            ("/contexts/([^/]+)", _Context, given),
            ("/contexts/([^/]+)/restart", _Restart, given),
        ]
    )
    server = HTTPServer(application, max_body_size=_MAX_BODY, idle_connection_timeout=_KEEP_ALIVE_SECONDS)
    server.listen(PORT)
    first = asyncio.create_task(contexts.default(DEFAULT_LANGUAGE).ready())
    first.add_done_callback(_complain)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    server.stop()
    await contexts.close()


def _complain(started: asyncio.Task[None]) -> None:
    if not started.cancelled() and (error := started.exception()) is not None:
        logging.error("the default kernel did not start: %s", error)  # the next execution tries again, and tells


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("tornado.access").setLevel(logging.CRITICAL)
    there = kernels()
    contexts = Contexts(there)
    contexts.default(DEFAULT_LANGUAGE)
    if "javascript" in there:
        contexts.default("javascript")
    asyncio.run(serve(contexts))


if __name__ == "__main__":
    main()
