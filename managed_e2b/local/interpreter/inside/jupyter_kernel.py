"""A kernel that speaks Jupyter's protocol: ipykernel for Python, bash_kernel for bash."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from .kernel import Died
from .outputs import Event, from_message

_START_SECONDS = 120
_IPC_DIRECTORY = "/run/me2b-code-interpreter"


class JupyterKernel:
    """`kernel.Kernel`. `spec` names a kernel of this environment; `language` is python or bash."""

    def __init__(self, spec: str, language: str, cwd: str) -> None:
        self._language = language
        self._cwd = cwd
        self._manager = AsyncKernelManager(kernel_name=spec, transport="ipc")
        self._client: AsyncKernelClient | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._pidfd: int | None = None
        self._dead = asyncio.Event()
        self._request: str | None = None
        self._put: Callable[[Event], None] = _nobody
        self._idle = asyncio.Event()

    async def start(self) -> None:
        os.makedirs(_IPC_DIRECTORY, 0o700, exist_ok=True)
        manager = self._manager
        manager.connection_file = f"{_IPC_DIRECTORY}/{uuid.uuid4().hex}.json"
        await manager.start_kernel(cwd=self._cwd)
        provisioner = manager.provisioner
        assert isinstance(provisioner, LocalProvisioner)
        assert provisioner.pid is not None
        self._pidfd = os.pidfd_open(provisioner.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_death)
        self._client = manager.client()
        self._client.start_channels(hb=False, stdin=False)
        await self._client.wait_for_ready(timeout=_START_SECONDS)
        self._readers = [asyncio.create_task(self._read_outputs()), asyncio.create_task(self._read_replies())]
        for reader in self._readers:
            reader.add_done_callback(self._on_silence)

    async def run(self, code: str, put: Callable[[Event], None]) -> None:
        await self._execute(code, put, silent=False)

    async def set_variables(self, values: Mapping[str, str | None]) -> None:
        if values:
            await self._execute(_ASSIGN[self._language](values), _nobody, silent=True)

    async def _execute(self, code: str, put: Callable[[Event], None], *, silent: bool) -> None:
        client = self._client
        if client is None or self._dead.is_set():
            raise Died
        self._idle.clear()
        self._put = put
        # stop_on_error would abort what comes next; here nothing is sent before the end of what went before
        self._request = client.execute(
            code, silent=silent, store_history=not silent, allow_stdin=False, stop_on_error=False
        )
        ends = [asyncio.create_task(event.wait()) for event in (self._idle, self._dead)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._request, self._put = None, _nobody
            for end in ends:
                end.cancel()
        if not self._idle.is_set():
            raise Died

    async def _read_outputs(self) -> None:
        client = self._client
        assert client is not None
        while True:
            message: dict[str, Any] = await client.get_iopub_msg()
            if message["parent_header"].get("msg_id") != self._request or self._request is None:
                continue
            if message["header"]["msg_type"] == "status":
                if message["content"]["execution_state"] == "idle":
                    self._idle.set()
            elif (event := from_message(message)) is not None:
                self._put(event)

    async def _read_replies(self) -> None:
        """Nobody needs them: what they tell came as output. But they must not pile up."""
        client = self._client
        assert client is not None
        while True:
            await client.get_shell_msg()

    def _on_silence(self, reader: asyncio.Task[None]) -> None:
        """A kernel that cannot be heard any more is as good as dead."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            logging.error("a kernel's messages cannot be read: %r", error)
        self._dead.set()

    def _on_death(self) -> None:
        self._forget_process()
        self._dead.set()

    def _forget_process(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    async def interrupt(self) -> None:
        if self._request is not None and not self._dead.is_set():
            await self._manager.interrupt_kernel()

    async def stop(self) -> None:
        self._on_death()
        for reader in self._readers:
            reader.cancel()
        if self._client is not None:
            self._client.stop_channels()
        if self._manager.has_kernel:
            await self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_ipc_files()
        self._manager.cleanup_connection_file()


def _nobody(event: Event) -> None:
    pass


def _assign_in_python(values: Mapping[str, str | None]) -> str:
    given = json.dumps({name: value for name, value in values.items() if value is not None})
    taken = json.dumps([name for name, value in values.items() if value is None])
    return f"(lambda e: (e.update({given}), [e.pop(n, None) for n in {taken}]))(__import__('os').environ)"


def _assign_in_bash(values: Mapping[str, str | None]) -> str:
    lines = (
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}" for name, value in values.items()
    )
    return "\n".join(lines)


_ASSIGN: Mapping[str, Callable[[Mapping[str, str | None]], str]] = {
    "python": _assign_in_python,
    "bash": _assign_in_bash,
}
