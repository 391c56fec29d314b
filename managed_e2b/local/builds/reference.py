"""How the name of a container image is read: as Docker reads it. No I/O.

`[host[:port]/]path[:tag][@sha256:…]`; without a host it is of Docker Hub, without a tag it is `latest`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

DOCKER_HUB = "docker.io"
_DOCKER_HUB_API = "registry-1.docker.io"
_HUB_NAMES = frozenset({DOCKER_HUB, "index.docker.io", _DOCKER_HUB_API, "registry.hub.docker.com"})

_HOST = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.?)+(?::[0-9]{1,5})?|\[[0-9a-fA-F:]+\](?::[0-9]{1,5})?"
)
_PATH = re.compile(r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_LENGTH = 512


@dataclass(frozen=True)
class Reference:
    """`registry` is a host, with a port where it was given. `digest`, when given, is what counts."""

    registry: str
    repository: str
    tag: str
    digest: str | None

    @property
    def manifest(self) -> str:
        """By what the registry is asked for it."""
        return self.digest or self.tag

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}" + (f"@{self.digest}" if self.digest else f":{self.tag}")


@dataclass(frozen=True)
class Endpoint:
    """Where to ask. `insecure`: plain HTTP. `mirror`: it is not the registry itself, and gets no credentials."""

    host: str
    insecure: bool
    mirror: bool


def parse(text: str) -> Reference:
    """Raises ValueError for what is no image's name."""
    name, at, digest = text.strip().partition("@")
    if len(text) > _MAX_LENGTH or (at and not _DIGEST.fullmatch(digest)):
        raise ValueError("expected [registry/]name[:tag][@sha256:digest]")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry, path = first, rest
    else:
        registry, path = DOCKER_HUB, name
    path, colon, tag = path.partition(":")
    if not _HOST.fullmatch(registry) or not _PATH.fullmatch(path) or (colon and not _TAG.fullmatch(tag)):
        raise ValueError("expected [registry/]name[:tag][@sha256:digest]")
    if registry in _HUB_NAMES:
        registry = DOCKER_HUB
        path = path if "/" in path else f"library/{path}"
    return Reference(registry, path, tag or "latest", digest or None)


def endpoint(reference: Reference, mirrors: Mapping[str, str]) -> Endpoint:
    """`mirrors`: registry → URL of what to ask in its place. As with Docker, this host is asked over plain HTTP."""
    mirror = mirrors.get(reference.registry)
    if mirror is not None:
        url = urlsplit(mirror)
        return Endpoint(url.netloc, url.scheme == "http", mirror=True)
    if reference.registry == DOCKER_HUB:
        return Endpoint(_DOCKER_HUB_API, insecure=False, mirror=False)
    return Endpoint(reference.registry, _is_loopback(reference.registry), mirror=False)


def parse_mirror(text: str) -> tuple[str, str]:
    """`registry=http[s]://host[:port]`. Raises ValueError."""
    registry, equals, address = text.partition("=")
    url = urlsplit(address)
    registry = DOCKER_HUB if registry in _HUB_NAMES else registry
    plain = url.scheme in ("http", "https") and url.path in ("", "/") and not url.query and not url.username
    if not equals or not _HOST.fullmatch(registry) or not plain or not _HOST.fullmatch(url.netloc):
        raise ValueError("expected registry=http://host:port, for example docker.io=http://127.0.0.1:5000")
    return registry, f"{url.scheme}://{url.netloc}"


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
