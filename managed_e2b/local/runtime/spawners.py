"""The spawner of a runtime, and the next one when it dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from managed_e2b.local.runtime import channel
from managed_e2b.local.runtime.base import Exit, GuestGone, RuntimeUnavailable
from managed_e2b.local.runtime.deaths import MOST, WINDOW, Deaths
from managed_e2b.local.runtime.link import SpawnerLink

_KILLED = Exit(code=None, signal=9)
_PAUSE = 1.0  # seconds before the next try to start a process where the host allowed none


class Spawners:
    """One at a time. `prepare` makes the next one ready for sandboxes; `on_death` is called the moment one dies, for
    what the next one is to do about the sandboxes that it took with it.
    """

    def __init__(
        self,
        prepare: Callable[[SpawnerLink], Awaitable[None]],
        on_death: Callable[[], Callable[[SpawnerLink], None]],
    ) -> None:
        self._prepare = prepare
        self._on_death = on_death
        self._current: SpawnerLink | None = None
        self._next: asyncio.Task[None] | None = None
        self._replaces = False
        self._deaths = Deaths()
        self._failed = asyncio.Event()
        self._reason = "the runtime is not started"
        self._exits: dict[int, asyncio.Future[Exit]] = {}

    @property
    def link(self) -> SpawnerLink:
        """The one there is, alive or not. Raises RuntimeUnavailable when there will be none."""
        if self._current is None or self._failed.is_set():
            raise RuntimeUnavailable(self._reason)
        return self._current

    async def living(self) -> SpawnerLink:
        """Wait for the next one while it is being started. Raises RuntimeUnavailable."""
        if self._next is not None:
            await asyncio.wait([self._next])
            self._next.result()
        return self.link

    async def start(self) -> SpawnerLink:
        """The first one, unprepared; it is not replaced before `replace_from_now_on`. Raises OSError."""
        self._current = await SpawnerLink.start(self._on_event, self._on_end)
        return self._current

    def replace_from_now_on(self) -> None:
        self._replaces = True

    def expect_exit(self, job: int) -> asyncio.Future[Exit]:
        """How the command of that spawn request ends, once it has."""
        future: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._exits[job] = future
        future.add_done_callback(lambda _: self._exits.pop(job, None))
        return future

    def _on_event(self, message: channel.Message) -> None:
        future = self._exits.get(message.get("job", 0))
        if message["event"] == "exit" and future is not None and not future.done():
            future.set_result(Exit(message["code"], message["signal"]))

    def _on_end(self) -> None:
        """Every sandbox dies with its spawner, and every process in them."""
        for future in list(self._exits.values()):
            if not future.done():
                future.set_result(_KILLED)
        if self._replaces and (self._next is None or self._next.done()):
            self._next = asyncio.create_task(self._replace(self._on_death()))

    async def _replace(self, first: Callable[[SpawnerLink], None]) -> None:
        why = "it was killed"
        while self._deaths.add(time.monotonic()):
            try:
                spawner = await self._start_prepared()
            except GuestGone:
                continue  # it died as well
            except OSError as error:
                why = error.strerror or str(error)
                await asyncio.sleep(_PAUSE)
                continue
            except RuntimeUnavailable as error:
                self._give_up(str(error))
                return
            old, self._current = self._current, spawner
            if old is not None:
                await old.close()
            if not spawner.link.closed:
                first(spawner)
                return
        self._give_up(f"the process that makes sandboxes died more than {MOST} times within {WINDOW:g} s: {why}")

    async def _start_prepared(self) -> SpawnerLink:
        spawner = await SpawnerLink.start(self._on_event, self._on_end)
        try:
            await self._prepare(spawner)
        except BaseException:
            await spawner.close()
            raise
        return spawner

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._failed.set()

    async def failed(self) -> RuntimeUnavailable:
        """Return once there will be none any more, with the reason."""
        await self._failed.wait()
        return RuntimeUnavailable(self._reason)

    async def settled(self) -> None:
        """Wait until none is being started."""
        if self._next is not None:
            await asyncio.wait([self._next])

    def retire(self) -> SpawnerLink | None:
        """The last one, for the caller to close: there will be no other. May be called again."""
        self._replaces = False
        spawner, self._current = self._current, None
        return spawner
