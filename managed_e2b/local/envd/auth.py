"""Who may call envd, and as which user of the sandbox."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable

from connectrpc.code import Code
from connectrpc.errors import ConnectError

from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.runtime.base import User

ACCESS_TOKEN_HEADER = b"x-access-token"
UNAUTHORIZED = "unauthorized access, please provide a valid access token or method signing if supported"


def token_accepted(token: str | None, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether ASGI headers carry the sandbox's access token, compared in constant time. Without one it is open."""
    if token is None:
        return True
    given = next((value for name, value in headers if name == ACCESS_TOKEN_HEADER), b"")
    return hmac.compare_digest(given, token.encode())


def basic_username(authorization: str | None) -> str | None:
    """The user name of a Basic `Authorization` header, whose password does not count; None without one."""
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        return None


async def rpc_user(ctx: EnvdContext, authorization: str | None) -> User:
    """The user an RPC acts as: the one it names, else the sandbox's default.

    Raises ConnectError(UNAUTHENTICATED) when the sandbox has no such user.
    """
    name = basic_username(authorization)
    try:
        return await ctx.guest.user(ctx.default_user if name is None else name)
    except KeyError:
        kind = "invalid default user" if name is None else "invalid username"
        raise ConnectError(Code.UNAUTHENTICATED, f"{kind}: '{ctx.default_user if name is None else name}'") from None
