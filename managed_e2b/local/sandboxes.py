"""The registry: the truth about which sandboxes exist, and the only place that changes it.

Everything happens on one event loop, so a decision made without an `await` in it is atomic; what needs several
steps is serialised per sandbox (`Sandbox.transition`), never across sandboxes. The rules are elsewhere and pure:
`lifetime` (timeouts), `listing` (filters, order, pages), `model` (states), `expiry` (deadlines). So are the longer
stories: `boots` (how a guest is made), `pauses`, `copies`, `history` (samples), `tasks` (effects outlive who asked).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from managed_e2b.local import history, starting
from managed_e2b.local.boots import Boots
from managed_e2b.local.clock import Clock, SystemClock
from managed_e2b.local.copies import Copies
from managed_e2b.local.counters import Counters
from managed_e2b.local.errors import ApiError, sandbox_not_found
from managed_e2b.local.expiry import Timetable
from managed_e2b.local.history import History, Sampler, Subject
from managed_e2b.local.lifetime import Lifetime
from managed_e2b.local.logbook import Logbook
from managed_e2b.local.model import EnvdFactory, Sandbox, SandboxSpec, State, new_sandbox_id, new_token
from managed_e2b.local.network.policy import Policy
from managed_e2b.local.network.ways import Ways
from managed_e2b.local.pauses import Pauses, stream_cut
from managed_e2b.local.runtime.base import Guest, Runtime
from managed_e2b.local.sizes import Asked, Size, Sizes
from managed_e2b.local.tasks import Tasks

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_DELAY = 1.0
"""Seconds until a kill that failed is tried again."""

CLOSE_TIMEOUT = 10.0
"""Seconds that `close` waits for creates and kills; the runtime's own end takes the rest with it."""


KEPT_LOGBOOKS = 32
"""Of how many sandboxes that are gone the lines can still be read."""


class SandboxRegistry:
    """Creates, finds, pauses, resumes and kills sandboxes of one runtime, and ends them when their time is over.

    By-id methods raise ApiError(404) for a sandbox that does not exist. One that is being killed does not exist for
    lists, and for by-id methods only once it is really gone: they wait for that, so that their 404 proves it.
    """

    def __init__(
        self,
        runtime: Runtime,
        envd: EnvdFactory,
        *,
        clock: Clock | None = None,
        no_way_out: str | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        """`no_way_out`: why sandboxes shall reach nothing outside, when so. `sizes`: what a sandbox gets."""
        self._clock = clock or SystemClock()
        self._sandboxes: dict[str, Sandbox] = {}
        self._past: OrderedDict[str, Logbook] = OrderedDict()
        self._starting = 0
        self._creates: set[asyncio.Task[Any]] = set()
        self._closing = False
        self.on_made: Callable[[], object] = lambda: None
        """Called when a sandbox is made, within the context of who asked for it, before anything else happens."""
        self.counters = Counters()
        self._tasks = Tasks()
        self._timetable = Timetable(self._clock, self.expire_due)
        self._ways = Ways(self._tasks, no_way_out)
        self._boots = Boots(runtime, envd, self._ways, self._tasks, sizes or Sizes(), self._on_death)
        self._copies = Copies(runtime, self.counters)
        self._pauses = Pauses(self._boots, self._copies, self._timetable, self._clock, self._tasks, self.counters)
        self._sampler = Sampler(self._subjects, self._clock)
        self._sampling: asyncio.Task[None] | None = None

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

    def logbook(self, sandbox_id: str) -> Logbook:
        """What happened in a sandbox; also of one that is gone, while that is not long ago. Raises ApiError(404)."""
        sandbox = self._sandboxes.get(sandbox_id)
        logbook = self._past.get(sandbox_id) if sandbox is None else sandbox.logbook
        if logbook is None:
            raise sandbox_not_found(sandbox_id)
        return logbook

    def size(self, asked: Asked) -> Size:
        """What a sandbox can use here for which this is asked."""
        return self._boots.size(asked.cpu_count, asked.memory_mb)

    # --- create

    async def workshop(self, image: str) -> Guest:
        """A guest for a build, of no sandbox: the caller kills it. It reaches what sandboxes reach.

        Raises ApiError: 404 for an unknown image, 503 when the runtime can make none.
        """
        spec = SandboxSpec(template_id=image, alias=None, timeout=0, image=image)
        return await self._boots.guest("b" + new_sandbox_id()[1:], spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox, running. Raises ApiError: 404 for a template the runtime lacks, 503 when it can make none."""
        if self._closing:
            raise _shutting_down()
        task = self._tasks.start(self._create(spec))
        self._creates.add(task)
        task.add_done_callback(self._creates.discard)
        return await asyncio.shield(task)

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        try:
            sandbox_id = new_sandbox_id()
            guest = await self._boot(sandbox_id, spec)
            try:
                started = await self._boots.bring_up(guest, spec)
                if self._closing:
                    raise _shutting_down()
                sandbox = self._admit(sandbox_id, spec, guest)
                starting.tell_end(started, sandbox.logbook)
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
            return await self._boots.guest(sandbox_id, spec)
        finally:
            self._starting -= 1

    def _admit(self, sandbox_id: str, spec: SandboxSpec, guest: Guest) -> Sandbox:
        token = new_token() if spec.secure else None
        logbook = Logbook(self._clock)
        sandbox = Sandbox(
            sandbox_id=sandbox_id,
            spec=spec,
            access_token=token,
            traffic_token=None if spec.public_traffic else new_token(),
            guest=guest,
            envd=self._boots.envd(spec, guest, token, logbook),
            lifetime=Lifetime.begin(self._clock.read(), spec.timeout),
            size=self.size(spec),
            logbook=logbook,
        )
        self._sandboxes[sandbox_id] = sandbox
        self.on_made()
        self._timetable.set(sandbox_id, sandbox.lifetime.end.monotonic)
        self._boots.watch(sandbox)
        self._sample()
        logbook.add("sandbox", "Sandbox created", template=spec.template_id, timeout=spec.timeout)
        return sandbox

    def _on_death(self, sandbox: Sandbox, guest: Guest) -> None:
        if sandbox.guest is not guest or sandbox.kept is not None:
            return  # it was put away: its files are kept, and may run again already
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
        self._timetable.discard(sandbox.sandbox_id)
        self._count()
        sandbox.logbook.add("sandbox", "Sandbox ends", reason=reason)
        sandbox.ending = self._tasks.start(self._end(sandbox, before, reason))
        return sandbox.ending

    async def _end(self, sandbox: Sandbox, before: State, reason: str) -> None:
        try:
            try:
                # before its processes die: a stream must not see the death of its command as a normal end
                await sandbox.envd.abort(stream_cut(sandbox.sandbox_id))
            finally:
                if sandbox.booting is not None:
                    await asyncio.wait([sandbox.booting])
                await sandbox.guest.kill()
            if sandbox.kept is not None:
                image, sandbox.kept = sandbox.kept, None
                await self._copies.drop(image)
        except BaseException:
            # not proven dead: it is listed again, and ending it is tried again whether or not anybody asks
            self.counters.kill_failed += 1
            sandbox.ending = None
            paused = sandbox.kept is not None or before in (State.PAUSED, State.RESUMING)
            sandbox.become(State.PAUSED if paused else State.RUNNING)
            self._count()
            asyncio.get_running_loop().call_later(RETRY_DELAY, self._end_again, sandbox, reason)
            raise
        del self._sandboxes[sandbox.sandbox_id]
        self._past[sandbox.sandbox_id] = sandbox.logbook
        if len(self._past) > KEPT_LOGBOOKS:
            self._past.popitem(last=False)
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
        self._timetable.stop()
        endings = {sandbox.ending for sandbox in self._sandboxes.values() if sandbox.ending is not None}
        if unfinished := endings | self._creates:
            await asyncio.wait(unfinished, timeout=CLOSE_TIMEOUT)
        await self._tasks.cancel()

    # --- time

    async def set_timeout(self, sandbox_id: str, seconds: int) -> None:
        """It ends in `seconds` from now; 0 or less: now. Raises ApiError: 404 also when paused, 409 in between."""
        sandbox = await self.get(sandbox_id)
        if sandbox.state is State.PAUSED:
            raise sandbox_not_found(sandbox_id)
        if sandbox.state is not State.RUNNING:
            raise ApiError(409, f'Sandbox "{sandbox_id}" is {sandbox.state}')
        sandbox.lifetime = sandbox.lifetime.reset(self._clock.read(), seconds)
        self._timetable.set(sandbox_id, sandbox.lifetime.end.monotonic)
        self.expire_due()  # a zero has its effect before the answer

    async def refresh(self, sandbox_id: str, seconds: int) -> None:
        """It ends in `seconds` from now at the earliest. Raises ApiError(404), also when it is paused."""
        sandbox = await self.get(sandbox_id)
        if sandbox.state is not State.RUNNING:
            raise sandbox_not_found(sandbox_id)
        self._pauses.extend(sandbox, seconds)

    def expire_due(self) -> None:
        """Begin to end, or to pause, what has come to its time. The alarm calls this."""
        for sandbox_id in self._timetable.due():
            sandbox = self.find(sandbox_id)
            if sandbox is None or sandbox.state is not State.RUNNING:
                continue
            if sandbox.spec.auto_pause:
                self._tasks.start(self._pauses.pause_expired(sandbox))
            else:
                self._begin_end(sandbox, "expired")
        self._timetable.rearm()

    # --- network

    async def update_network(
        self,
        sandbox_id: str,
        *,
        egress: Policy,
        network: Mapping[str, Any],
        allow_internet_access: bool | None,
    ) -> None:
        """Change what it may reach, from now on and when it runs again. `network`: what is told of it.

        Raises ApiError: 404, and 501 when it shall reach what no sandbox here reaches.
        """
        sandbox = await self.get(sandbox_id)
        self._ways.check(egress)
        sandbox.spec = replace(
            sandbox.spec, egress=egress, network=network, allow_internet_access=allow_internet_access
        )
        self._ways.change(sandbox_id, egress)

    # --- pause, resume, copies: see `pauses` and `copies`

    async def pause(self, sandbox_id: str, *, memory: bool = True) -> None:
        """Stop its processes and keep its memory, or (`memory` False) keep its files and end them.

        Raises ApiError: 404, 409 when it is paused already, and what keeps its files from being kept.
        """
        await self._tasks.finish(self._pauses.pause(await self.get(sandbox_id), memory=memory))

    async def connect(self, sandbox_id: str, seconds: int, *, memory: bool = True) -> tuple[Sandbox, bool]:
        """Let it run for `seconds` more at least; resume it when it is paused, and say so with True.

        A resume is a new start: the old end is forgotten. `memory` False: what is paused boots anew from its files.
        """
        sandbox = await self.get(sandbox_id)
        resumed = await self._tasks.finish(self._pauses.connect(sandbox, seconds, memory=memory))
        self._sample()
        return sandbox, resumed

    async def wake(self, sandbox: Sandbox) -> None:
        """Resume it for traffic. Raises ApiError(404) when it may not be woken by that."""
        await self._tasks.finish(self._pauses.wake(sandbox))
        self._sample()

    async def fork(self, sandbox_id: str, seconds: int, count: int) -> list[Sandbox | ApiError]:
        """`count` new sandboxes with copies of its files, which live for `seconds`; for each that failed its error.

        Raises ApiError before any is made: 404, 409 when it is paused, and what keeps its files from being copied.
        """
        sandbox = await self.get(sandbox_id)
        made = await self._tasks.finish(self._copies.fork(sandbox, seconds, count, self.create))
        sandbox.logbook.add("sandbox", "Sandbox forked", count=count)
        return made

    async def commit(self, sandbox_id: str, keep: Callable[[Sandbox, str], T]) -> T:
        """Copy its files into a new image, and hand that to `keep`, which owns it unless it raises.

        Raises ApiError, as `fork`, and what `keep` raises.
        """
        return await self._tasks.finish(self._commit(await self.get(sandbox_id), keep))

    async def _commit(self, sandbox: Sandbox, keep: Callable[[Sandbox, str], T]) -> T:
        image = await self._copies.snapshot(sandbox)
        try:
            kept = keep(sandbox, image)
        except BaseException:
            await self._copies.drop(image)
            raise
        sandbox.logbook.add("sandbox", "Sandbox snapshotted")
        return kept

    async def drop(self, image: str) -> None:
        """Forget an image that `commit` made. Who is made of it keeps its files."""
        await self._copies.drop(image)

    # --- samples

    def _sample(self) -> None:
        if self._sampling is None and not self._closing:
            self._sampling = self._tasks.start(self._sampler.run())
        self._sampler.wake()

    def _subjects(self) -> Iterator[Subject]:
        return (Subject(box.guest, box.history) for box in self._sandboxes.values() if box.state is State.RUNNING)

    async def history(self, sandbox: Sandbox) -> History:
        """What it used, a sample of this second included while it runs and the newest one is not new enough."""
        last, now = sandbox.history.last, self._clock.read().wall
        stale = last is None or (now - last.at).total_seconds() >= history.INTERVAL
        if stale and sandbox.is_in(State.RUNNING):
            await history.sample(Subject(sandbox.guest, sandbox.history), self._clock)
        return sandbox.history

    def _count(self) -> None:
        listed = sum(1 for _ in self)
        self.counters.observe(starting=self._starting, listed=listed, ending=len(self._sandboxes) - listed)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", headers={"Should-Retry": "false"})
