"""DNS out of one sandbox: each query is judged by the server it is for, and passed on as it is."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from ipaddress import IPv4Address, ip_address
from typing import Any

from managed_e2b.local.network import outside
from managed_e2b.local.network.policy import DEFAULT_NAMESERVER, Policy
from managed_e2b.local.network.questions import name_asked
from managed_e2b.local.network.relay import reachable

log = logging.getLogger(__name__)

MOST_QUERIES = 32
"""At once, of one sandbox. One more is dropped: its resolver asks again."""
PATIENCE = 4.0
"""Seconds that a server gets to answer before the next one is asked."""

_PORT = 53
_LARGEST = 65535
_AT_ONCE = 64  # so that a flood leaves the loop to others
_PKTINFO = struct.Struct("=i4s4s")
_IP_PKTINFO = 8
_HEADER = 12
_SERVER_FAILURE, _REFUSED = 2, 5


class DnsRelay:
    """`sock`: the UDP socket of the sandbox's way out. For each query `policy` is asked, and `room`: for one more."""

    def __init__(self, sock: socket.socket, policy: Callable[[], Policy], room: Callable[[], bool]) -> None:
        self._sock = sock
        self._policy = policy
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._queries: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many queries wait for their answer."""
        return len(self._queries)

    def start(self) -> None:
        self._loop.add_reader(self._sock, self._readable)

    async def close(self) -> None:
        self._loop.remove_reader(self._sock)
        queries = list(self._queries)
        for query in queries:
            query.cancel()
        await asyncio.gather(*queries, return_exceptions=True)
        self._sock.close()

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                query, ancillary, _, client = self._sock.recvmsg(_LARGEST, socket.CMSG_SPACE(_PKTINFO.size))
            except BlockingIOError:
                return
            except OSError as error:  # what a sandbox's own ICMP may cause
                log.debug("a DNS query was lost: %s", error)
                return
            server = _server(ancillary)
            if server is None or len(query) < _HEADER or len(self._queries) >= MOST_QUERIES or not self._room():
                continue
            if not self._policy().permits_question(server, name_asked(query)):
                self._reply(_failure(query, _REFUSED), server, client)
                continue
            task = self._loop.create_task(self._pass_on(query, server, client))
            self._queries.add(task)
            task.add_done_callback(self._queries.discard)

    async def _pass_on(self, query: bytes, server: IPv4Address, client: Any) -> None:
        for each in self._servers(server):
            try:
                answer = await _ask(each, query)
            except OSError as error:
                log.debug("no answer from a DNS server: %s", error)
                continue
            self._reply(answer, server, client)
            return
        self._reply(_failure(query, _SERVER_FAILURE), server, client)

    def _servers(self, server: IPv4Address) -> list[str]:
        """Who is asked in the place of that server."""
        if server == DEFAULT_NAMESERVER:
            return outside.nameservers()
        try:
            return [str(server)] if reachable(self._policy(), server) else []
        except OSError as error:
            log.debug("cannot tell whether a DNS server is this host: %s", error)
            return []

    def _reply(self, answer: bytes, server: IPv4Address, client: Any) -> None:
        """Answer as that server."""
        info = (socket.SOL_IP, _IP_PKTINFO, _PKTINFO.pack(0, server.packed, bytes(4)))
        try:
            self._sock.sendmsg([answer], [info], 0, client)
        except OSError as error:  # its buffer is full, or the one who asked is gone
            log.debug("a DNS answer was lost: %s", error)


def _server(ancillary: list[tuple[int, int, bytes]]) -> IPv4Address | None:
    """Which server a datagram was for."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_IP, _IP_PKTINFO):
            return IPv4Address(_PKTINFO.unpack_from(data)[2])
    return None


def _failure(query: bytes, code: int) -> bytes:
    """The answer that says no: the query itself, marked so."""
    return query[:2] + bytes([query[2] | 0x80, query[3] & 0xF0 | code]) + query[4:]


async def _ask(server: str, query: bytes) -> bytes:
    """One query to one server. Raises OSError; TimeoutError is one."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ip_address(server.partition("%")[0]).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        async with asyncio.timeout(PATIENCE):
            await loop.sock_connect(sock, (server, _PORT))  # from now on, only that server's answers come in
            await loop.sock_sendall(sock, query)
            while True:
                answer = await loop.sock_recv(sock, _LARGEST)
                if answer[:2] == query[:2]:
                    return answer
