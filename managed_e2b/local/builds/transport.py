"""HTTP to a registry, which may send us on: to where it keeps its layers, or to who gives out its tokens.

The registry is named by whoever builds, and may be on this host or its network. Where it sends us is its own idea: from
outside it must not lead to what only this host can reach, and a rebound name no more than an address. So each
connection is judged when it is there, before anything is said on it.
"""

from __future__ import annotations

import io
import socket
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from managed_e2b.local.network import outside, policy

_LAN = tuple(IPv4Network(net) for net in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
_LAN_6 = IPv6Network("fc00::/7")
_METADATA_6 = IPv6Network("fd00:ec2::/32")  # Amazon's


class Astray(Exception):
    """A registry sent us to an address that is nearer to this host than its own."""


class TooLong(Exception):
    """An answer that is read whole has no end in sight."""


class Distance(IntEnum):
    """How near to this host an address is."""

    PUBLIC = 0
    LAN = 1
    HOST = 2


def distance(address: str) -> Distance:
    """Of a numeric address. Raises OSError when the kernel cannot be asked."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is None:
            lan = found in _LAN_6 and found not in _METADATA_6
            return Distance.LAN if lan else Distance.PUBLIC if found.is_global else Distance.HOST
        found = found.ipv4_mapped
    return _distance(found)


def _distance(address: IPv4Address) -> Distance:
    if outside.is_own(address):
        return Distance.HOST
    if policy.is_public(address):
        return Distance.PUBLIC
    return Distance.LAN if any(address in net for net in _LAN) else Distance.HOST


class _Guard:
    """Lets connections be as near as the first one, which is to the registry itself."""

    def __init__(self) -> None:
        self._nearest: Distance | None = None

    def check(self, connection: socket.socket) -> None:
        """Raises Astray, and OSError."""
        peer, own = connection.getpeername()[0], connection.getsockname()[0]
        found = Distance.HOST if peer == own else distance(peer)
        if self._nearest is None:
            self._nearest = found
        elif found > self._nearest:
            raise Astray(f"{peer} is not for who is outside")


class _Guarded:
    """Mixed into urllib3's connections."""

    guard: _Guard

    def _new_conn(self) -> socket.socket:
        connection: socket.socket = super()._new_conn()  # type: ignore[misc]  # urllib3's own
        try:
            self.guard.check(connection)
        except BaseException:
            connection.close()
            raise
        return connection


class _Adapter(HTTPAdapter):
    def __init__(self, most: int) -> None:
        self._most = most
        super().__init__()
        guard = _Guard()
        plain = type("Plain", (_Guarded, HTTPConnection), {"guard": guard})
        secured = type("Secured", (_Guarded, HTTPSConnection), {"guard": guard})
        self.poolmanager.pool_classes_by_scheme = {
            "http": type("PlainPool", (HTTPConnectionPool,), {"ConnectionCls": plain}),
            "https": type("SecuredPool", (HTTPSConnectionPool,), {"ConnectionCls": secured}),
        }

    def send(self, request: requests.PreparedRequest, stream: bool = False, *args: Any, **more: Any) -> Any:
        response = super().send(request, stream, *args, **more)
        if not stream or response.is_redirect:  # `requests` reads these whole
            try:
                body = response.raw.read(self._most + 1, decode_content=True)
            except HTTPError as error:
                raise requests.ConnectionError(error, request=request) from error
            finally:
                response.raw.close()
            if len(body) > self._most:
                raise TooLong(f"more than {self._most} bytes")
            response.raw = io.BytesIO(body)
        return response


def session(most: int) -> requests.Session:
    """For one registry. `most`: bytes of an answer that is not streamed. Where a proxy is set, it decides what is near.

    Besides what `requests` raises: Astray, TooLong.
    """
    made = requests.Session()
    adapter = _Adapter(most)
    for scheme in ("http://", "https://"):
        made.mount(scheme, adapter)
    return made
