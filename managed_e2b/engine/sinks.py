"""Where a command's output goes."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any


class Sink:
    """Collects one stream's bytes, and tells them as text to a callback, whole characters only."""

    def __init__(self, callback: Callable[[str], Any] | None = None) -> None:
        self.data = bytearray()
        self._failed = False
        self._callback = callback
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, chunk: bytes) -> None:
        self.data += chunk
        self._tell(chunk, final=False)

    def close(self) -> None:
        """Tell what is left of a broken character."""
        if not self._failed:
            self._tell(b"", final=True)

    def _tell(self, chunk: bytes, *, final: bool) -> None:
        if self._callback is None or not (text := self._decoder.decode(chunk, final)):
            return
        self._failed = True
        self._callback(text)
        self._failed = False
