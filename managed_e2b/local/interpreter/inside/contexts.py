"""The contexts of one sandbox: each a kernel with a working directory, and what runs in it, one after the other."""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping

from . import outputs
from .kernel import Died, Kernel
from .outputs import Event

HOME = "/home/user"
DEFAULT_LANGUAGE = "python"
_SHORT = {"js": "javascript", "ts": "typescript"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_UNSENT = 256 * 1024 * 1024
_INTERRUPT_SECONDS = 5.0

MakeKernel = Callable[[str], Kernel]
"""Takes the working directory."""


class Refused(Exception):
    """A request that cannot be done. `status` as in HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Context:
    """A kernel is started when it is first needed, and again after it died or was stopped."""

    def __init__(self, language: str, cwd: str, make: MakeKernel) -> None:
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self._make = make
        self._kernel: Kernel | None = None
        self._turn = asyncio.Lock()
        self._removed = False

    async def ready(self) -> None:
        """Start the kernel. Raises Refused."""
        async with self._turn:
            await self._started()

    async def _started(self) -> Kernel:
        if self._removed:
            raise not_found(self.id)
        if self._kernel is not None:
            return self._kernel
        kernel = self._make(self.cwd)
        try:
            await kernel.start()
            if self._removed:
                raise not_found(self.id)
        except (OSError, RuntimeError) as error:
            await kernel.stop()
            raise Refused(500, f"Failed to start a {self.language} kernel: {error}") from error
        except BaseException:
            await kernel.stop()
            raise
        self._kernel = kernel
        return kernel

    async def execute(self, code: str, variables: Mapping[str, str]) -> AsyncGenerator[Event, None]:
        """Run code when it is its turn: the events as they come. Closing the iterator interrupts what runs.

        Raises Refused before the first event.
        """
        check_variables(variables)
        async with self._turn:
            kernel = await self._started()
            running = _Running(kernel)
            work = asyncio.create_task(running.run(code, variables))
            try:
                async for event in running.events():
                    yield event
            finally:
                if not work.done():
                    await _let_end(work, kernel)
                if running.died and self._kernel is kernel:
                    self._kernel = None
                    await kernel.stop()

    async def restart(self) -> None:
        """A new kernel, which knows nothing of what ran in the old one. Raises Refused."""
        await self.stop()
        await self.ready()

    async def remove(self) -> None:
        """End the kernel for good."""
        self._removed = True
        await self.stop()

    async def stop(self) -> None:
        """End the kernel and with it what runs; the next execution starts another."""
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            await kernel.stop()


class _Running:
    """One execution, and what its client has not been sent yet."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._unsent = 0
        self._too_much = False
        self.died = False

    async def run(self, code: str, variables: Mapping[str, str]) -> None:
        try:
            await self._kernel.set_variables(variables)
            await self._kernel.run(code, self._put)
            await self._kernel.set_variables({name: os.environ.get(name) for name in variables})
        except Died:
            self.died = True
            self._events.put_nowait(outputs.error("ContextRestarting", "Context was restarted"))
        finally:
            self._events.put_nowait(None)

    def _put(self, event: Event) -> None:
        if self._too_much:
            return
        self._unsent += _size(event)
        if self._unsent > _MOST_UNSENT:
            self._too_much = True
            event = outputs.error("OutputTooLarge", f"the client was {_MOST_UNSENT >> 20} MB of output behind")
            self._interrupting = asyncio.create_task(self._kernel.interrupt())
        self._events.put_nowait(event)

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._events.get()) is not None:
            self._unsent -= _size(event)
            yield event


async def _let_end(work: asyncio.Task[None], kernel: Kernel) -> None:
    """Interrupt code that nobody waits for any more. What does not heed that is ended with its kernel."""
    await kernel.interrupt()
    await asyncio.wait([work], timeout=_INTERRUPT_SECONDS)
    if not work.done():
        await kernel.stop()
        await asyncio.wait([work])


class Contexts:
    """`kernels`: how each language that there is gets a kernel."""

    def __init__(self, kernels: Mapping[str, MakeKernel]) -> None:
        self._kernels = kernels
        self._contexts: dict[str, Context] = {}
        self._defaults: dict[str, Context] = {}

    def __iter__(self) -> Iterator[Context]:
        return iter(list(self._contexts.values()))

    def default(self, language: str | None) -> Context:
        """The context of code that names none. Raises Refused for a language that there is not."""
        language = normalize(language)
        context = self._defaults.get(language)
        if context is None:
            context = self._defaults[language] = self._add(language, HOME if os.path.isdir(HOME) else "/")
        return context

    def get(self, context_id: str) -> Context:
        """Raises Refused."""
        context = self._contexts.get(context_id)
        if context is None:
            raise not_found(context_id)
        return context

    async def create(self, language: str | None, cwd: str | None) -> Context:
        """A new context, its kernel running. Raises Refused."""
        cwd = cwd or HOME
        if "\0" in cwd or not await asyncio.to_thread(os.path.isdir, cwd):
            raise Refused(400, f"Failed to create context: there is no directory {cwd!r}")
        context = self._add(normalize(language), cwd)
        try:
            await context.ready()
        except BaseException:
            self._contexts.pop(context.id, None)
            await context.remove()
            raise
        return context

    async def remove(self, context_id: str) -> None:
        """Raises Refused."""
        context = self.get(context_id)
        del self._contexts[context_id]
        self._defaults = {language: other for language, other in self._defaults.items() if other is not context}
        await context.remove()

    async def close(self) -> None:
        """End all kernels."""
        for context in self:
            await context.remove()

    def _add(self, language: str, cwd: str) -> Context:
        make = self._kernels.get(language)
        if make is None:
            there = ", ".join(sorted(self._kernels))
            raise Refused(400, f"There is no kernel for {language!r} in this sandbox; there are: {there}")
        context = Context(language, cwd, make)
        self._contexts[context.id] = context
        return context


def not_found(context_id: str) -> Refused:
    return Refused(404, f"Context {context_id} not found")


def normalize(language: str | None) -> str:
    name = (language or DEFAULT_LANGUAGE).strip().lower()
    return _SHORT.get(name, name)


def check_variables(variables: Mapping[str, str]) -> None:
    """Raises Refused for what is no environment variable in every language."""
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise Refused(400, f"Invalid environment variable {name!r}")


def _size(event: Event) -> int:
    return sum(len(value) for value in event.values() if isinstance(value, str))
