"""One stream of a command's output, from its opening to its end, on either face.

The SDK's own handle is driven to its end under three rules that it does not keep by itself: the opening has a
deadline, on the sync face too; a stream on which nothing comes, not even a keepalive, is broken; and on the sync face
Ctrl-C is heard at once, not at the next output.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import e2b

from ..errors import BackendError
from .base import run
from .heard import heard
from .unsent import sent

SILENCE = 120.0
"""Seconds without a message after which a stream is taken for dead. Keepalives come every 50, at most every 90."""

_ROOM = 256
"""Messages that may wait for a slow callback before the stream has to wait, too."""


class Silent(Exception):
    """Nothing came in time: the stream was not opened by its deadline, or has been silent for too long."""


class Listener:
    """Who is told what comes: the pid when the stream is open, then output, as bytes.

    `opened` tells whether the first has come, `failure` what a callback has raised: that is nothing of the stream's.
    """

    def __init__(
        self,
        on_start: Callable[[int], object],
        on_stdout: Callable[[bytes], object],
        on_stderr: Callable[[bytes], object],
    ) -> None:
        self.opened = False
        self.failure: BaseException | None = None
        self._on_start = on_start
        self._on_stdout = on_stdout
        self._on_stderr = on_stderr

    def start(self, pid: int) -> None:
        self.opened = True
        self._on_start(pid)

    # The SDK's handle gives text, one character a byte: see `_Latin1`. They return None: it would await anything else.

    def stdout(self, chunk: str) -> None:
        self._tell(self._on_stdout, chunk)

    def stderr(self, chunk: str) -> None:
        self._tell(self._on_stderr, chunk)

    def _tell(self, callback: Callable[[bytes], object], chunk: str) -> None:
        try:
            callback(chunk.encode("latin-1"))
        except BaseException as error:
            self.failure = error
            raise


# -- the async face -----------------------------------------------------------------------------------------


async def follow(open_: Callable[..., Awaitable[Any]], listener: Listener, opening: float | None) -> int:
    """Follow a command to its end on the event loop; its exit code. Raises what the SDK raises, and Silent.

    `opening`: seconds within which the stream must be open, None for no limit.
    """
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(opening)

    def beat() -> None:
        if not limit.expired():
            limit.reschedule(loop.time() + SILENCE)

    handle: Any = None
    try:
        async with limit:
            with heard() as check:
                handle = await sent(open_, on_stdout=listener.stdout, on_stderr=listener.stderr)
                _keep_bytes(handle, "_wait")
                handle._events = _watched(handle._events, beat)
                check()
                listener.start(handle.pid)
                beat()
                await handle.wait()
    except e2b.CommandExitException as ended:
        return int(ended.exit_code)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise Silent(_silence(listener, opening)) from error
    finally:
        if handle is not None:
            handle._wait.cancel()  # the task that reads; most often it has ended
    return 0


async def _watched(events: Any, beat: Callable[[], object]) -> AsyncIterator[Any]:
    """In the task of the SDK's handle: the one that is cancelled by whoever cancels the wait for it."""
    try:
        with heard() as check:
            async for event in events:
                check()
                beat()
                yield event
    finally:
        await events.aclose()


# -- the sync face ------------------------------------------------------------------------------------------


def follow_in_thread(open_: Callable[[], Any], listener: Listener, opening: float | None) -> int:
    """As `follow`, for the sync face: the SDK blocks a thread of its own; all callbacks come on the caller's thread."""
    channel = _Channel()
    # Daemonic: a server that went silent may hold it for as long as it likes, but not the interpreter.
    threading.Thread(target=_read, args=(open_, channel), name="me2b-stream", daemon=True).start()
    tell: dict[str, Callable[[Any], object]] = {
        "start": listener.start,
        "stdout": listener.stdout,
        "stderr": listener.stderr,
        "keepalive": lambda _: None,
    }
    try:
        while True:
            what, value = channel.get(SILENCE if listener.opened else opening)
            if what == "exit":
                return int(value)
            if what == "error":
                raise value
            tell[what](value)
    except queue.Empty:
        raise Silent(_silence(listener, opening)) from None
    finally:
        channel.leave()


class _Left(Exception):
    """The caller does not listen any more."""


class _Channel:
    """From the thread that reads to the one that listens."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(_ROOM)
        self._left = False

    def put(self, what: str, value: Any = None) -> None:
        if self._left:
            raise _Left
        self._queue.put((what, value))

    def get(self, timeout: float | None) -> tuple[str, Any]:
        return self._queue.get(timeout=timeout)

    def leave(self) -> None:
        """Let go of the reader: what waits for room goes on, and fails at its next message."""
        self._left = True
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return


def _read(open_: Callable[[], Any], channel: _Channel) -> None:
    """The thread: reads one stream to its end, or until nobody listens any more."""
    handle: Any = None
    try:
        handle = run(sent(open_))
        _keep_bytes(handle)
        handle._events = _kept_alive(handle._events, channel)
        channel.put("start", handle.pid)
        handle.wait(
            on_stdout=lambda chunk: channel.put("stdout", chunk),
            on_stderr=lambda chunk: channel.put("stderr", chunk),
        )
        outcome: tuple[str, Any] = ("exit", 0)
    except e2b.CommandExitException as ended:
        outcome = ("exit", ended.exit_code)
    except BaseException as error:  # noqa: BLE001 - the one who listens raises it
        outcome = ("error", error)
    try:
        channel.put(*outcome)
    except _Left:
        return
    finally:
        if handle is not None:
            handle.disconnect()


def _kept_alive(events: Any, channel: _Channel) -> Iterator[Any]:
    try:
        for event in events:
            channel.put("keepalive")
            yield event
    finally:
        events.close()


# -- both ---------------------------------------------------------------------------------------------------


def _silence(listener: Listener, opening: float | None) -> str:
    if listener.opened:
        return f"nothing came for {SILENCE:g} s, not even a keepalive"
    return f"no answer within {opening:g} s"


class _Latin1:
    """A decoder that keeps every byte: one character a byte."""

    def decode(self, data: bytes, final: bool = False) -> str:
        return data.decode("latin-1")


def _keep_bytes(handle: Any, *more: str) -> None:
    """Have the SDK's command handle pass bytes through: it would replace what is not UTF-8 for good.

    Nothing has been decoded yet: the sync handle is lazy, and the async one's task has not had its first turn.
    """
    for name in ("_stdout_decoder", "_stderr_decoder", "_events", *more):
        if not hasattr(handle, name):
            raise BackendError(f"this version of e2b has no {name} on its command handle: upgrade managed-e2b")
    handle._stdout_decoder = _Latin1()
    handle._stderr_decoder = _Latin1()
