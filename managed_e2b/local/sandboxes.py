"""The registry: the truth about which sandboxes exist, and the only place that changes it.

Everything happens on one event loop, so a decision made without an `await` in it is atomic; what needs several
steps is serialised per sandbox (`Sandbox.transition`), never across sandboxes. The rules are elsewhere and pure:
`lifetime` (timeouts), `listing` (filters, order, pages), `model` (states), `expiry` (deadlines).

Effects outlive whoever asked for them: they run in tasks of the registry, so a client that hangs up, or a handler
that is cancelled, leaves neither half a sandbox nor one that nobody lists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from managed_e2b.local.clock import Clock, SystemClock
from managed_e2b.local.counters import Counters
from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.errors import ApiError, sandbox_not_found
from managed_e2b.local.expiry import Alarm, Deadlines
from managed_e2b.local.lifetime import Lifetime
from managed_e2b.local.model import EnvdFactory, Sandbox, SandboxSpec, State, new_sandbox_id, new_token
from managed_e2b.local.runtime.base import Guest, GuestGone, GuestSpec, Runtime, RuntimeUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_DELAY = 1.0
"""Seconds until a kill, or a pause at the end of the time, that failed is tried again."""

CLOSE_TIMEOUT = 10.0
"""Seconds that `close` waits for creates and kills; the runtime's own end takes the rest with it."""


def stream_cut(sandbox_id: str) -> str:
    """What open streams of a sandbox end with when it is killed or paused: upstream's wording."""
    return f"the connection to sandbox {sandbox_id} ended before the stream completed"


class SandboxRegistry:
    """Creates, finds, pauses, resumes and kills sandboxes of one runtime, and ends them when their time is over.

    By-id methods raise ApiError(404) for a sandbox that does not exist. One that is being killed does not exist for
    lists, and for by-id methods only once it is really gone: they wait for that, so that their 404 proves it.
    """

    def __init__(self, runtime: Runtime, envd: EnvdFactory, *, clock: Clock | None = None) -> None:
        self._runtime = runtime
        self._envd = envd
        self._clock = clock or SystemClock()
        self._sandboxes: dict[str, Sandbox] = {}
        self._starting = 0
        self._deadlines = Deadlines()
        self._alarm = Alarm(self.expire_due)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._creates: set[asyncio.Task[Any]] = set()
        self._closing = False
        self.counters = Counters()

    # --- what is

    def __iter__(self) -> Iterator[Sandbox]:
        """All that exist, those being killed excepted."""
        return (sandbox for sandbox in self._sandboxes.values() if sandbox.state is not State.ENDING)

    def find(self, sandbox_id: str) -> Sandbox | None:
        """The sandbox of that id; None when there is none, or it is being killed."""
        sandbox = self._sandboxes.get(sandbox_id)
        return None if sandbox is None or sandbox.state is State.ENDING else sandbox

    async def get(self, sandbox_id: str) -> Sandbox:
        """The sandbox of that id."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.ending is not None:
            await asyncio.wait([sandbox.ending])
            sandbox = self.find(sandbox_id)  # still there when the kill failed
        if sandbox is None:
            raise sandbox_not_found(sandbox_id)
        return sandbox

    # --- create

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox, running. Raises ApiError: 404 for a template the runtime lacks, 503 when it can make none."""
        if self._closing:
            raise _shutting_down()
        task = self._start(self._create(spec))
        self._creates.add(task)
        task.add_done_callback(self._creates.discard)
        return await asyncio.shield(task)

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        try:
            sandbox_id = new_sandbox_id()
            guest = await self._boot(sandbox_id, spec)
            try:
                if self._closing:
                    raise _shutting_down()
                sandbox = self._admit(sandbox_id, spec, guest)
            except BaseException:
                await guest.kill()
                raise
        except BaseException:
            self.counters.create_failed += 1
            raise
        finally:
            self._count()
        self.counters.created += 1
        return sandbox

    async def _boot(self, sandbox_id: str, spec: SandboxSpec) -> Guest:
        self._starting += 1
        self._count()
        try:
            return await self._runtime.create(sandbox_id, GuestSpec(image=spec.image))
        except KeyError as error:
            raise ApiError(404, f"template '{spec.template_id}' not found") from error
        except RuntimeUnavailable as error:
            raise ApiError(503, str(error), headers={"Should-Retry": "false"}) from error
        finally:
            self._starting -= 1

    def _admit(self, sandbox_id: str, spec: SandboxSpec, guest: Guest) -> Sandbox:
        token = new_token() if spec.secure else None
        env_vars = {**spec.settings.env, **spec.env_vars}
        sandbox = Sandbox(
            sandbox_id=sandbox_id,
            spec=spec,
            access_token=token,
            traffic_token=None if spec.public_traffic else new_token(),
            guest=guest,
            envd=self._envd(
                EnvdContext(
                    sandbox_id=sandbox_id,
                    guest=guest,
                    access_token=token,
                    env_vars=env_vars,
                    default_user=spec.settings.user,
                    default_workdir=spec.settings.workdir,
                    template_id=spec.template_id,
                )
            ),
            lifetime=Lifetime.begin(self._clock.read(), spec.timeout),
        )
        self._sandboxes[sandbox_id] = sandbox
        self._schedule(sandbox)
        self._start(self._watch(sandbox))
        return sandbox

    async def _watch(self, sandbox: Sandbox) -> None:
        await sandbox.guest.dead.wait()
        if self.find(sandbox.sandbox_id) is sandbox:
            log.warning("sandbox %s died by itself", sandbox.sandbox_id)
            self._begin_end(sandbox, "died")

    # --- end

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox, running or paused. When this returns nothing of it is left.

        Of several at once, one ends it; the others wait for that and raise ApiError(404).
        """
        sandbox = await self.get(sandbox_id)
        await asyncio.shield(self._begin_end(sandbox, "killed"))

    def _begin_end(self, sandbox: Sandbox, reason: str) -> asyncio.Task[None]:
        """Hide the sandbox at once, and end it in a task."""
        before = sandbox.state
        sandbox.become(State.ENDING)
        self._deadlines.discard(sandbox.sandbox_id)
        self._count()
        sandbox.ending = self._start(self._end(sandbox, before, reason))
        return sandbox.ending

    async def _end(self, sandbox: Sandbox, before: State, reason: str) -> None:
        try:
            try:
                # before its processes die: a stream must not see the death of its command as a normal end
                await sandbox.envd.abort(stream_cut(sandbox.sandbox_id))
            finally:
                await sandbox.guest.kill()
        except BaseException:
            # not proven dead: it is listed again, and ending it is tried again whether or not anybody asks
            self.counters.kill_failed += 1
            sandbox.ending = None
            sandbox.become(State.PAUSED if before in (State.PAUSED, State.RESUMING) else State.RUNNING)
            self._count()
            asyncio.get_running_loop().call_later(RETRY_DELAY, self._end_again, sandbox, reason)
            raise
        del self._sandboxes[sandbox.sandbox_id]
        self.counters.ended[reason] += 1
        self._count()

    def _end_again(self, sandbox: Sandbox, reason: str) -> None:
        if self.find(sandbox.sandbox_id) is sandbox and not self._closing:
            self._begin_end(sandbox, reason)

    async def close(self) -> None:
        """End all, those that are just being started included, and start no more."""
        self._closing = True
        for sandbox in list(self):
            self._begin_end(sandbox, "shutdown")
        self._alarm.set(None)
        endings = {sandbox.ending for sandbox in self._sandboxes.values() if sandbox.ending is not None}
        if unfinished := endings | self._creates:
            await asyncio.wait(unfinished, timeout=CLOSE_TIMEOUT)
        if rest := set(self._tasks):
            for task in rest:
                task.cancel()
            await asyncio.wait(rest)

    # --- time

    async def set_timeout(self, sandbox_id: str, seconds: int) -> None:
        """It ends in `seconds` from now; 0 or less: now. Raises ApiError: 404 also when paused, 409 in between."""
        sandbox = await self.get(sandbox_id)
        if sandbox.state is State.PAUSED:
            raise sandbox_not_found(sandbox_id)
        if sandbox.state is not State.RUNNING:
            raise ApiError(409, f'Sandbox "{sandbox_id}" is {sandbox.state}')
        sandbox.lifetime = sandbox.lifetime.reset(self._clock.read(), seconds)
        self._schedule(sandbox)
        self.expire_due()  # a zero has its effect before the answer

    async def refresh(self, sandbox_id: str, seconds: int) -> None:
        """It ends in `seconds` from now at the earliest. Raises ApiError(404), also when it is paused."""
        sandbox = await self.get(sandbox_id)
        if sandbox.state is not State.RUNNING:
            raise sandbox_not_found(sandbox_id)
        self._extend(sandbox, seconds)

    def _extend(self, sandbox: Sandbox, seconds: int) -> None:
        sandbox.lifetime = sandbox.lifetime.extend(self._clock.read(), seconds)
        self._schedule(sandbox)

    def _schedule(self, sandbox: Sandbox) -> None:
        self._deadlines.set(sandbox.sandbox_id, sandbox.lifetime.end.monotonic)
        self._set_alarm()

    def _set_alarm(self) -> None:
        deadline = self._deadlines.next()
        self._alarm.set(None if deadline is None else deadline - self._clock.read().monotonic)

    def expire_due(self) -> None:
        """Begin to end, or to pause, what has come to its time. The alarm calls this."""
        for sandbox_id in self._deadlines.pop_due(self._clock.read().monotonic):
            sandbox = self.find(sandbox_id)
            if sandbox is None or sandbox.state is not State.RUNNING:
                continue
            if sandbox.spec.auto_pause:
                self._start(self._pause_expired(sandbox))
            else:
                self._begin_end(sandbox, "expired")
        self._set_alarm()

    async def _pause_expired(self, sandbox: Sandbox) -> None:
        async with sandbox.transition:
            # connect or set_timeout may have moved the end while this waited its turn
            if sandbox.state is State.RUNNING and sandbox.lifetime.over(self._clock.read()):
                await self._freeze(sandbox)

    # --- pause and resume

    async def pause(self, sandbox_id: str) -> None:
        """Stop its processes, keep its memory. Raises ApiError: 404, and 409 when it is paused already."""
        await self._finish(self._pause(await self.get(sandbox_id)))

    async def _pause(self, sandbox: Sandbox) -> None:
        async with sandbox.transition:
            if sandbox.state is State.PAUSED:
                raise ApiError(409, f"Error pausing sandbox - sandbox '{sandbox.sandbox_id}' is already paused")
            await self._freeze(sandbox)

    async def _freeze(self, sandbox: Sandbox) -> None:
        if not sandbox.is_in(State.RUNNING):
            raise sandbox_not_found(sandbox.sandbox_id)
        sandbox.become(State.PAUSING)
        self._deadlines.discard(sandbox.sandbox_id)
        try:
            await sandbox.envd.abort(stream_cut(sandbox.sandbox_id))
            await sandbox.guest.freeze()
        except GuestGone as error:
            raise sandbox_not_found(sandbox.sandbox_id) from error
        except BaseException:
            if sandbox.is_in(State.PAUSING):
                sandbox.become(State.RUNNING)
                now = self._clock.read().monotonic
                self._deadlines.set(sandbox.sandbox_id, max(sandbox.lifetime.end.monotonic, now + RETRY_DELAY))
                self._set_alarm()
            raise
        if not sandbox.is_in(State.PAUSING):  # killed meanwhile
            raise sandbox_not_found(sandbox.sandbox_id)
        sandbox.become(State.PAUSED)
        sandbox.lifetime = sandbox.lifetime.stopped(self._clock.read())
        self.counters.paused += 1

    async def connect(self, sandbox_id: str, seconds: int) -> tuple[Sandbox, bool]:
        """Let it run for `seconds` more at least; resume it when it is paused, and say so with True.

        A resume is a new start: the old end is forgotten.
        """
        sandbox = await self.get(sandbox_id)
        return sandbox, await self._finish(self._connect(sandbox, seconds))

    async def _connect(self, sandbox: Sandbox, seconds: int) -> bool:
        async with sandbox.transition:
            if sandbox.is_in(State.RUNNING):
                self._extend(sandbox, seconds)
                return False
            await self._thaw(sandbox, seconds)
            return True

    async def _thaw(self, sandbox: Sandbox, seconds: int) -> None:
        if not sandbox.is_in(State.PAUSED):
            raise sandbox_not_found(sandbox.sandbox_id)
        sandbox.become(State.RESUMING)
        try:
            await sandbox.guest.thaw()
        except GuestGone as error:
            raise sandbox_not_found(sandbox.sandbox_id) from error
        except BaseException:
            if sandbox.is_in(State.RESUMING):
                sandbox.become(State.PAUSED)
            raise
        if not sandbox.is_in(State.RESUMING):  # killed meanwhile
            raise sandbox_not_found(sandbox.sandbox_id)
        sandbox.become(State.RUNNING)
        sandbox.lifetime = Lifetime.begin(self._clock.read(), seconds)
        self._schedule(sandbox)
        self.counters.resumed += 1

    # --- tasks

    def _count(self) -> None:
        listed = sum(1 for _ in self)
        self.counters.observe(starting=self._starting, listed=listed, ending=len(self._sandboxes) - listed)

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end even when the caller is cancelled."""
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, ApiError):
            log.error("a change of a sandbox failed", exc_info=error)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", headers={"Should-Retry": "false"})
