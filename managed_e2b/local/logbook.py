"""What happened in a sandbox, as lines for people: the newest of each, kept in memory as long as the server lives.

Nothing of a command but the program's name is written, and none of its output: arguments hold secrets too often.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Any

from managed_e2b.local.clock import Clock, SystemClock, rfc3339

KEPT_LINES = 1000
MAX_LIMIT = 1000


class Level(IntEnum):
    DEBUG = 0
    INFO = 1
    WARN = 2
    ERROR = 3

    @property
    def wire(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Line:
    """`logger`: who tells, as envd's services are called. `fields`: what else is to know, as text."""

    at: datetime
    level: Level
    logger: str
    message: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def millisecond(self) -> int:
        return int(self.at.timestamp() * 1000)

    def entry(self) -> dict[str, Any]:
        """As the API's `SandboxLogEntry`."""
        fields = {"logger": self.logger, **self.fields}
        return {"timestamp": rfc3339(self.at), "level": self.level.wire, "message": self.message, "fields": fields}

    def raw(self) -> dict[str, str]:
        """As the API's `SandboxLog`: the CLI reads level, logger and all the rest out of the line."""
        values = {"level": self.level.wire, "logger": self.logger, "message": self.message, **self.fields}
        return {"timestamp": rfc3339(self.at), "line": json.dumps(values)}


class Logbook:
    """The newest lines of one sandbox."""

    def __init__(self, clock: Clock | None = None, size: int = KEPT_LINES) -> None:
        self._clock = clock or SystemClock()
        self._lines: deque[Line] = deque(maxlen=size)

    def __iter__(self) -> Iterator[Line]:
        """Oldest first."""
        return iter(list(self._lines))

    def add(self, logger: str, message: str, *, level: Level = Level.INFO, **fields: object) -> None:
        """Write a line. It must hold no secret: no value of an environment, no argument of a command, no token."""
        texts = {name: str(value) for name, value in fields.items() if value is not None}
        self._lines.append(Line(self._clock.read().wall, level, logger, message, texts))


@dataclass(frozen=True)
class LogQuery:
    """Which lines: from `start` on and up to `end` (Unix milliseconds, both included), `level` or worse, with `search`
    in the message. `backward`: the newest first. `limit`: of those that come first."""

    start: int | None = None
    end: int | None = None
    level: Level = Level.DEBUG
    search: str = ""
    backward: bool = False
    limit: int = MAX_LIMIT


def select(lines: Iterable[Line], query: LogQuery) -> list[Line]:
    """The lines that `query` asks for, of `lines` in the order they were written in."""
    found = [
        line
        for line in lines
        if line.level >= query.level
        and query.search in line.message
        and (query.start is None or line.millisecond >= query.start)
        and (query.end is None or line.millisecond <= query.end)
    ]
    if query.backward:
        found.reverse()
    return found[: query.limit]
