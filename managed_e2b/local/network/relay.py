"""TCP out of one sandbox: each connection is accepted here, judged by where it goes, and dialled anew from the host.

A refused connection is reset. What a sandbox sees of a connection that nobody answers outside is a reset too, after it
was accepted: the decision comes after the handshake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address

from managed_e2b.local.network import outside
from managed_e2b.local.network.names import peek
from managed_e2b.local.network.policy import DEFAULT_NAMESERVER, NAME_PORTS, Policy, is_public
from managed_e2b.local.network.questions import name_asked
from managed_e2b.local.pumps import CHUNK, Streams, carry

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 512
"""At once, of one sandbox; each takes two descriptors of the server."""
MOST_LOOKUPS = 4
"""Names of one sandbox that are looked up at once: the threads that do it are few."""
QUESTION_TIMEOUT = 30.0
"""Seconds until the next question, or its answer, on a connection to a DNS server."""
PEEK_TIMEOUT = 10.0
"""Seconds that a connection on port 80 or 443 gets to say which name it is for, where that decides."""

_DNS_PORT = 53
_SO_ORIGINAL_DST = 80
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time at all


class Refused(OSError):
    """The policy does not let this connection out."""


@dataclass(frozen=True)
class Destination:
    """Where a connection was going. `name`: what it says itself, when that was asked."""

    address: IPv4Address
    port: int
    name: str | None = None


class TcpRelay:
    """`listener`: of the sandbox's way out. `policy` is asked for each connection, and so is `room`: for one more."""

    def __init__(self, listener: socket.socket, policy: Callable[[], Policy], room: Callable[[], bool]) -> None:
        self._listener = listener
        self._policy = policy
        self._room = room
        self._server: asyncio.Server | None = None
        self._lookups = asyncio.Semaphore(MOST_LOOKUPS)
        self._open: dict[asyncio.Task[None], Destination | None] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._listener, limit=CHUNK)

    def __len__(self) -> int:
        """How many connections it has."""
        return len(self._open)

    def reconsider(self) -> None:
        """End the connections that the policy, as it is now, does not permit, and those to DNS servers."""
        policy = self._policy()
        for task, target in list(self._open.items()):
            # what may be asked of a DNS server depends on the policy that a connection began with
            if target is not None and (target.port == _DNS_PORT or not _permitted(policy, target)):
                task.cancel()

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MOST_CONNECTIONS or not self._room():
            _reset(writer)
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open[task] = None
        task.add_done_callback(self._open.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._relay(reader, writer)
        except OSError as error:  # refused, unreachable, or broken off: all that a sandbox may cause
            log.debug("a connection out of a sandbox ended: %s", error)
        finally:
            _reset(writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        policy = self._policy()
        target, head = original_destination(writer.get_extra_info("socket")), b""
        if policy.names and target.port in NAME_PORTS and not policy.permits(target.address):
            async with asyncio.timeout(PEEK_TIMEOUT):
                head, name = await peek(reader)
            target = Destination(target.address, target.port, name)
            policy = self._policy()
        if not _permitted(policy, target):
            raise Refused(f"{target.address}:{target.port} is not allowed")
        task = asyncio.current_task()
        if task in self._open:
            self._open[task] = target
        there = await outside.dial(await self._addresses(policy, target), target.port)
        if target.port == _DNS_PORT and not policy.permits_question(target.address, None):
            await self._questions((reader, writer), there, target.address)
        else:
            there[1].write(head)
            await carry((reader, writer), there)

    async def _questions(self, here: Streams, there: Streams, server: IPv4Address) -> None:
        """DNS over TCP, where not everything may be asked: one question after the other. Raises OSError."""
        try:
            while True:
                async with asyncio.timeout(QUESTION_TIMEOUT):
                    question = await _message(here[0])
                    if not self._policy().permits_question(server, name_asked(question)):
                        raise Refused(f"{server} may not be asked that")
                    await _tell(there[1], question)
                    await _tell(here[1], await _message(there[0]))
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("one side of a connection to a DNS server ended") from error
        finally:
            there[1].close()

    async def _addresses(self, policy: Policy, target: Destination) -> list[str]:
        """Where to connect to for what is permitted. Raises Refused when that is the host or its network after all."""
        if target.port == _DNS_PORT and target.address == DEFAULT_NAMESERVER:
            return outside.nameservers()
        if target.name is None:
            found = [target.address]
        else:  # resolved here: the sandbox's own idea of the name's address counts for nothing
            async with self._lookups:
                found = await outside.resolve(target.name)
        fitting = [address for address in found if reachable(policy, address)]
        if not fitting:
            raise Refused(f"{target.name or target.address} is this host, or in its network")
        return [str(address) for address in fitting]


async def _message(reader: asyncio.StreamReader) -> bytes:
    """One DNS message from a stream. Raises IncompleteReadError."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))


async def _tell(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(len(message).to_bytes(2, "big") + message)
    await writer.drain()


def _permitted(policy: Policy, target: Destination) -> bool:
    if target.port == _DNS_PORT and policy.permits_dns(target.address):
        return True
    return policy.permits(target.address) or (target.name is not None and policy.permits_name(target.name))


def reachable(policy: Policy, address: IPv4Address) -> bool:
    """Whether an address may be dialled at all, by whatever rule: the host and its network only where one means it."""
    return policy.singles_out(address) or (is_public(address) and not outside.is_own(address))


def original_destination(connection: socket.socket) -> Destination:
    """Where a connection was going before its sandbox's rules led it here. Raises OSError when it came by itself."""
    port, address = struct.unpack_from("!2xH4s", connection.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16))
    return Destination(IPv4Address(address), port)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that its other end sees it was cut, unless it has ended already."""
    if not writer.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
