"""`process.Process`: start, watch, feed and end the processes of one sandbox."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeAlias

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.envd.process import process_connect
from e2b.envd.process import process_pb as pb
from protobuf import Oneof

from managed_e2b.local.envd.auth import rpc_user
from managed_e2b.local.envd.commands import command_of, missing_cwd, program_of, pty_size, start_error
from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.envd.running import InputRefused, RunningProcess
from managed_e2b.local.envd.streams import Mailbox, attached, attended, keepalive_interval
from managed_e2b.local.logbook import Level
from managed_e2b.local.runtime.base import Command, GuestError, GuestGone, GuestProcess

TIMEOUT_HEADER = "connect-timeout-ms"
# The client enforces the same deadline and calls it a timeout; were we first, it would see a command that was killed.
DEADLINE_MARGIN = 0.25
EXIT_RETENTION = 30.0  # seconds for which a late Connect still gets the end of a process
KILL_WAIT = 5.0  # seconds a SIGKILL may take to be done before we answer anyway

ProcessEvents: TypeAlias = Mailbox[pb.ProcessEvent]
_START: Literal["start"] = "start"
_KEEPALIVE: Literal["keepalive"] = "keepalive"


def start_event(pid: int) -> pb.ProcessEvent:
    return pb.ProcessEvent(event=Oneof(_START, pb.ProcessEvent.StartEvent(pid=pid)))


def keepalive_event() -> pb.ProcessEvent:
    return pb.ProcessEvent(event=Oneof(_KEEPALIVE, pb.ProcessEvent.KeepAlive()))


class ProcessService(process_connect.Process):
    """One per sandbox. `close()` when the sandbox is dead."""

    def __init__(self, ctx: EnvdContext) -> None:
        self._ctx = ctx
        self._gone = f"the connection to sandbox {ctx.sandbox_id} ended before the stream completed"
        self._processes: dict[int, RunningProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgetting: set[asyncio.TimerHandle] = set()

    @property
    def readers(self) -> int:
        """Streams that are attached to a process now."""
        return sum(process.readers for process in self._processes.values())

    def close(self) -> None:
        """Let go of every process and descriptor; the sandbox has ended them."""
        for task in self._tasks:
            task.cancel()
        for timer in self._forgetting:
            timer.cancel()
        self._forgetting.clear()
        self._processes.clear()

    async def start(
        self, request: pb.StartRequest, ctx: RequestContext[pb.StartRequest, pb.StartResponse], /
    ) -> AsyncIterator[pb.StartResponse]:
        lifetime = _lifetime(ctx)
        mailbox: ProcessEvents = Mailbox(keepalive_interval(ctx))
        with self._guest_errors():
            user = await rpc_user(self._ctx, ctx.request_headers.get("authorization"))
            process = await self._spawn(request, command_of(self._ctx, user, request))
        self._log("started", process, user=user.name)
        if lifetime is not None:
            process.expire_after(lifetime + DEADLINE_MARGIN, mailbox)
        with process.reader(mailbox), attached(mailbox):
            self._run(process)
            yield pb.StartResponse(event=start_event(process.pid))
            async for event in mailbox:
                yield pb.StartResponse(event=event or keepalive_event())

    async def connect(
        self, request: pb.ConnectRequest, ctx: RequestContext[pb.ConnectRequest, pb.ConnectResponse], /
    ) -> AsyncIterator[pb.ConnectResponse]:
        process = self._find(request.process)
        mailbox: ProcessEvents = Mailbox(keepalive_interval(ctx))
        with process.reader(mailbox), attached(mailbox), _deadline(mailbox, _lifetime(ctx)):
            yield pb.ConnectResponse(event=start_event(process.pid))
            async for event in mailbox:
                yield pb.ConnectResponse(event=event or keepalive_event())

    async def list(
        self, request: pb.ListRequest, ctx: RequestContext[pb.ListRequest, pb.ListResponse], /
    ) -> pb.ListResponse:
        return pb.ListResponse(
            processes=[
                pb.ProcessInfo(config=process.config, pid=process.pid, tag=process.tag)
                for process in self._processes.values()
                if process.exit is None
            ]
        )

    async def send_input(
        self, request: pb.SendInputRequest, ctx: RequestContext[pb.SendInputRequest, pb.SendInputResponse], /
    ) -> pb.SendInputResponse:
        await _write(self._find_running(request.process), request.input)
        return pb.SendInputResponse()

    async def stream_input(
        self,
        request: AsyncIterator[pb.StreamInputRequest],
        ctx: RequestContext[pb.StreamInputRequest, pb.StreamInputResponse],
        /,
    ) -> pb.StreamInputResponse:
        process: RunningProcess | None = None
        while True:
            try:
                message = await attended(anext(request))
            except StopAsyncIteration:
                return pb.StreamInputResponse()
            match message.event:
                case Oneof(field="start", value=pb.StreamInputRequest.StartEvent() as start):
                    process = self._find_running(start.process)
                case Oneof(field="data", value=pb.StreamInputRequest.DataEvent() as data):
                    if process is None:
                        raise ConnectError(Code.INVALID_ARGUMENT, "input before a start event")
                    await _write(process, data.input)
                case Oneof(field="keepalive"):
                    pass
                case _:
                    raise ConnectError(Code.UNIMPLEMENTED, "invalid event type")

    async def close_stdin(
        self, request: pb.CloseStdinRequest, ctx: RequestContext[pb.CloseStdinRequest, pb.CloseStdinResponse], /
    ) -> pb.CloseStdinResponse:
        try:
            await attended(self._find_running(request.process).close_stdin())
        except InputRefused as error:
            raise ConnectError(Code.UNKNOWN, f"error closing stdin: {error}") from error
        return pb.CloseStdinResponse()

    async def send_signal(
        self, request: pb.SendSignalRequest, ctx: RequestContext[pb.SendSignalRequest, pb.SendSignalResponse], /
    ) -> pb.SendSignalResponse:
        process = self._find_running(request.process)
        match request.signal:
            case pb.Signal.SIGKILL:
                process.kill()
                # Who asked may look at once whether it is gone.
                with suppress(TimeoutError):
                    async with asyncio.timeout(KILL_WAIT):
                        await process.wait()
            case pb.Signal.SIGTERM:
                process.terminate()
            case _:
                raise ConnectError(Code.UNIMPLEMENTED, f"invalid signal: {request.signal}")
        return pb.SendSignalResponse()

    async def update(
        self, request: pb.UpdateRequest, ctx: RequestContext[pb.UpdateRequest, pb.UpdateResponse], /
    ) -> pb.UpdateResponse:
        process = self._find_running(request.process)
        if request.pty is not None:
            try:
                process.resize(pty_size(request.pty))
            except InputRefused as error:
                raise ConnectError(Code.INTERNAL, f"error resizing tty: {error}") from error
        return pb.UpdateResponse()

    async def _spawn(self, request: pb.StartRequest, command: Command) -> RunningProcess:
        try:
            spawned: GuestProcess = await self._ctx.guest.spawn(command)
        except GuestError as error:
            if error.errno == errno.ENOENT and not await self._exists(command.cwd):
                raise missing_cwd(command.cwd) from error
            raise start_error(request.process, error) from error
        config = request.process or pb.ProcessConfig()
        tag = request.tag if request.has_field("tag") else None
        return RunningProcess(config, tag, self._ctx.guest, spawned, self._gone)

    def _run(self, process: RunningProcess) -> None:
        self._processes[process.pid] = process
        task = asyncio.create_task(process.run(self._ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _log(self, what: str, process: RunningProcess, *, level: Level = Level.INFO, **fields: object) -> None:
        program = program_of(process.config)
        self._ctx.logbook.add(
            "process",
            f"Process {process.pid} {what}: {program}",
            level=level,
            event_type=f"process_{what}",
            pid=process.pid,
            program=program,
            tag=process.tag,
            **fields,
        )

    def _ended(self, process: RunningProcess) -> None:
        if (exit := process.exit) is not None:
            level = Level.INFO if exit.code == 0 else Level.WARN
            self._log("ended", process, level=level, exit_code=exit.code, signal=exit.signal)

        def forget() -> None:
            self._forgetting.discard(timer)
            if self._processes.get(process.pid) is process:  # the kernel may have given the number to another
                del self._processes[process.pid]

        timer = asyncio.get_running_loop().call_later(EXIT_RETENTION, forget)
        self._forgetting.add(timer)

    async def _exists(self, path: str) -> bool:
        try:
            await self._ctx.guest.call("stat", path=path)
        except GuestError:
            return False
        return True

    def _find(self, selector: pb.ProcessSelector | None) -> RunningProcess:
        """The process a client means, running or ended less than `EXIT_RETENTION` ago. Of a tag, the newest."""
        match selector.selector if selector is not None else None:
            case Oneof(field="pid", value=int() as pid):
                if found := self._processes.get(pid):
                    return found
                raise ConnectError(Code.NOT_FOUND, f"process with pid {pid} not found")
            case Oneof(field="tag", value=str() as tag):
                tagged = [process for process in self._processes.values() if process.tag == tag]
                if tagged:
                    return max(enumerate(tagged), key=lambda item: (item[1].exit is None, item[0]))[1]
                raise ConnectError(Code.NOT_FOUND, f"process with tag {tag} not found")
            case _:
                raise ConnectError(Code.UNIMPLEMENTED, "no process selected")

    def _find_running(self, selector: pb.ProcessSelector | None) -> RunningProcess:
        process = self._find(selector)
        if process.exit is not None:
            raise ConnectError(Code.NOT_FOUND, f"process with pid {process.pid} not found")
        return process

    @contextmanager
    def _guest_errors(self) -> Iterator[None]:
        try:
            yield
        except GuestGone as error:
            raise ConnectError(Code.UNAVAILABLE, f"sandbox {self._ctx.sandbox_id} was not found") from error


async def _write(process: RunningProcess, input: pb.ProcessInput | None) -> None:
    """Write all of a client's input, for as long as the process takes, the client is there and the sandbox lives."""
    try:
        match input.input if input is not None else None:
            case Oneof(field="pty", value=bytes() as data):
                await attended(process.write_pty(data))
            case Oneof(field="stdin", value=bytes() as data):
                await attended(process.write_stdin(data))
            case _:
                raise ConnectError(Code.UNIMPLEMENTED, "invalid input type")
    except (InputRefused, OSError) as error:
        raise ConnectError(Code.INTERNAL, f"error writing to process {process.pid}: {error}") from error


def _lifetime(ctx: RequestContext[Any, Any]) -> float | None:
    """The time limit a client asks for, in seconds; 0 and no header mean none. The library has checked the number."""
    milliseconds = int(ctx.request_headers.get(TIMEOUT_HEADER) or 0)
    return milliseconds / 1000 if milliseconds > 0 else None


@contextmanager
def _deadline(mailbox: ProcessEvents, seconds: float | None) -> Iterator[None]:
    """End a stream, not the process, when its client's time is over."""
    if seconds is None:
        yield
        return
    error = ConnectError(Code.DEADLINE_EXCEEDED, "the stream ran past its timeout")
    timer = asyncio.get_running_loop().call_later(seconds + DEADLINE_MARGIN, mailbox.close, error)
    try:
        yield
    finally:
        timer.cancel()
