"""The files of COPY: where clients may put them, and where they lie until a build needs them.

An upload's address is all that a client has: it is signed, says which files it is for and until when, and is good for
nothing else. What arrives is stored under the name that it was asked for by; that is a name, and nobody trusts it to
be a digest of anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from managed_e2b.local.clock import Clock
from managed_e2b.local.errors import ApiError

MAX_UPLOAD = 8 * 1024**3
"""Bytes of one archive."""
KEPT_BYTES = 8 * 1024**3
"""Of all archives together; those that were not used longest go first."""
VALID_SECONDS = 3600
PREFIX = "/templates/uploads/"
_HASH = re.compile(r"[0-9a-f]{64}")
_BUFFER = 1 << 20


def is_hash(text: str) -> bool:
    """Whether it can name files."""
    return _HASH.fullmatch(text) is not None


class Uploads:
    """`directory` tells where files lie: the server's own, made when first needed."""

    def __init__(self, directory: Callable[[], Path], clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._secret = secrets.token_bytes(32)

    def find(self, files: str) -> Path | None:
        """The archive of that name; it counts as used now."""
        path = self._path(files)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return path
        return None

    def address(self, files: str) -> str:
        """Path and query of where to PUT an archive."""
        expires = int(self._clock.read().wall.timestamp()) + VALID_SECONDS
        return f"{PREFIX}{files}?expires={expires}&signature={self._sign(files, expires)}"

    def check(self, files: str, expires: str, signature: str) -> None:
        """Whether this server made that address, and it still counts. Raises ApiError(403)."""
        valid = is_hash(files) and re.fullmatch(r"[0-9]{1,12}", expires) is not None
        if not valid or not hmac.compare_digest(self._sign(files, int(expires)), signature):
            raise ApiError(403, "invalid signature")
        if int(expires) < self._clock.read().wall.timestamp():
            raise ApiError(403, "signature is already expired")

    async def store(self, files: str, body: AsyncIterator[bytes]) -> None:
        """Store what comes in; whole, or not at all. Raises ApiError: 413, 507."""
        path = self._path(files)
        scratch = path.parent / f"new-{secrets.token_hex(8)}"
        try:
            with await asyncio.to_thread(open, scratch, "wb") as file:
                size = 0
                buffer = bytearray()
                async for chunk in body:
                    size += len(chunk)
                    if size > MAX_UPLOAD:
                        raise ApiError(413, f"The files are larger than {MAX_UPLOAD} bytes")
                    buffer += chunk
                    if len(buffer) >= _BUFFER:
                        await asyncio.to_thread(file.write, bytes(buffer))
                        buffer.clear()
                await asyncio.to_thread(file.write, bytes(buffer))
            scratch.rename(path)
        except OSError as error:
            raise ApiError(507, f"The files cannot be stored: {error.strerror}") from error
        finally:
            scratch.unlink(missing_ok=True)
        await asyncio.to_thread(self._make_room, path)

    def _make_room(self, newest: Path) -> None:
        """A build that runs may be reading one: it has it open, and so it stays for that."""
        files = [path for path in self._folder().iterdir() if is_hash(path.name) and path != newest]
        sizes = {path: path.stat() for path in files}
        total = sum(status.st_size for status in sizes.values()) + newest.stat().st_size
        for path in sorted(files, key=lambda path: sizes[path].st_mtime_ns):
            if total <= KEPT_BYTES:
                return
            total -= sizes[path].st_size
            path.unlink(missing_ok=True)

    def _sign(self, files: str, expires: int) -> str:
        return hmac.new(self._secret, f"{files} {expires}".encode(), hashlib.sha256).hexdigest()

    def _folder(self) -> Path:
        folder = self._directory() / "uploads"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _path(self, files: str) -> Path:
        if not is_hash(files):
            raise ApiError(400, "Invalid files hash")
        return self._folder() / files
