"""Cutting a Connect stream at the right place. Pure: bytes in, bytes and a verdict out.

A stream is a row of envelopes: a byte of flags, four of length, the message. The flag 2 marks the last one, which says
how the stream ended.
"""

from __future__ import annotations

import json
from typing import Literal

from e2b.envd.process import process_pb as pb
from protobuf import Oneof

from managed_e2b.local.chaos.rules import CutStream

HEADER = 5
LAST = 2


def envelope(flags: int, message: bytes) -> bytes:
    return bytes([flags]) + len(message).to_bytes(4, "big") + message


class Cutter:
    """Passes a stream on, up to the cut. Tell it the stream's codec: JSON, or protobuf."""

    def __init__(self, fault: CutStream, codec: Literal["json", "proto"]) -> None:
        self._fault = fault
        self._codec = codec
        self._rest = b""
        self._events = 0
        self.how = fault.how
        self.over = False
        """The cut has come."""

    def feed(self, data: bytes) -> bytes:
        """Of all bytes so far, those that may go out now."""
        out = b""
        self._rest += data
        while not self.over and len(self._rest) >= HEADER:
            size = HEADER + int.from_bytes(self._rest[1:HEADER], "big")
            if len(self._rest) < size:
                break
            whole, self._rest = self._rest[:size], self._rest[size:]
            kind = self._kind(whole)
            if kind == "end" and self._fault.after_events is None:
                self.over = True
                break
            out += whole
            if kind != "keepalive":
                self._events += 1
                self.over = self._events == self._fault.after_events
        return out

    def last_words(self) -> bytes:
        """What the stream still says after the cut, where the fault leaves it a word."""
        match self.how:
            case "end":
                return envelope(LAST, b"{}" if self._codec == "json" else b"")
            case "unavailable":
                error = {"code": "unavailable", "message": "the connection to the sandbox was lost"}
                return envelope(LAST, json.dumps({"error": error}).encode())
            case _:
                return b""

    def _kind(self, whole: bytes) -> str:
        """`start`, `data`, `end`, `keepalive`, …  A stream that ends before its end event is over, too."""
        if whole[0] & LAST:
            return "end"
        message = whole[HEADER:]
        if self._codec == "proto":
            event = pb.StartResponse.from_binary(message).event
            match event.event if event is not None else None:
                case Oneof(field=field):
                    return field
                case _:
                    return ""
        value = json.loads(message)
        # a process's event is in `event`; a watcher's is the message itself
        event_of = value.get("event", value)
        return next(iter(event_of), "") if isinstance(event_of, dict) else ""
