"""envd's `/files`: download and upload of whole files over plain HTTP.

It does its own authentication, because a request may carry the sandbox's token or a signature for one path instead.
Content streams through descriptors that the file agent opened inside the sandbox.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from mimetypes import guess_type
from typing import Any
from urllib.parse import parse_qsl

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from managed_e2b.local.envd import http_rules as rules
from managed_e2b.local.envd.agent import MISSING, SANDBOX_GONE
from managed_e2b.local.envd.auth import ACCESS_TOKEN_HEADER, token_accepted
from managed_e2b.local.envd.commands import resolve
from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.envd.entries import printable
from managed_e2b.local.envd.multipart import Part, PartEnd, multipart_parts
from managed_e2b.local.envd.signatures import READ, WRITE, signature_matches
from managed_e2b.local.envd.streams import attended
from managed_e2b.local.envd.transfer import (
    CHUNK,
    BadBody,
    ClientGone,
    FileWriter,
    HeldFd,
    RequestBody,
    UploadStalled,
    gunzip,
    gzipped,
    read_chunks,
)
from managed_e2b.local.runtime.base import GuestError, GuestGone, User

__all__ = ["files_endpoint", "signature_matches"]


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def response(self) -> Response:
        return JSONResponse({"code": self.status, "message": printable(self.message)}, status_code=self.status)


@dataclass(frozen=True)
class Query:
    """What the query says; bytes that are not UTF-8 are in there as surrogates."""

    path: str | None
    username: str | None
    signature: str | None
    expiration: int | None


async def files_endpoint(ctx: EnvdContext, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request. Run it as a call (`Calls.serve`), so that it ends with its client and with its sandbox."""
    body = RequestBody(receive)
    try:
        try:
            if scope["method"] == "GET":
                await body.discard()  # there is none; but from its end on it is noticed when the client leaves
                await _download(ctx, scope, send)
            elif scope["method"] == "POST":
                await JSONResponse(await _upload(ctx, scope, body))(scope, receive, send)
            else:
                raise Refused(405, "/files answers GET and POST only")
        except GuestGone:
            raise Refused(502, SANDBOX_GONE) from None
        except ConnectError as ended:  # the call has no business going on
            if ended.code == Code.CANCELED:
                raise ClientGone from None
            raise Refused(502, SANDBOX_GONE) from None
    except Refused as refused:
        with suppress(ClientGone):
            # Nobody is made to send what waits for a "continue" first.
            if not rules.header(scope["headers"], b"expect"):
                await body.discard()
            await refused.response()(scope, receive, send)
    except ClientGone:
        return


def parse_query(scope: Scope) -> Query:
    """Raises Refused(400)."""
    text = scope["query_string"].decode("latin-1")
    pairs = parse_qsl(text, keep_blank_values=True, errors="surrogateescape")
    values: dict[str, str] = {}
    for key, value in pairs:
        values.setdefault(key, value)
    expiration = values.get("signature_expiration")
    try:
        seconds = None if expiration is None else int(expiration)
    except ValueError:
        raise Refused(400, f"invalid signature_expiration '{expiration}': an integer is expected") from None
    return Query(values.get("path"), values.get("username"), values.get("signature"), seconds)


def authorize(ctx: EnvdContext, scope: Scope, query: Query, operation: str) -> None:
    """Raises Refused(401), with upstream's words."""
    if ctx.access_token is None:
        return
    if rules.header(scope["headers"], ACCESS_TOKEN_HEADER):
        if not token_accepted(ctx.access_token, scope["headers"]):
            raise Refused(401, "access token present in header but does not match")
        return
    if query.signature is None:
        raise Refused(401, "missing signature query parameter")
    if not signature_matches(
        ctx.access_token, query.path or "", operation, query.username, query.expiration, query.signature
    ):
        raise Refused(401, "invalid signature")
    if query.expiration is not None and query.expiration < time.time():
        raise Refused(401, "signature is already expired")


async def _user(ctx: EnvdContext, query: Query) -> User:
    name = ctx.default_user if query.username is None else query.username
    try:
        return await ctx.guest.user(name)
    except KeyError:
        raise Refused(401, f"error looking up user '{name}': unknown user {name}") from None


def _path(ctx: EnvdContext, user: User, path: str) -> str:
    try:
        return resolve(path or ctx.default_workdir or "", user)
    except ConnectError as error:
        raise Refused(400, f"error resolving path: {error.message}") from None


async def _download(ctx: EnvdContext, scope: Scope, send: Send) -> None:
    headers = scope["headers"]
    query = parse_query(scope)
    authorize(ctx, scope, query, READ)
    user = await _user(ctx, query)
    path = _path(ctx, user, query.path or "")
    partial = rules.is_partial(headers)
    try:
        reply = await ctx.guest.call("open_read", path=path)
    except GuestError as error:
        raise _read_refusal(error, path) from None
    held = HeldFd(reply.fds[0])
    try:
        try:
            encoding = rules.response_encoding(rules.header(headers, b"accept-encoding"), partial=partial)
        except rules.NotAcceptable:
            raise Refused(406, "no acceptable encoding: identity and gzip are to be had") from None
        await _send_file(held, path, reply.value, encoding, headers, send)
    except OSError as error:
        raise Refused(500, f"error reading file '{path}': {error.strerror}") from None
    finally:
        held.close()


async def _send_file(
    held: HeldFd, path: str, about: Mapping[str, Any], encoding: str, headers: rules.Headers, send: Send
) -> None:
    size, mtime = about["size"], about["mtime_ns"] // 1_000_000_000
    name = os.path.basename(path)
    answer = {
        "content-type": _content_type(name),
        "content-disposition": rules.inline(name.encode("utf-8", "surrogateescape")),
        "last-modified": rules.http_date(mtime),
        "vary": "Accept-Encoding",
        "x-content-type-options": "nosniff",
        # All sandboxes share one origin with the API here: a page of theirs must not act as that origin in a browser.
        "content-security-policy": "sandbox allow-scripts",
    }
    since = rules.header(headers, b"if-modified-since")
    if since and rules.not_modified_since(since, mtime):
        await _send_all(send, 304, answer, None)
        return
    if encoding == rules.GZIP:
        await _send_all(send, 200, {**answer, "content-encoding": "gzip"}, gzipped(read_chunks(held, 0, None), held))
        return
    answer["accept-ranges"] = "bytes"
    wanted = None
    if_range = rules.header(headers, b"if-range")
    if not if_range or rules.not_modified_since(if_range, mtime):
        try:
            wanted = rules.byte_range(rules.header(headers, b"range"), size)
        except rules.RangeNotSatisfiable:
            await _send_all(send, 416, {"content-range": f"bytes */{size}", "content-length": "0"}, None)
            return
    if wanted is not None:
        start, end = wanted
        answer |= {"content-range": f"bytes {start}-{end - 1}/{size}", "content-length": str(end - start)}
        await _send_all(send, 206, answer, read_chunks(held, start, end), length=end - start)
    else:
        await _send_whole(held, size, answer, send)


async def _send_whole(held: HeldFd, size: int, answer: Mapping[str, str], send: Send) -> None:
    if size <= CHUNK:
        # Read first: the file may be another by now, and those in /proc do not tell how long they are.
        data = b"".join([piece async for piece in read_chunks(held, 0, CHUNK)])
        if len(data) < CHUNK:
            await _send_all(send, 200, {**answer, "content-length": str(len(data))}, _one(data))
            return
    length = {"content-length": str(size)} if size else {}
    await _send_all(send, 200, {**answer, **length}, read_chunks(held, 0, size or None), length=size or None)


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _send_all(
    send: Send,
    status: int,
    headers: Mapping[str, str],
    content: AsyncIterator[bytes] | None,
    *,
    length: int | None = None,
) -> None:
    """Send an answer. Content that turns out shorter than its `length`, because the file is being cut, is not ended:
    the server closes the connection then, and the client knows."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    sent = 0
    if content is not None:
        try:
            async for data in content:
                await attended(send({"type": "http.response.body", "body": data, "more_body": True}))
                sent += len(data)
        except (ConnectError, OSError):
            return  # the client left, the sandbox died, or the file cannot be read on: no clean end for this stream
    if length is None or sent == length:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _content_type(name: str) -> str:
    kind = guess_type(name, strict=False)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def _read_refusal(error: GuestError, path: str) -> Refused:
    if error.errno in MISSING:
        return Refused(404, f"path '{path}' does not exist")
    if error.errno == errno.EISDIR:
        return Refused(400, f"path '{path}' is a directory")
    if error.errno in (errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP):
        return Refused(400, f"path '{path}': {error.message}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refused(403, f"error opening file '{path}': {error.message}")
    return Refused(500, f"error opening file '{path}': {error.message}")


async def _upload(ctx: EnvdContext, scope: Scope, body: RequestBody) -> list[dict[str, Any]]:
    """Store what the request brings; what the answer tells about each file."""
    headers = scope["headers"]
    query = parse_query(scope)
    authorize(ctx, scope, query, WRITE)
    encoding = rules.header(headers, b"content-encoding").lower() or rules.IDENTITY
    if encoding not in (rules.IDENTITY, rules.GZIP):
        raise Refused(400, f"unsupported Content-Encoding: {encoding}, supported: [gzip]")
    user = await _user(ctx, query)
    try:
        metadata = rules.metadata_of(headers)
    except rules.InvalidMetadata as error:
        raise Refused(400, f"invalid metadata: {error}") from None
    upload = Upload(ctx, user, query.path, metadata)
    content_type = rules.header(headers, b"content-type")
    content: AsyncIterable[bytes] = gunzip(body) if encoding == rules.GZIP else body
    try:
        kind = content_type.partition(";")[0].strip().lower()
        if kind == "application/octet-stream":
            await upload.take_raw(content)
        elif kind.startswith("multipart/"):
            await upload.take_multipart(content, content_type)
        else:
            raise Refused(
                400,
                f"unsupported content type: {content_type}, expected multipart/form-data or application/octet-stream",
            )
    except BadBody as error:
        raise Refused(400, str(error)) from None
    except UploadStalled as error:
        raise Refused(408, str(error)) from None
    finally:
        upload.close()
    return upload.stored


class Upload:
    """One upload request: the files it has stored, and the one that is being written."""

    def __init__(self, ctx: EnvdContext, user: User, path: str | None, metadata: dict[str, str]) -> None:
        self.stored: list[dict[str, Any]] = []
        self._ctx = ctx
        self._user = user
        self._wanted_path = path
        self._metadata = metadata
        self._path = ""
        self._paths: set[str] = set()
        self._writer: FileWriter | None = None

    async def take_raw(self, body: AsyncIterable[bytes]) -> None:
        """The whole body is one file."""
        if self._wanted_path is None:
            raise Refused(400, "path query parameter is required for raw body upload")
        await self._begin(self._wanted_path)
        async for data in body:
            await self._write(data)
        await self._end()

    async def take_multipart(self, body: AsyncIterable[bytes], content_type: str) -> None:
        """Each part named `file` is a file: at `path` when the query has one, else where the part's filename says."""
        async for event in multipart_parts(body, content_type):
            if isinstance(event, Part):
                if event.name == b"file":
                    await self._begin(self._destination(event))
            elif self._writer is not None:
                if event is PartEnd:
                    await self._end()
                else:
                    await self._write(event)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _destination(self, part: Part) -> str:
        if self._wanted_path is not None:
            return self._wanted_path
        if part.filename is None:
            raise Refused(400, "error getting the file name: filename not found in Content-Disposition header")
        return part.filename.decode("utf-8", "surrogateescape")

    async def _begin(self, path: str) -> None:
        self._path = _path(self._ctx, self._user, path)
        if self._path in self._paths:
            raise Refused(
                400,
                f"you cannot upload multiple files to the same path '{self._path}' in one upload request, "
                "only the first specified file was uploaded",
            )
        try:
            reply = await self._ctx.guest.call(
                "open_write", path=self._path, uid=self._user.uid, gid=self._user.gid, metadata=self._metadata
            )
        except GuestError as error:
            raise self._refusal(error.errno, error.message, "error opening file") from None
        self._writer = FileWriter(reply.fds[0])
        self._paths.add(self._path)
        entry = {"name": printable(os.path.basename(self._path)), "path": printable(self._path), "type": "file"}
        self.stored.append(entry | ({"metadata": reply.value["metadata"]} if reply.value["metadata"] else {}))

    async def _write(self, data: bytes) -> None:
        assert self._writer is not None
        try:
            await self._writer.write(data)
        except OSError as error:
            raise self._refusal(error.errno or 0, error.strerror, "error writing file") from None

    async def _end(self) -> None:
        assert self._writer is not None
        try:
            await self._writer.flush()
        except OSError as error:
            raise self._refusal(error.errno or 0, error.strerror, "error writing file") from None
        self.close()

    def _refusal(self, code: int, message: str | None, doing: str) -> Refused:
        if code in (errno.ENOSPC, errno.EDQUOT):
            return Refused(507, f"'{self._path}': not enough disk space available")
        if code == errno.EISDIR:
            return Refused(400, f"path is a directory: {self._path}")
        if code == errno.ENOTDIR:
            return Refused(400, f"error ensuring directories: path is a file: a parent of {self._path}")
        if code == errno.EOPNOTSUPP:
            return Refused(400, f"'{self._path}': its filesystem has no extended attributes, it cannot store metadata")
        if code in (errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP):
            return Refused(400, f"{doing} '{self._path}': {message}")
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Refused(403, f"{doing} '{self._path}': {message}")
        if code in (errno.ETXTBSY, errno.EAGAIN):
            return Refused(409, f"{doing} '{self._path}': {message}")
        return Refused(500, f"{doing} '{self._path}': {message}")
