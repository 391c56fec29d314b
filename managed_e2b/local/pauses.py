"""Pause and resume.

A *full* pause stops the processes and keeps them, with their memory. A *filesystem* pause keeps the files as an image
and ends the processes; its resume is a boot of a new guest from that image, under the same id and tokens. What is
paused fully can be resumed so as well, with what is in its memory given up.

All of it happens one at a time for each sandbox (`Sandbox.transition`); a kill may come in between at any `await`.
"""

from __future__ import annotations

import contextlib
import logging

from managed_e2b.local.boots import Boots
from managed_e2b.local.clock import Clock
from managed_e2b.local.copies import Copies
from managed_e2b.local.counters import Counters
from managed_e2b.local.errors import ApiError, sandbox_not_found
from managed_e2b.local.expiry import Timetable
from managed_e2b.local.lifetime import Lifetime
from managed_e2b.local.model import Sandbox, State
from managed_e2b.local.runtime.base import GuestGone
from managed_e2b.local.tasks import Tasks

log = logging.getLogger(__name__)

RETRY_DELAY = 1.0
"""Seconds until a pause at the end of the time that failed is tried again."""
REFUSED_DELAY = 10.0
"""The same, when it was refused for a reason that will last a while: no space."""


def stream_cut(sandbox_id: str) -> str:
    """What open streams of a sandbox end with when it is killed or paused: upstream's wording."""
    return f"the connection to sandbox {sandbox_id} ended before the stream completed"


class Pauses:
    """Changes between running and paused. Methods raise ApiError(404) for a sandbox that is killed meanwhile."""

    def __init__(
        self, boots: Boots, copies: Copies, timetable: Timetable, clock: Clock, tasks: Tasks, counters: Counters
    ) -> None:
        self._boots = boots
        self._copies = copies
        self._timetable = timetable
        self._clock = clock
        self._tasks = tasks
        self._counters = counters

    # --- pause

    async def pause(self, sandbox: Sandbox, *, memory: bool) -> None:
        """Raises ApiError: 409 when it is paused already, and those of `Copies.commit`; it runs on then."""
        async with sandbox.transition:
            if sandbox.is_in(State.PAUSED):
                raise ApiError(409, f"Error pausing sandbox - sandbox '{sandbox.sandbox_id}' is already paused")
            await self._suspend(sandbox, memory=memory)

    async def pause_expired(self, sandbox: Sandbox) -> None:
        """At the end of its time, as it was made to be paused then."""
        async with sandbox.transition:
            # connect or set_timeout may have moved the end while this waited its turn
            if not sandbox.is_in(State.RUNNING) or not sandbox.lifetime.over(self._clock.read()):
                return
            try:
                await self._suspend(sandbox, memory=sandbox.spec.auto_pause_memory)
            except ApiError as error:
                log.warning("sandbox %s is not paused at its end: %s", sandbox.sandbox_id, error.message)
                raise

    async def _suspend(self, sandbox: Sandbox, *, memory: bool) -> None:
        if not sandbox.is_in(State.RUNNING):
            raise sandbox_not_found(sandbox.sandbox_id)
        sandbox.become(State.PAUSING)
        self._timetable.discard(sandbox.sandbox_id)
        try:
            if memory:
                await sandbox.envd.abort(stream_cut(sandbox.sandbox_id))
                await sandbox.guest.freeze()
            else:
                await sandbox.guest.freeze()
                await self._put_away(sandbox)
        except GuestGone as error:
            raise sandbox_not_found(sandbox.sandbox_id) from error
        except BaseException as error:
            if sandbox.is_in(State.PAUSING):
                await self._stay(sandbox, REFUSED_DELAY if isinstance(error, ApiError) else RETRY_DELAY)
            raise
        if not sandbox.is_in(State.PAUSING):
            raise sandbox_not_found(sandbox.sandbox_id)
        self._paused(sandbox)

    def _paused(self, sandbox: Sandbox) -> None:
        sandbox.become(State.PAUSED)
        sandbox.lifetime = sandbox.lifetime.stopped(self._clock.read())
        self._counters.paused += 1
        sandbox.logbook.add("sandbox", "Sandbox paused", mode=sandbox.pause_mode)

    async def _stay(self, sandbox: Sandbox, delay: float) -> None:
        """It could not be paused: it runs on, unless its files are safe and its processes dead already."""
        if sandbox.kept is not None:
            self._paused(sandbox)
            return
        with contextlib.suppress(GuestGone):
            await sandbox.guest.thaw()
        if sandbox.is_in(State.PAUSING):
            sandbox.become(State.RUNNING)
            soonest = self._clock.read().monotonic + delay
            self._timetable.set(sandbox.sandbox_id, max(sandbox.lifetime.end.monotonic, soonest))

    async def _put_away(self, sandbox: Sandbox) -> None:
        """Keep the files of a guest that stands still, and end it. Its streams end only once the files are safe."""
        guest = sandbox.guest
        image = await self._copies.commit(sandbox)
        sandbox.kept = image  # from here on its death is no accident
        try:
            await sandbox.envd.abort(stream_cut(sandbox.sandbox_id))
            await guest.kill()
        except BaseException:
            if not guest.dead.is_set() and sandbox.kept is not None:
                sandbox.kept = None
                await self._copies.drop(image)
            raise

    # --- resume

    async def connect(self, sandbox: Sandbox, seconds: int, *, memory: bool) -> bool:
        """Let it run for `seconds` more at least; resume it when it is paused, and say so with True.

        A resume is a new start: the old end is forgotten. `memory` False: what is paused boots anew from its files.
        """
        async with sandbox.transition:
            if sandbox.is_in(State.RUNNING):
                self.extend(sandbox, seconds)
                return False
            await self._resume(sandbox, seconds, memory=memory)
            return True

    async def wake(self, sandbox: Sandbox) -> None:
        """Resume it because there is traffic for it; it lives for as long as it was made to.

        Raises ApiError(404) for what only an explicit request may wake: a boot would lose what was in memory.
        """
        async with sandbox.transition:
            if sandbox.is_in(State.RUNNING):
                return  # somebody else's request woke it
            if sandbox.kept is not None or not sandbox.spec.auto_resume:
                raise sandbox_not_found(sandbox.sandbox_id)
            await self._resume(sandbox, sandbox.spec.timeout, memory=True)

    def extend(self, sandbox: Sandbox, seconds: int) -> None:
        sandbox.lifetime = sandbox.lifetime.extend(self._clock.read(), seconds)
        self._timetable.set(sandbox.sandbox_id, sandbox.lifetime.end.monotonic)

    async def _resume(self, sandbox: Sandbox, seconds: int, *, memory: bool) -> None:
        if not sandbox.is_in(State.PAUSED):
            raise sandbox_not_found(sandbox.sandbox_id)
        sandbox.become(State.RESUMING)
        mode = sandbox.pause_mode
        try:
            if not memory and sandbox.kept is None:
                mode = "filesystem"
                await self._put_away(sandbox)
            if sandbox.kept is None:
                await sandbox.guest.thaw()
            elif sandbox.is_in(State.RESUMING):
                await self._boot(sandbox, sandbox.kept)
        except GuestGone as error:
            raise sandbox_not_found(sandbox.sandbox_id) from error
        except BaseException:
            if sandbox.is_in(State.RESUMING):
                sandbox.become(State.PAUSED)
            raise
        if not sandbox.is_in(State.RESUMING):
            raise sandbox_not_found(sandbox.sandbox_id)
        sandbox.become(State.RUNNING)
        sandbox.lifetime = Lifetime.begin(self._clock.read(), seconds)
        self._timetable.set(sandbox.sandbox_id, sandbox.lifetime.end.monotonic)
        self._counters.resumed += 1
        sandbox.logbook.add("sandbox", "Sandbox resumed", mode=mode)

    async def _boot(self, sandbox: Sandbox, image: str) -> None:
        sandbox.booting = self._tasks.start(self._boots.anew(sandbox, image))
        try:
            await sandbox.booting
        finally:
            sandbox.booting = None
        if sandbox.is_in(State.RESUMING):
            await self._boots.come_up(sandbox)
