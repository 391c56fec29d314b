"""CONNECT: the server as the HTTPS proxy of its own names, so that https:// URLs of sandboxes work without any DNS.

What a client tunnels to is answered by this server itself, whatever the name would resolve to. No other name is let
through: this is no open proxy, and no way to anything else on this host.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from managed_e2b.local.api.app import error_response
from managed_e2b.local.connections import WIRE, Wire
from managed_e2b.local.errors import ApiError

if TYPE_CHECKING:
    from managed_e2b.local.tls import Tls

log = logging.getLogger(__name__)

_AUTHORITY = re.compile(rb"([A-Za-z0-9._-]{1,253}):(80|443)")
_HTTPS = b"443"


async def tunnel(tls: Tls | None, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a CONNECT request: HTTP over TLS at the tunnel's end on port 443, plain HTTP on port 80."""
    try:
        context = None if _port(tls, scope) != _HTTPS or tls is None else tls.context
    except ApiError as error:
        await error_response(error)(scope, receive, send)
        return
    wire: Wire = scope["extensions"][WIRE]
    try:
        await wire.tunnel(context)
    except OSError as error:  # a client that does not trust our authority hangs up here
        log.info("a TLS handshake failed: %s", error)


def _port(tls: Tls | None, scope: Scope) -> bytes:
    """The port that is asked for. Raises ApiError: 405 without TLS, 400, 403 for what is not ours."""
    if tls is None:
        raise ApiError(405, "This server is started without --tls: it tunnels nothing and takes plain http:// only")
    if scope["scheme"] == "https":
        raise ApiError(405, "A tunnel through a tunnel leads nowhere")
    match = _AUTHORITY.fullmatch(scope["raw_path"])
    if match is None:
        raise ApiError(403, f"This proxy serves *.{tls.domain}:443 and nothing else")
    if not tls.covers(match[1].decode().lower()):
        host = match[1].decode()
        raise ApiError(403, f"This proxy serves *.{tls.domain} and nothing else: add {host} to NO_PROXY")
    return match[2]
