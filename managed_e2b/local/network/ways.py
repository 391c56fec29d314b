"""The ways out of all sandboxes: each is opened when its sandbox starts, and closed when that is dead."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from managed_e2b.local.connections import most_connections
from managed_e2b.local.errors import not_built
from managed_e2b.local.network.dns import DnsRelay
from managed_e2b.local.network.policy import Policy
from managed_e2b.local.network.relay import TcpRelay
from managed_e2b.local.runtime.base import Guest, GuestError, GuestGone
from managed_e2b.local.tasks import Tasks

log = logging.getLogger(__name__)


class Ways:
    """`closed`: why there shall be none, when so; else found out when the first one is to be opened."""

    def __init__(self, tasks: Tasks, closed: str | None = None) -> None:
        self._tasks = tasks
        self._closed = closed
        self._ways: dict[str, _Way] = {}

    async def open(self, guest: Guest, policy: Policy) -> None:
        """Open a sandbox's way out, under that policy, before anything runs in there.

        Where the host offers none the sandbox simply has none. Raises ApiError(501) when the policy asks for one all
        the same.
        """
        if self._closed is None:
            try:
                stream, datagrams = await guest.way_out()
            except GuestGone:
                return  # whoever uses it next will see
            except GuestError as error:
                self._closed = f"this host gives sandboxes no way out ({error.message})"
                log.warning("sandboxes reach nothing outside: %s", error.message)
            else:
                way = _Way(socket.socket(fileno=stream), socket.socket(fileno=datagrams), policy, self._room)
                await way.start()
                self._ways[guest.sandbox_id] = way
                self._tasks.start(self._close_after(guest, way))
                return
        self.check(policy)

    def check(self, policy: Policy) -> None:
        """Raises ApiError(501) when the policy asks for what no sandbox has."""
        if self._closed is not None and policy.asks_for_a_way_out:
            raise not_built(f"Internet access (network.allowOut): {self._closed}. It")

    def change(self, sandbox_id: str, policy: Policy) -> None:
        """Put another policy in force; connections that it does not permit end."""
        way = self._ways.get(sandbox_id)
        if way is not None:
            way.change(policy)

    def _room(self) -> bool:
        """Whether there are descriptors for one more: all sandboxes together get a quarter of them."""
        return 4 * sum(map(len, self._ways.values())) < most_connections()

    async def _close_after(self, guest: Guest, way: _Way) -> None:
        try:
            await guest.dead.wait()
        finally:
            if self._ways.get(guest.sandbox_id) is way:
                del self._ways[guest.sandbox_id]
            await way.close()


class _Way:
    def __init__(
        self, stream: socket.socket, datagrams: socket.socket, policy: Policy, room: Callable[[], bool]
    ) -> None:
        self._policy = policy
        self._tcp = TcpRelay(stream, lambda: self._policy, room)
        self._dns = DnsRelay(datagrams, lambda: self._policy, room)

    def __len__(self) -> int:
        """How many connections and queries it carries."""
        return len(self._tcp) + len(self._dns)

    async def start(self) -> None:
        await self._tcp.start()
        self._dns.start()

    def change(self, policy: Policy) -> None:
        self._policy = policy
        self._tcp.reconsider()

    async def close(self) -> None:
        await asyncio.gather(self._tcp.close(), self._dns.close())
