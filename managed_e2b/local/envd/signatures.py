"""Signed URLs of `/files`: who holds one may read or write one path, without the sandbox's token."""

from __future__ import annotations

import base64
import hashlib
import hmac

READ = "read"
WRITE = "write"


def sign(token: str, path: str, operation: str, username: str, expiration: int | str | None) -> str:
    """The signature by E2B's recipe. `path` is as the caller wrote it, `username` empty when none was given.

    `expiration` is in seconds since the epoch; None never expires.
    """
    parts = [path, operation, username, token, *([] if expiration is None else [str(expiration)])]
    digest = hashlib.sha256(":".join(parts).encode("utf-8", "surrogateescape")).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")


def signature_matches(
    token: str, path: str, operation: str, username: str | None, expiration: int | str | None, signature: str
) -> bool:
    """Whether this signature was made with this token, compared in constant time. It may have expired since."""
    expected = sign(token, path, operation, username or "", expiration)
    return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogateescape"))
