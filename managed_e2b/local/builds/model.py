"""What a build is asked to do, what it says meanwhile, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from managed_e2b.local.builds.registry import Credentials
from managed_e2b.local.clock import Clock
from managed_e2b.local.templates import Found

BASE_STEP = "base"
FINALIZE_STEP = "finalize"

MAX_ENTRIES = 20_000
MAX_MESSAGE = 4096
PAGE = 100
"""Entries that one answer holds at most."""


class Status(StrEnum):
    WAITING = "waiting"
    BUILDING = "building"
    READY = "ready"
    ERROR = "error"


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"


class StepKind(StrEnum):
    RUN = "RUN"
    COPY = "COPY"
    ADD = "ADD"
    ENV = "ENV"
    ARG = "ARG"
    WORKDIR = "WORKDIR"
    USER = "USER"


@dataclass(frozen=True)
class Step:
    """One instruction. `args` as the SDKs send them; `files` names the archive of a COPY."""

    kind: StepKind
    args: tuple[str, ...]
    files: str | None = None
    force: bool = False

    def __str__(self) -> str:
        return " ".join((self.kind, *self.args)).rstrip()


@dataclass(frozen=True)
class Plan:
    """What to build: from an image of a registry or, when `template` is given, from what that is made of."""

    image: str | None
    credentials: Credentials | None
    template: Found | None
    steps: Sequence[Step]
    force: bool = False
    start_cmd: str | None = None
    ready_cmd: str | None = None


class BuildFailed(Exception):
    """The build ended with an error of what was asked. `step`: its number, the first is 1; or `base`, or `finalize`."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step
        self.message = message


@dataclass(frozen=True)
class Entry:
    """A line of a build's log."""

    at: datetime
    level: Level
    message: str
    step: str | None = None


@dataclass
class Log:
    """What a build says, oldest first. What is past MAX_ENTRIES is dropped, and that is said once."""

    clock: Clock
    entries: list[Entry] = field(default_factory=list)

    def add(self, message: str, *, level: Level = Level.INFO, step: str | None = None) -> None:
        if len(self.entries) > MAX_ENTRIES:
            if level is not Level.ERROR or len(self.entries) > MAX_ENTRIES + 1:
                return
        elif len(self.entries) == MAX_ENTRIES:
            message, level = "The rest of the log is not kept", Level.WARN
        self.entries.append(Entry(self.clock.read().wall, level, message[:MAX_MESSAGE], step))

    def page(self, offset: int, limit: int = PAGE, least: Level = Level.DEBUG) -> list[Entry]:
        """Entries from `offset` on, of those that are at least so important; none at the end."""
        order = list(Level)
        chosen = [entry for entry in self.entries if order.index(entry.level) >= order.index(least)]
        return chosen[offset : offset + min(max(limit, 0), PAGE)]
