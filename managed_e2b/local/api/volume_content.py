"""The content API of volumes: their files over HTTP, for who has a volume's token.

Its errors are unlike those of the control plane: `{"code": "<a word>", "message": …}`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from managed_e2b.local.api import schemas
from managed_e2b.local.clock import rfc3339
from managed_e2b.local.envd.entries import printable
from managed_e2b.local.envd.transfer import (
    CHUNK,
    ClientGone,
    FileWriter,
    HeldFd,
    RequestBody,
    UploadStalled,
    read_chunks,
)
from managed_e2b.local.errors import ApiError
from managed_e2b.local.runtime.base import GuestError, GuestGone, Reply, RuntimeUnavailable
from managed_e2b.local.volumes.catalog import Volume, VolumeCatalog

PREFIX = "/volumecontent/"

DEEPEST = 10
"""Levels of one listing, upstream's."""
DEFAULT_OWNER = 9090
"""Upstream's: the uid and gid of what is made without saying whose."""
DIRECTORY_MODE = 0o777
FILE_MODE = 0o666

_UINT32 = 2**32
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = datetime.max.replace(tzinfo=UTC)
_EARLIEST = datetime.min.replace(tzinfo=UTC)
_STATUS = {
    errno.ENOENT: (404, "PATH_NOT_FOUND"),
    errno.EEXIST: (409, "PATH_ALREADY_EXISTS"),
    errno.ENOTEMPTY: (409, "PATH_BUSY"),
    errno.EBUSY: (400, "CANNOT_DELETE_ROOT"),
    errno.EACCES: (403, "FORBIDDEN"),
    errno.EPERM: (403, "FORBIDDEN"),
    errno.ENOSPC: (507, "NO_SPACE"),
    errno.EDQUOT: (507, "NO_SPACE"),
    errno.EFBIG: (507, "NO_SPACE"),
}
_CALLERS = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO)


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message

    def response(self) -> Response:
        return JSONResponse({"code": self.code, "message": printable(self.message)}, self.status)


class Update(schemas.Body):
    """Of an entry: what is left out stays as it is."""

    uid: Annotated[int, Field(ge=0, lt=_UINT32 - 1)] | None = None
    gid: Annotated[int, Field(ge=0, lt=_UINT32 - 1)] | None = None
    mode: Annotated[int, Field(ge=0, le=0o777)] | None = None


class VolumeContentApi:
    def __init__(self, volumes: VolumeCatalog) -> None:
        self._volumes = volumes

    def routes(self) -> list[Route]:
        endpoints = (
            ("path", "GET", self.stat),
            ("path", "PATCH", self.update),
            ("path", "DELETE", self.remove),
            ("dir", "GET", self.list),
            ("dir", "POST", self.make_dir),
            ("file", "GET", self.download),
            ("file", "PUT", self.upload),
        )
        return [
            Route(f"{PREFIX}{{id}}/{name}", self._answering(endpoint), methods=[method])
            for name, method, endpoint in endpoints
        ]

    def _answering(
        self, endpoint: Callable[[Request, Volume, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = request.state.body = RequestBody(request.receive)
            try:
                return await endpoint(request, self._volume(request), _path(request))
            except Refused as refused:
                if request.method == "PUT" and "expect" not in request.headers:
                    with contextlib.suppress(ClientGone):
                        await body.discard()  # who is still sending could not read the answer
                return refused.response()
            except ApiError as error:
                return Refused(error.status, "INVALID_REQUEST", error.message).response()
            except (GuestGone, RuntimeUnavailable):
                return Refused(503, "UNAVAILABLE", "the server cannot reach its volumes now").response()

        return answer

    def _volume(self, request: Request) -> Volume:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        volume = self._volumes.owner_of(request.path_params["id"], given)
        if volume is None:
            raise Refused(
                401, "UNAUTHORIZED", "the token is of no such volume: ask for it with GET /volumes/{volumeID}"
            )
        return volume

    async def _call(self, volume: Volume, op: str, path: str, **args: Any) -> Reply:
        try:
            return await self._volumes.files.call(volume.volume_id, op, path=path, **args)
        except GuestError as error:
            raise _refusal(error.errno, path, error.message) from error

    # --- entries

    async def stat(self, request: Request, volume: Volume, path: str) -> Response:
        return JSONResponse(view((await self._call(volume, "stat", path)).value))

    async def update(self, request: Request, volume: Volume, path: str) -> Response:
        body = await schemas.read_body(request, Update)
        reply = await self._call(volume, "update", path, uid=body.uid, gid=body.gid, mode=body.mode)
        return JSONResponse(view(reply.value))

    async def remove(self, request: Request, volume: Volume, path: str) -> Response:
        await self._call(volume, "remove", path)
        return Response(status_code=204)

    async def list(self, request: Request, volume: Volume, path: str) -> Response:
        depth = max(1, _number(request, "depth") or 1)
        if depth > DEEPEST:
            raise Refused(400, "DEPTH_OUT_OF_RANGE", f"depth must be between 1 and {DEEPEST}")
        (fd,) = (await self._call(volume, "list", path, depth=depth)).fds
        return _Streamed(fd, _listing, media_type="application/json")

    async def make_dir(self, request: Request, volume: Volume, path: str) -> Response:
        reply = await self._call(volume, "make_dir", path, **self._new(request, DIRECTORY_MODE))
        return JSONResponse(view(reply.value), 201)

    # --- content

    async def download(self, request: Request, volume: Volume, path: str) -> Response:
        reply = await self._call(volume, "open_read", path)
        size = reply.value["size"]
        headers = {"Content-Length": str(size)}
        return _Streamed(
            reply.fds[0],
            lambda held: read_chunks(held, 0, size),
            media_type="application/octet-stream",
            headers=headers,
        )

    async def upload(self, request: Request, volume: Volume, path: str) -> Response:
        try:
            return JSONResponse(await self._store(request, volume, path, request.state.body), 201)
        except (ClientGone, UploadStalled):
            raise Refused(400, "INVALID_REQUEST", "the upload broke off") from None

    async def _store(self, request: Request, volume: Volume, path: str, body: RequestBody) -> dict[str, Any]:
        reply = await self._call(volume, "open_write", path, **self._new(request, FILE_MODE))
        (fd,) = reply.fds
        after = os.dup(fd)
        writer = FileWriter(fd)
        try:
            async for data in body:
                await writer.write(data)
            await writer.flush()
            status = os.fstat(after)
        except OSError as error:
            raise _refusal(error.errno or 0, path, error.strerror or "") from error
        finally:
            writer.close()
            os.close(after)
        times = {f"{name}_ns": getattr(status, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
        return view({**reply.value, "size": status.st_size, **times})

    def _new(self, request: Request, mode: int) -> dict[str, Any]:
        """Whose a new entry shall be, and its mode."""
        uid, gid, asked = (_number(request, name) for name in ("uid", "gid", "mode"))
        if asked is not None and asked > 0o777:
            raise Refused(400, "INVALID_REQUEST", "mode has the nine bits of permissions")
        somebody = 0 if self._volumes.one_id else DEFAULT_OWNER
        owner = [somebody if number is None else number for number in (uid, gid)]
        force = request.query_params.get("force", "false").lower()
        if force not in ("true", "false"):
            raise Refused(400, "INVALID_REQUEST", "force is true or false")
        return {"owner": owner, "mode": mode if asked is None else asked, "force": force == "true"}


def view(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of `runtime.volume_ops`, as answers show it. Pure."""
    shown = {name: entry[name] for name in ("type", "size", "mode", "uid", "gid")}
    shown |= {name: printable(entry[name]) for name in ("name", "path")}
    shown |= {name: rfc3339(moment(entry[f"{name}_ns"])) for name in ("atime", "mtime", "ctime")}
    return shown if entry["target"] is None else {**shown, "target": printable(entry["target"])}


def moment(nanoseconds: int) -> datetime:
    """The time of a file, which may be any: what no date can tell becomes the nearest that can. Pure."""
    try:
        return _EPOCH + timedelta(microseconds=nanoseconds // 1000)
    except OverflowError:
        return _LATEST if nanoseconds > 0 else _EARLIEST


class _Streamed(StreamingResponse):
    """What is read from a descriptor, which is closed in the end, whether or not anybody wanted to hear it."""

    def __init__(self, fd: int, content: Callable[[HeldFd], AsyncIterator[bytes]], **more: Any) -> None:
        self._held = HeldFd(fd)
        super().__init__(content(self._held), **more)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._held.close()


async def _listing(held: HeldFd) -> AsyncIterator[bytes]:
    """The JSON list of the entries that come as lines."""
    rest, between = b"", b"["
    while data := await held.run(os.read, CHUNK):
        *lines, rest = (rest + data).split(b"\n")
        shown = [json.dumps(view(json.loads(line)), ensure_ascii=False).encode() for line in lines]
        if shown:
            yield between + b",".join(shown)
            between = b","
    yield b"[]" if between == b"[" else b"]"


def _path(request: Request) -> str:
    raw = request.query_params.get("path", "")
    if not raw:
        raise Refused(400, "INVALID_REQUEST", "the query has no path")
    return posixpath.normpath("/" + raw.lstrip("/"))


def _number(request: Request, name: str) -> int | None:
    raw = request.query_params.get(name)
    if raw is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", raw) or int(raw) >= _UINT32 - 1:
        raise Refused(400, "INVALID_REQUEST", f"{name} is a number of 32 bits")
    return int(raw)


def _refusal(number: int, path: str, message: str) -> Refused:
    status, code = _STATUS.get(number, (400, "INVALID_REQUEST") if number in _CALLERS else (500, "INTERNAL"))
    return Refused(status, code, f"'{path}': {message}")
