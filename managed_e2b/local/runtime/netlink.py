"""The way out of a sandbox's network namespace: made from within, by netlink, by its agent.

A sandbox has no interface but its loopback, so nothing can leave by itself, whatever its root may do. Here every
address is made local to the namespace ("AnyIP"), and a DNAT rule leads each TCP connection to elsewhere, and each DNS
query, to a port on which the *server* listens. It accepts, learns where the connection was going, and decides
(`managed_e2b.local.network`). Everything else (other UDP, ICMP) is dropped: it would only come back.

In the notation of nft, with PORT for that port:

    table ip me2b {
      chain nat  { type nat hook output priority -100; policy accept;
        ip daddr 127.0.0.0/8 accept;  meta l4proto tcp dnat to :PORT;  udp dport 53 dnat to :PORT }
      chain leave { type filter hook output priority 0; policy drop;
        ip daddr 127.0.0.0/8 accept;  meta l4proto tcp accept;  udp dport PORT accept }
    }

Only who has CAP_NET_ADMIN over the namespace can change that: a sandbox's root does not. Standard library only.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

PORT = 64005
"""Taken in every sandbox that has a way out: nothing in there can listen on it."""

_DNS = 53
_BACKLOG = 256
_IP_PKTINFO = 8

_ROUTE, _NETFILTER = 0, 12
_REQUEST, _ACK, _CREATE, _APPEND = 0x1, 0x4, 0x400, 0x800
_ERROR = 2
_NEWROUTE = 24
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NFTABLES = 10
_NEWTABLE, _NEWCHAIN, _NEWRULE = (_NFTABLES << 8 | number for number in (0, 3, 6))
_IPV4 = 2
_HOOK_OUTPUT = 3
_DROP, _ACCEPT = 0, 1
_TABLE = b"me2b\0"


def open_way_out() -> tuple[None, list[int]]:
    """Make it, in the namespace that we are in; its listening TCP socket and its UDP socket. Raises OSError.

    The UDP socket tells with each datagram which server it was for (IP_PKTINFO).
    """
    stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    with stream, datagrams:
        datagrams.setsockopt(socket.SOL_IP, _IP_PKTINFO, 1)
        for sock in (stream, datagrams):
            sock.bind(("0.0.0.0", PORT))
        stream.listen(_BACKLOG)
        _send(_NETFILTER, firewall())
        _send(_ROUTE, [every_address_is_local()])
        return None, [stream.detach(), datagrams.detach()]


def every_address_is_local() -> bytes:
    """`ip route add local default dev lo src 127.0.0.1`"""
    table_local, static, scope_host, kind_local = 255, 4, 254, 2
    head = struct.pack("=BBBBBBBBI", _IPV4, 0, 0, 0, table_local, static, scope_host, kind_local, 0)
    interface = _attribute(4, struct.pack("=I", socket.if_nametoindex("lo")))
    return _message(_NEWROUTE, _CREATE, head + interface + _attribute(7, socket.inet_aton("127.0.0.1")))


def firewall() -> list[bytes]:
    """The messages of one transaction of nf_tables: the table above."""
    to_itself = _load(1, 16, 1) + _compare(b"\x7f")
    tcp, udp = (_load_protocol() + _compare(bytes([number])) for number in (socket.IPPROTO_TCP, socket.IPPROTO_UDP))
    redirect = _immediate(_nested(2, _attribute(1, struct.pack(">H", PORT)))) + _dnat()
    accept = _verdict(_ACCEPT)
    return [
        _nft(_BATCH_BEGIN, b"", batch=True),
        _nft(_NEWTABLE, _attribute(1, _TABLE)),
        _chain(b"nat\0", b"nat\0", -100, _ACCEPT),
        _rule(b"nat\0", to_itself + accept),
        _rule(b"nat\0", tcp + redirect),
        _rule(b"nat\0", udp + _to_port(_DNS) + redirect),
        _chain(b"leave\0", b"filter\0", 0, _DROP),
        _rule(b"leave\0", to_itself + accept),
        _rule(b"leave\0", tcp + accept),
        _rule(b"leave\0", udp + _to_port(PORT) + accept),
        _nft(_BATCH_END, b"", batch=True),
    ]


def _chain(name: bytes, kind: bytes, priority: int, policy: int) -> bytes:
    hook = _attribute(1, struct.pack(">I", _HOOK_OUTPUT)) + _attribute(2, struct.pack(">i", priority))
    return _nft(
        _NEWCHAIN,
        _attribute(1, _TABLE)
        + _attribute(3, name)
        + _nested(4, hook)
        + _attribute(5, struct.pack(">I", policy))
        + _attribute(7, kind),
    )


def _rule(chain: bytes, expressions: bytes) -> bytes:
    return _nft(_NEWRULE, _attribute(1, _TABLE) + _attribute(2, chain) + _nested(4, expressions), _APPEND)


# Expressions: what they load goes to register 1, and from there.


def _expression(name: bytes, *attributes: bytes) -> bytes:
    return _nested(1, _attribute(1, name + b"\0") + _nested(2, b"".join(attributes)))


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _load(base: int, offset: int, length: int) -> bytes:
    """From the network header (`base` 1) or the transport header (2)."""
    return _expression(b"payload", _number(1, 1), _number(2, base), _number(3, offset), _number(4, length))


def _load_protocol() -> bytes:
    return _expression(b"meta", _number(1, 1), _number(2, 16))


def _compare(value: bytes) -> bytes:
    return _expression(b"cmp", _number(1, 1), _number(2, 0), _nested(3, _attribute(1, value)))


def _to_port(port: int) -> bytes:
    return _load(2, 2, 2) + _compare(struct.pack(">H", port))


def _immediate(data: bytes) -> bytes:
    return _expression(b"immediate", _number(1, 1), data)


def _verdict(code: int) -> bytes:
    return _expression(b"immediate", _number(1, 0), _nested(2, _nested(2, _number(1, code))))


def _dnat() -> bytes:
    """To the port in register 1, and the same address."""
    return _expression(b"nat", _number(1, 1), _number(2, _IPV4), _number(5, 1))


# Netlink itself.


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", len(value) + 4, kind) + value + bytes(-len(value) % 4)


def _nested(kind: int, value: bytes) -> bytes:
    return _attribute(kind | 0x8000, value)


def _nft(kind: int, attributes: bytes, flags: int = 0, *, batch: bool = False) -> bytes:
    head = struct.pack(">BBH", 0 if batch else _IPV4, 0, _NFTABLES if batch else 0)
    return _message(kind, flags if batch else flags | _CREATE, head + attributes, acknowledge=not batch)


def _message(kind: int, flags: int, body: bytes, *, acknowledge: bool = True) -> bytes:
    flags |= _REQUEST | (_ACK if acknowledge else 0)
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body


def _send(protocol: int, messages: Sequence[bytes]) -> None:
    """Send them at once, and wait until each is acknowledged. Raises OSError as the first that was refused."""
    wanted = sum(1 for message in messages if struct.unpack_from("=H", message, 6)[0] & _ACK)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol) as link:
        link.bind((0, 0))
        link.send(b"".join(messages))
        while wanted > 0:
            answer = link.recv(65536)
            while len(answer) >= 20:
                length, kind = struct.unpack_from("=IH", answer)
                (number,) = struct.unpack_from("=i", answer, 16)
                if kind == _ERROR and number:
                    raise OSError(-number, f"netlink: {os.strerror(-number)}")
                wanted -= 1
                answer = answer[(length + 3) & ~3 :]
