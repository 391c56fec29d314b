"""The host's side of a way out: its resolver, its own addresses, and connections made from it."""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, ip_address
from pathlib import Path

from managed_e2b.local.pumps import Streams

DIAL_TIMEOUT = 30.0
"""Seconds for a connection to come to be, however many addresses are tried."""

_RESOLVERS = ThreadPoolExecutor(32, "me2b-resolver")  # of their own: who answers late must not stop all else
_RESOLV_CONF = Path("/etc/resolv.conf")

# rtnetlink(7): struct nlmsghdr, struct rtmsg, and what is used of their constants
_HEADER = struct.Struct("=IHHII")
_ROUTE_MESSAGE = struct.Struct("=BBBBBBBBI")
_ROUTES = 0
_REQUEST, _NEW_ROUTE, _GET_ROUTE = 1, 24, 26
_TO = 1
_UNICAST = 1
_LARGEST_ANSWER = 8192


def is_own(address: IPv4Address) -> bool:
    """Whether the host itself has that address: services that listen on all of them are not meant for sandboxes.

    The kernel is asked where it would send to. It takes for its own more than what interfaces list: a second address of
    a network, all of a network on its loopback, what a `local` route says. Raises OSError when it cannot be asked.
    """
    head = _ROUTE_MESSAGE.pack(socket.AF_INET, 32, 0, 0, 0, 0, 0, 0, 0)
    body = head + struct.pack("=HH", 8, _TO) + address.packed
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _ROUTES) as kernel:
        kernel.bind((0, 0))
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _GET_ROUTE, _REQUEST, 0, 0) + body)
        answer = kernel.recv(_LARGEST_ANSWER)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _NEW_ROUTE:
        return False  # no way there at all
    *_, route, _ = _ROUTE_MESSAGE.unpack_from(answer, _HEADER.size)
    return bool(route != _UNICAST)


def nameservers(path: Path = _RESOLV_CONF) -> list[str]:
    """The host's own, as the C library would ask them."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = [words[1] for words in map(str.split, lines) if len(words) > 1 and words[0] == "nameserver"]
    return [server for server in found if _is_address(server)] or ["127.0.0.1"]


def _is_address(text: str) -> bool:
    try:
        ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


async def resolve(name: str) -> list[IPv4Address]:
    """The IPv4 addresses of a name. Raises OSError."""
    ask = functools.partial(socket.getaddrinfo, name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, ask)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "no name of a host") from error
    return [IPv4Address(entry[4][0]) for entry in found]


async def dial(addresses: Sequence[str], port: int) -> Streams:
    """A connection to the first of them that answers. Raises OSError; TimeoutError is one."""
    refused: OSError = ConnectionRefusedError("nowhere to connect to")
    async with asyncio.timeout(DIAL_TIMEOUT):
        for address in addresses:
            try:
                return await asyncio.open_connection(address, port)
            except OSError as error:
                refused = error
    raise refused
