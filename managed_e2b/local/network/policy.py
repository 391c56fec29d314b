"""Which addresses and names a sandbox may reach. Pure: the rules of `allowOut`, `denyOut` and `dnsServers`.

As upstream has them: what is allowed wins over what is denied, what is neither is allowed, and names can be allowed
only where everything else is denied. Names count on the ports where a connection tells one: 80 and 443.

Private, loopback and link-local addresses (the host, its network, a cloud's metadata) are denied from the start. They
are reachable where an entry of `allowOut` names them: an address, or a network that holds no public ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, ip_network

from managed_e2b.local.errors import bad_request

DEFAULT_NAMESERVER = IPv4Address("8.8.8.8")
"""What /etc/resolv.conf of a sandbox says, as upstream's. Queries to it are answered by the host's own resolver."""

EVERYTHING = "0.0.0.0/0"
NAME_PORTS = frozenset({80, 443})
MAX_DNS_SERVERS = 10

_PRIVATE = tuple(
    IPv4Network(net)
    for net in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # looks public, and is Azure's own service on each of its machines
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",  # of the IETF's protocols; a cloud has its metadata there
        "192.168.0.0/16",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_NEVER = IPv4Network("127.0.0.0/8"), IPv4Network("0.0.0.0/8")  # the host's own loopback: no rule opens it
_NAME = re.compile(r"\*|(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


@dataclass(frozen=True)
class Policy:
    """What may be reached; by default everything that is public."""

    allowed: tuple[IPv4Network, ...] = ()
    names: tuple[str, ...] = ()
    denied: tuple[IPv4Network, ...] = ()
    dns_servers: frozenset[IPv4Address] = frozenset()
    """Those that may be asked because names are allowed."""

    def permits(self, address: IPv4Address) -> bool:
        """Whether connections to that address are let out, whatever they are for."""
        if self.singles_out(address):
            return True
        return is_public(address) and (_within(address, self.allowed) or not _within(address, self.denied))

    def singles_out(self, address: IPv4Address) -> bool:
        """Whether a rule means this address, or the private network it is in, and not the world at large."""
        if _within(address, _NEVER):
            return False
        return any(
            address in network and (network.prefixlen == 32 or any(network.subnet_of(net) for net in _PRIVATE))
            for network in self.allowed
        )

    def permits_name(self, name: str) -> bool:
        """Whether connections to a host of that name are. Patterns: `example.com`, `*.example.com` (below it), `*`."""
        name = name.lower().rstrip(".")
        return bool(name) and any(
            pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]) and name != pattern[1:])
            for pattern in self.names
        )

    def permits_dns(self, server: IPv4Address) -> bool:
        """Whether a DNS server may be asked at all."""
        return server in self.dns_servers or self.permits(server)

    def permits_question(self, server: IPv4Address, name: str | None) -> bool:
        """Whether it may be asked that. `name`: see `questions.name_asked`.

        Where only names are allowed, a question for another one could carry anything to whoever answers for it.
        """
        if self.permits(server):
            return name is not None or server != DEFAULT_NAMESERVER
        return server in self.dns_servers and name is not None and self.permits_name(name)

    @property
    def asks_for_a_way_out(self) -> bool:
        """Whether something is to be reached, said in so many words."""
        return bool(self.allowed or self.names)


OPEN = Policy()


def is_public(address: IPv4Address) -> bool:
    return not _within(address, _PRIVATE)


def parse(
    allow_internet_access: bool | None,
    allow_out: Sequence[str] = (),
    deny_out: Sequence[str] = (),
    dns_servers: Sequence[str] | None = None,
) -> Policy:
    """The policy that a request asks for. Raises ApiError(400), as upstream does."""
    denied = [_network(entry, f"invalid denied CIDR {entry}") for entry in deny_out]
    if allow_internet_access is False:
        denied.append(IPv4Network(EVERYTHING))
    addresses = [entry for entry in allow_out if _is_address(entry)]
    names = [entry.lower().rstrip(".") for entry in allow_out if not _is_address(entry)]
    for name in names:
        if not _NAME.fullmatch(name):
            raise bad_request(f"invalid allowed address {name}")
    if names and EVERYTHING not in deny_out:
        raise bad_request(
            "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all"
            " other traffic."
        )
    servers = _dns_servers(dns_servers)
    return Policy(
        allowed=_ipv4(_network(entry, f"invalid allowed address {entry}") for entry in addresses),
        names=tuple(names),
        denied=_ipv4(denied),
        dns_servers=servers if names else frozenset(),
    )


def _dns_servers(given: Sequence[str] | None) -> frozenset[IPv4Address]:
    if given is None:
        return frozenset({DEFAULT_NAMESERVER})
    if len(given) > MAX_DNS_SERVERS:
        raise bad_request(f"at most {MAX_DNS_SERVERS} dnsServers")
    try:
        servers = frozenset(map(IPv4Address, given))
    except ValueError as error:
        raise bad_request("dnsServers must be IPv4 addresses") from error
    if any(_within(server, _NEVER) for server in servers):
        raise bad_request("dnsServers must not be loopback addresses")
    return servers


def _is_address(entry: str) -> bool:
    try:
        ip_network(entry, strict=False)
    except ValueError:
        return False
    return True


def _network(entry: str, complaint: str) -> IPv4Network | None:
    """None for IPv6: nothing leaves by it, allowed or not."""
    try:
        network = ip_network(entry, strict=False)
    except ValueError as error:
        raise bad_request(complaint) from error
    if network.network_address.is_unspecified and entry != EVERYTHING:
        raise bad_request(complaint)
    return network if isinstance(network, IPv4Network) else None


def _ipv4(networks: Iterable[IPv4Network | None]) -> tuple[IPv4Network, ...]:
    return tuple(network for network in networks if network is not None)


def _within(address: IPv4Address, networks: Iterable[IPv4Network]) -> bool:
    return any(address in network for network in networks)
