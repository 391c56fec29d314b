"""Where a request on the one origin belongs. Pure: the rules of dispatch, without any I/O.

1. `E2b-Sandbox-Id` and `E2b-Sandbox-Port` name a sandbox and a port of it;
2. so does a host `<port>-<id>.<any domain>`, of the Host header or of an absolute-form request target (what a
   client sends that uses this server as its HTTP proxy);
3. `/files` with a `signature` belongs to the sandbox whose token made the signature;
4. everything else is the control plane.

A web page cannot reach any of them by pointing its own domain at 127.0.0.1 (DNS rebinding): an origin-form request
must name this host as loopback addresses are named, or a sandbox, whose id no page can guess. Over https, which is
only spoken at the end of a tunnel that was asked for, any name will do.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers, QueryParams
from starlette.types import Scope

from managed_e2b.local.errors import ApiError, bad_request

ID_HEADER = "e2b-sandbox-id"
PORT_HEADER = "e2b-sandbox-port"

_ID = re.compile(r"[a-z0-9]{1,64}")
_PORT = re.compile(r"[0-9]{1,5}")
_SANDBOX_HOST = re.compile(r"([0-9]{1,5})-([a-z0-9]{1,64})\.")
_ABSOLUTE = re.compile(rb"https?://", re.IGNORECASE)


@dataclass(frozen=True)
class ToSandbox:
    sandbox_id: str
    port: int


@dataclass(frozen=True)
class ToSigned:
    """A signed URL: whose it is, only the tokens tell. `expiration` is as sent, in Unix seconds."""

    operation: str
    path: str
    username: str
    signature: str
    expiration: str | None


@dataclass(frozen=True)
class ToControlPlane:
    pass


Target = ToSandbox | ToSigned | ToControlPlane


def route(scope: Scope) -> tuple[Target, Scope]:
    """Where an ASGI HTTP request belongs, and its scope with the path in origin form.

    Raises ApiError: 400, 403.
    """
    headers = Headers(scope=scope)
    scope, proxied_for = _origin_form(scope)
    host = _hostname(headers.get("host", "") if proxied_for is None else proxied_for)
    if ID_HEADER in headers or PORT_HEADER in headers:
        target: Target = _by_headers(headers)
    elif match := _SANDBOX_HOST.match(host):
        return ToSandbox(match[2], _port(match[1])), scope
    else:
        target = _by_signature(scope) or ToControlPlane()
    direct = proxied_for is None and scope["scheme"] != "https"
    if direct and not _is_this_host(host) and not _SANDBOX_HOST.match(host):
        raise ApiError(403, "This server is called 127.0.0.1 or localhost; requests to other host names are refused")
    return target, scope


def _origin_form(scope: Scope) -> tuple[Scope, str | None]:
    """The scope with the path in origin form, and the authority when it was in absolute form."""
    raw: bytes = scope.get("raw_path") or b""
    if not _ABSOLUTE.match(raw):
        return scope, None
    try:
        url = urlsplit(raw.decode("ascii"))
    except ValueError as error:
        raise bad_request("Invalid request target") from error
    path = url.path or "/"
    return {**scope, "path": unquote(path), "raw_path": path.encode()}, url.netloc.rpartition("@")[2]


def _by_headers(headers: Headers) -> ToSandbox:
    for name in (ID_HEADER, PORT_HEADER):
        if len(set(headers.getlist(name))) != 1:
            raise bad_request(f"missing header {name}" if name not in headers else f"header {name} is ambiguous")
    sandbox_id = headers[ID_HEADER]
    if not _ID.fullmatch(sandbox_id):
        raise bad_request("invalid sandbox id")
    return ToSandbox(sandbox_id, _port(headers[PORT_HEADER]))


def _port(text: str) -> int:
    if not _PORT.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise bad_request("invalid sandbox port")
    return int(text)


def _by_signature(scope: Scope) -> ToSigned | None:
    if scope["path"] != "/files":
        return None
    query = QueryParams(scope["query_string"])
    if "signature" not in query:
        return None
    return ToSigned(
        operation="read" if scope["method"] in ("GET", "HEAD") else "write",
        path=query.get("path", ""),
        username=query.get("username", ""),
        signature=query["signature"],
        expiration=query.get("signature_expiration"),
    )


def _hostname(authority: str) -> str:
    """The host of `host[:port]`, in lower case, an IPv6 literal without its brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()


def _is_this_host(host: str) -> bool:
    if host in ("", "localhost") or host.endswith(".localhost"):  # an HTTP/1.0 request has no host
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
