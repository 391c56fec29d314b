"""The SDK in a forked child whose parent had used it.

The SDK's HTTP client (pyqwest) runs on threads of its own, one set a process, which a fork leaves behind: in the child
every request would hang for ever, past every timeout. Such a child gets transports over httpx in their place: the same
interface, HTTP/1.1, connections of its own. A child of a parent that had not used the SDK keeps the SDK's own.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import certifi
import e2b.api.client_async as async_side
import e2b.api.client_sync as sync_side
import httpx
import pyqwest

CONNECT_SECONDS = 30.0

_KEEPALIVE = 20

_sync_timeout: Callable[[], timedelta | None] | None = getattr(pyqwest._pyqwest, "get_sync_timeout", None)

_SIDES = ((sync_side, "SyncHTTPTransport"), (async_side, "HTTPTransport"))
_CACHES = ("_transports", "_pools", "_httpx_transports")

hopeless = False
"""True in a forked child in which the SDK would hang: this SDK is not built as we know it."""


def _after_fork() -> None:
    """In every forked child, before anything else runs in it."""
    global hopeless
    if not any(getattr(side, cache, None) for side, _ in _SIDES for cache in _CACHES):
        return
    if not all(_is_as_we_know_it(side, name) for side, name in _SIDES):
        hopeless = True
        return
    for side, name in _SIDES:
        for cache in _CACHES:
            # Never freed: a transport that ends takes its connections out of the epoll that the parent still uses.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(side, cache, None)))
            setattr(side, cache, {})
        setattr(side, "_transport_lock", threading.Lock())  # noqa: B010 - it may have been held at the fork
        setattr(side, name, _SyncTransport if side is sync_side else _AsyncTransport)


def _is_as_we_know_it(side: Any, name: str) -> bool:
    return all(hasattr(side, attribute) for attribute in (name, "_transports", "_httpx_transports", "_transport_lock"))


class _SyncTransport:
    """`pyqwest.SyncTransport`, with the constructor of its `SyncHTTPTransport` as far as the SDK uses it."""

    def __init__(self, *, read_timeout: float | None = None, proxy: Any = None, **_tuning: Any) -> None:
        _refuse(proxy)
        self._read_timeout = read_timeout
        self._client = httpx.Client(verify=_tls(), limits=_limits(), timeout=None)

    def execute_sync(self, request: pyqwest.SyncRequest) -> pyqwest.SyncResponse:
        """As pyqwest's. A timeout that was set for the call bounds the wait for the head, then each read."""
        named = _sync_timeout() if _sync_timeout is not None else None
        deadline = None if named is None else time.monotonic() + named.total_seconds()
        seconds = self._read_timeout if named is None else named.total_seconds()
        with _as_pyqwest():
            answer = self._client.send(
                self._client.build_request(
                    request.method,
                    request.url,
                    headers=_headers(request),
                    content=request.content,
                    timeout=httpx.Timeout(seconds, connect=min(seconds or CONNECT_SECONDS, CONNECT_SECONDS)),
                ),
                stream=True,
            )
        return pyqwest.SyncResponse(
            status=answer.status_code,
            headers=pyqwest.Headers(answer.headers.multi_items()),
            content=_Content(answer, deadline),
        )


class _Content:
    """The body of an answer as it comes. Closed by pyqwest when the reader has done with it."""

    def __init__(self, answer: httpx.Response, deadline: float | None) -> None:
        self._answer = answer
        self._chunks = answer.iter_raw()
        self._deadline = deadline

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.close()
            raise TimeoutError("the answer did not end in time")
        with _as_pyqwest():
            return next(self._chunks)

    def close(self) -> None:
        self._answer.close()


class _AsyncTransport:
    """`pyqwest.Transport`, likewise. Its callers bound the time themselves."""

    def __init__(self, *, read_timeout: float | None = None, proxy: Any = None, **_tuning: Any) -> None:
        _refuse(proxy)
        self._timeout = httpx.Timeout(read_timeout, connect=CONNECT_SECONDS)
        # httpx's connections belong to the loop that opened them.
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    async def execute(self, request: pyqwest.Request) -> pyqwest.Response:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = httpx.AsyncClient(verify=_tls(), limits=_limits(), timeout=self._timeout)
        with _as_pyqwest():
            answer = await client.send(
                client.build_request(request.method, request.url, headers=_headers(request), content=request.content),
                stream=True,
            )
        return pyqwest.Response(
            status=answer.status_code,
            headers=pyqwest.Headers(answer.headers.multi_items()),
            content=_AsyncContent(answer),
        )


class _AsyncContent:
    """See _Content."""

    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer
        self._chunks = answer.aiter_raw()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        with _as_pyqwest():
            return await anext(self._chunks)

    async def aclose(self) -> None:
        await self._answer.aclose()


@contextmanager
def _as_pyqwest() -> Iterator[None]:
    """httpx's errors as those that the SDK knows. A connection that failed was never written to, as with pyqwest."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise getattr(pyqwest, "ConnectTimeout", ConnectionError)(str(error)) from error
    except (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
        raise ConnectionError(str(error)) from error
    except httpx.TimeoutException as error:
        raise TimeoutError(str(error)) from error
    except httpx.WriteError as error:
        raise pyqwest.WriteError(str(error)) from error
    except httpx.RemoteProtocolError as error:
        raise getattr(pyqwest, "RemoteProtocolError", pyqwest.ReadError)(str(error)) from error
    except httpx.TransportError as error:
        raise pyqwest.ReadError(str(error)) from error


def _headers(request: pyqwest.SyncRequest | pyqwest.Request) -> list[tuple[str, str]]:
    # Bodies pass through as they are: nothing here decodes what nobody asked to be encoded.
    kept = [(name, value) for name, value in request.headers.items() if name.lower() != "accept-encoding"]
    return [*kept, ("accept-encoding", "identity")]


def _limits() -> httpx.Limits:
    # One connection a request that is open: every command in a sandbox is one.
    return httpx.Limits(max_connections=None, max_keepalive_connections=_KEEPALIVE)


@functools.cache
def _tls() -> ssl.SSLContext:
    """The system's certificates and certifi's, as the SDK trusts them."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def _refuse(proxy: Any) -> None:
    if proxy is not None:
        raise ValueError(
            "in a forked child the SDK takes its proxy from the environment (HTTPS_PROXY), not as `proxy=`"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
