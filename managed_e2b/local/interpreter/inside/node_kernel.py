"""A kernel for JavaScript, and TypeScript where node strips types: `node_kernel.js` in a node of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from .kernel import Died
from .outputs import Event

_PROGRAM = Path(__file__).with_name("node_kernel.js")
_LONGEST_LINE = 256 * 1024 * 1024
_CHUNK = 64 * 1024


class NodeKernel:
    """`kernel.Kernel`. `typed`: its code is TypeScript."""

    def __init__(self, node: str, typed: bool, cwd: str) -> None:
        self._command = [node, "--no-warnings", str(_PROGRAM), "typescript" if typed else "javascript"]
        self._cwd = cwd
        self._process: asyncio.subprocess.Process | None = None
        self._requests: asyncio.StreamWriter | None = None
        self._events: asyncio.StreamReader | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._put: Callable[[Event], None] | None = None

    @staticmethod
    def strips_types(node: str) -> bool:
        """Whether it knows TypeScript (node 22.13 and later)."""
        asked = "process.exit(require('node:module').stripTypeScriptTypes ? 0 : 1)"
        return subprocess.run([node, "--no-warnings", "-e", asked], check=False, capture_output=True).returncode == 0

    async def start(self) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._requests = await _writer(ours_out)
        self._events = await _reader(ours_in)
        # node is to find them at 3 and 4, wherever they are here
        wiring = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        try:
            self._process = await asyncio.create_subprocess_exec(
                "/bin/bash", "-c", wiring, "node", *self._command,
                cwd=self._cwd, pass_fds=(theirs_in, theirs_out), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        for name, source in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            assert source is not None
            self._tasks.append(asyncio.create_task(self._pass_on(name, source)))
        try:
            await self._until_done(None)
        except Died as error:
            raise RuntimeError("node ended at once") from error

    async def run(self, code: str, put: Callable[[Event], None]) -> None:
        await self._ask({"code": code}, put)

    async def set_variables(self, values: Mapping[str, str | None]) -> None:
        if values:
            await self._ask({"variables": dict(values)}, None)

    async def _ask(self, request: Mapping[str, object], put: Callable[[Event], None] | None) -> None:
        if self._requests is None:
            raise Died
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            await self._requests.drain()
        except ConnectionError as error:
            raise Died from error
        await self._until_done(put)

    async def _until_done(self, put: Callable[[Event], None] | None) -> None:
        assert self._events is not None
        self._put = put
        try:
            while line := await self._events.readline():
                event: Event = json.loads(line)
                if event["type"] == "done":
                    return
                if put is not None:
                    put(_stamped(event))
        finally:
            self._put = None
        raise Died

    async def _pass_on(self, name: str, source: asyncio.StreamReader) -> None:
        """What children of its code write."""
        while data := await source.read(_CHUNK):
            if self._put is not None:
                self._put(_stamped({"type": name, "text": data.decode("utf-8", "replace")}))

    async def interrupt(self) -> None:
        if self._put is not None and self._requests is not None:
            self._requests.write(b'{"interrupt": true}\n')

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for task in self._tasks:
            task.cancel()
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            await self._process.wait()


def _stamped(event: Event) -> Event:
    if event["type"] in ("stdout", "stderr"):
        event["timestamp"] = datetime.now(UTC).isoformat()
    return event


async def _reader(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb", 0))
    return reader


async def _writer(fd: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb", 0))
    return asyncio.StreamWriter(transport, protocol, None, loop)
