"""Multipart bodies as a stream of events: parts begin, bring data, and end. Nothing is held back."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, TypeAlias

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from managed_e2b.local.envd.transfer import BadBody

HEADERS_LIMIT = 64 * 1024  # bytes of the headers of one part


@dataclass(frozen=True)
class Part:
    """A part begins. The names are as its Content-Disposition has them; `filename` may contain directories."""

    name: bytes
    filename: bytes | None


class _End(Enum):
    PART = "part"


PartEnd: Final = _End.PART
Event: TypeAlias = Part | bytes | Literal[_End.PART]


class _Collector:
    """Turns the parser's callbacks into events."""

    def __init__(self, boundary: bytes) -> None:
        self.events: list[Event] = []
        self.complete = False
        self._name = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._seen = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> list[Event]:
        self._parser.write(data)
        events, self.events = self.events, []
        return events

    def _part_begin(self) -> None:
        self._disposition, self._seen = b"", 0

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _count(self, size: int) -> None:
        self._seen += size
        if self._seen > HEADERS_LIMIT:
            raise BadBody(f"error reading form: the headers of a part exceed {HEADERS_LIMIT} bytes")

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self.events.append(Part(options.get(b"name", b""), options.get(b"filename")))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self.events.append(data[start:end])

    def _part_end(self) -> None:
        self.events.append(PartEnd)

    def _end(self) -> None:
        self.complete = True


async def multipart_parts(body: AsyncIterable[bytes], content_type: str) -> AsyncIterator[Event]:
    """The parts of a body, in order. Raises BadBody when it is not multipart, or ends before its end."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise BadBody("error parsing multipart form: no boundary in the Content-Type")
    try:
        collector = _Collector(boundary)
        async for data in body:
            for event in collector.feed(data):
                yield event
    except FormParserError as error:
        raise BadBody(f"error reading form: {error}") from None
    if not collector.complete:
        raise BadBody("error reading form: unexpected end of the body")
