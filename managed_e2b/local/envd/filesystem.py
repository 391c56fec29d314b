"""`filesystem.Filesystem`: look at, make, move, list, remove and watch the files of one sandbox."""

from __future__ import annotations

import errno
import secrets
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.envd.filesystem import filesystem_connect
from e2b.envd.filesystem import filesystem_pb as pb
from protobuf import Oneof

from managed_e2b.local.envd.agent import MISSING, rpc_error, rpc_errors, run_job
from managed_e2b.local.envd.auth import rpc_user
from managed_e2b.local.envd.commands import resolve
from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.envd.entries import entry_info, event_weight, printable
from managed_e2b.local.envd.streams import Mailbox, attached, keepalive_interval
from managed_e2b.local.envd.watching import Sink, WatchHub
from managed_e2b.local.runtime.base import GuestError, User

MAX_WATCHERS = 256  # of one sandbox; a client may forget to remove its own
WAITING_BYTES = 16 << 20  # of events for one client that does not ask, or does not read

_FILESYSTEM: Literal["filesystem"] = "filesystem"
_START: Literal["start"] = "start"
_KEEPALIVE: Literal["keepalive"] = "keepalive"


class Watcher:
    """Events that wait to be asked for."""

    def __init__(self) -> None:
        self.number = 0
        self._events: deque[pb.FilesystemEvent] = deque()
        self._weight = 0
        self._error: str | None = None

    def put(self, event: pb.FilesystemEvent) -> None:
        self._weight += event_weight(event)
        if self._weight < WAITING_BYTES:
            self._events.append(event)
        else:
            self.end("events were lost: nobody asked for them")

    def end(self, reason: str) -> None:
        self._events.clear()
        self._error = self._error or reason

    def take(self) -> list[pb.FilesystemEvent]:
        """Raises ConnectError(INTERNAL) from the moment on when an event was lost."""
        if self._error is not None:
            raise ConnectError(Code.INTERNAL, f"watcher error: {self._error}")
        events = list(self._events)
        self._events.clear()
        self._weight = 0
        return events


class FilesystemService(filesystem_connect.Filesystem):
    """One per sandbox. `close()` when the sandbox is dead."""

    def __init__(self, ctx: EnvdContext) -> None:
        self._ctx = ctx
        self._guest = ctx.guest
        self._hub = WatchHub(ctx.guest)
        self._watchers: dict[str, Watcher] = {}

    @property
    def watches(self) -> int:
        """Directories that are watched now, in either form."""
        return len(self._hub)

    def close(self) -> None:
        """Let go of every watcher and descriptor; the sandbox is dead."""
        self._watchers.clear()
        self._hub.close()

    async def stat(
        self, request: pb.StatRequest, ctx: RequestContext[pb.StatRequest, pb.StatResponse], /
    ) -> pb.StatResponse:
        _, path = await self._subject(ctx, request.path)
        with rpc_errors(path):
            try:
                reply = await self._guest.call("stat", path=path)
            except GuestError as error:
                if error.errno in MISSING:  # also when a parent is a file: there is no such entry
                    raise ConnectError(Code.NOT_FOUND, f"file not found: '{printable(path)}'") from error
                raise
        return pb.StatResponse(entry=entry_info(reply.value))

    async def make_dir(
        self, request: pb.MakeDirRequest, ctx: RequestContext[pb.MakeDirRequest, pb.MakeDirResponse], /
    ) -> pb.MakeDirResponse:
        user, path = await self._subject(ctx, request.path)
        with rpc_errors(path):
            reply = await self._guest.call("make_dir", path=path, uid=user.uid, gid=user.gid)
        return pb.MakeDirResponse(entry=entry_info(reply.value))

    async def move(
        self, request: pb.MoveRequest, ctx: RequestContext[pb.MoveRequest, pb.MoveResponse], /
    ) -> pb.MoveResponse:
        user, source = await self._subject(ctx, request.source)
        destination = self._path(user, request.destination)
        with rpc_errors(f"{source}' to '{destination}"):
            _, entry = await run_job(
                self._guest, "move", source=source, destination=destination, uid=user.uid, gid=user.gid
            )
        return pb.MoveResponse(entry=entry_info(entry))

    async def list_dir(
        self, request: pb.ListDirRequest, ctx: RequestContext[pb.ListDirRequest, pb.ListDirResponse], /
    ) -> pb.ListDirResponse:
        _, path = await self._subject(ctx, request.path)
        with rpc_errors(path):
            entries, _ = await run_job(self._guest, "list", path=path, depth=request.depth or 1)
        return pb.ListDirResponse(entries=entries)

    async def remove(
        self, request: pb.RemoveRequest, ctx: RequestContext[pb.RemoveRequest, pb.RemoveResponse], /
    ) -> pb.RemoveResponse:
        _, path = await self._subject(ctx, request.path)
        with rpc_errors(path):
            await run_job(self._guest, "remove", path=path)
        return pb.RemoveResponse()

    async def watch_dir(
        self, request: pb.WatchDirRequest, ctx: RequestContext[pb.WatchDirRequest, pb.WatchDirResponse], /
    ) -> AsyncIterator[pb.WatchDirResponse]:
        mailbox: Mailbox[pb.FilesystemEvent] = Mailbox(keepalive_interval(ctx), limit=WAITING_BYTES)

        def put(event: pb.FilesystemEvent) -> None:
            mailbox.put(event, event_weight(event))
            if mailbox.full:
                end("events were lost: the client takes them too slowly")

        def end(reason: str) -> None:
            mailbox.close(ConnectError(Code.INTERNAL, f"watcher error: {reason}"))

        number = await self._watch(request, ctx, Sink(put, end))
        try:
            with attached(mailbox):
                yield pb.WatchDirResponse(event=Oneof(_START, pb.WatchDirResponse.StartEvent()))
                async for event in mailbox:
                    yield pb.WatchDirResponse(
                        event=Oneof(_KEEPALIVE, pb.WatchDirResponse.KeepAlive())
                        if event is None
                        else Oneof(_FILESYSTEM, event)
                    )
        finally:
            self._hub.remove(number)

    async def create_watcher(
        self,
        request: pb.CreateWatcherRequest,
        ctx: RequestContext[pb.CreateWatcherRequest, pb.CreateWatcherResponse],
        /,
    ) -> pb.CreateWatcherResponse:
        watcher = Watcher()
        watcher.number = await self._watch(request, ctx, Sink(watcher.put, watcher.end))
        watcher_id = "w" + secrets.token_hex(10)
        self._watchers[watcher_id] = watcher
        return pb.CreateWatcherResponse(watcher_id=watcher_id)

    async def get_watcher_events(
        self,
        request: pb.GetWatcherEventsRequest,
        ctx: RequestContext[pb.GetWatcherEventsRequest, pb.GetWatcherEventsResponse],
        /,
    ) -> pb.GetWatcherEventsResponse:
        watcher = self._watcher(request.watcher_id)
        with rpc_errors(""):
            await self._hub.drain()
        return pb.GetWatcherEventsResponse(events=watcher.take())

    async def remove_watcher(
        self,
        request: pb.RemoveWatcherRequest,
        ctx: RequestContext[pb.RemoveWatcherRequest, pb.RemoveWatcherResponse],
        /,
    ) -> pb.RemoveWatcherResponse:
        self._hub.remove(self._watcher(request.watcher_id).number)
        del self._watchers[request.watcher_id]
        return pb.RemoveWatcherResponse()

    def _watcher(self, watcher_id: str) -> Watcher:
        try:
            return self._watchers[watcher_id]
        except KeyError:
            raise ConnectError(Code.NOT_FOUND, f"watcher with id {watcher_id} not found") from None

    async def _watch(
        self, request: pb.WatchDirRequest | pb.CreateWatcherRequest, ctx: RequestContext[Any, Any], sink: Sink
    ) -> int:
        _, path = await self._subject(ctx, request.path)
        if len(self._hub) >= MAX_WATCHERS:
            raise ConnectError(Code.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} directories are watched already: remove some")
        with rpc_errors(path):
            try:
                return await self._hub.add(
                    path,
                    sink,
                    recursive=request.recursive,
                    entries=request.include_entry,
                    network=request.allow_network_mounts,
                )
            except GuestError as error:
                raise _watch_error(error, path) from error

    async def _subject(self, ctx: RequestContext[Any, Any], path: str) -> tuple[User, str]:
        """The user who asks, and the absolute path that is meant."""
        with rpc_errors(path):
            user = await rpc_user(self._ctx, ctx.request_headers.get("authorization"))
        return user, self._path(user, path)

    def _path(self, user: User, path: str) -> str:
        return resolve(path or self._ctx.default_workdir or "", user)


def _watch_error(error: GuestError, path: str) -> ConnectError:
    if error.errno == errno.EXDEV:
        return ConnectError(Code.INVALID_ARGUMENT, f"cannot watch path on network filesystem: {printable(path)}")
    limits = {errno.EMFILE: "fs.inotify.max_user_instances", errno.ENOSPC: "fs.inotify.max_user_watches"}
    if error.errno in limits:
        return ConnectError(
            Code.RESOURCE_EXHAUSTED,
            f"cannot watch '{printable(path)}': the host's limit {limits[error.errno]} is reached (see sysctl)",
        )
    return rpc_error(error, path)
