"""Values that cross rooms. Times are integer microseconds since the epoch (UTC) unless a name says seconds."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "AcquireRequest",
    "CommandResult",
    "Host",
    "Owner",
    "PortForward",
    "ReapReport",
    "Reaped",
    "RemoteSandbox",
    "SandboxConfig",
    "SandboxRecord",
    "State",
]

MAX_TIMEOUT = 86_400
"""Seconds. The longest life any E2B plan gives a sandbox (Pro: 24 hours); more is refused before any request."""

METADATA_PREFIX = "me2b_"
"""Metadata keys of our own on every sandbox: `me2b_ticket`, `me2b_owner`."""


class State(enum.StrEnum):
    """Where a sandbox is in its life. The edges between the states are `rules.states.TRANSITIONS`."""

    QUEUED = "queued"
    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    CLEANING = "cleaning"
    CLEANED = "cleaned"
    CREATE_FAILED = "create_failed"


class SandboxConfig(BaseModel):
    """What a sandbox shall be. Exactly one source; `template="base"` when none is named.

    `timeout` is the hard limit of its life in whole seconds, 1 to 86,400: whatever happens, it is gone then.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str | None = Field(default=None, min_length=1)
    image: str | None = Field(default=None, min_length=1)
    dockerfile: str | None = Field(default=None, min_length=1)
    timeout: int = Field(default=300, ge=1, le=MAX_TIMEOUT, strict=True)
    metadata: dict[str, str] = Field(default_factory=dict)
    envs: dict[str, str] = Field(default_factory=dict)
    allow_internet_access: bool | None = None

    @field_validator("metadata", "envs", mode="before")
    @classmethod
    def _only_strings(cls, value: Any) -> Any:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError("must be a mapping of str to str")
        for key, item in value.items():
            if not isinstance(key, str) or not isinstance(item, str):
                raise ValueError(f"{key!r}: {type(item).__name__} is not a str; E2B takes strings only, use str(...)")
        return dict(value)

    @field_validator("metadata")
    @classmethod
    def _our_keys_are_ours(cls, value: dict[str, str]) -> dict[str, str]:
        for key in value:
            if key.startswith(METADATA_PREFIX):
                raise ValueError(f"{key!r}: keys that begin with {METADATA_PREFIX!r} are reserved")
        return value

    @field_validator("envs")
    @classmethod
    def _names_of_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for key, item in value.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
                raise ValueError(f"{key!r} is not a name of an environment variable")
            if "\0" in item:
                raise ValueError(f"{key!r}: a value cannot hold a NUL")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> SandboxConfig:
        named = [name for name in ("template", "image", "dockerfile") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)}: give one source, not {len(named)}")
        return self

    @property
    def source(self) -> tuple[str, str]:
        """The kind of the source and its value."""
        for kind in ("image", "dockerfile"):
            if (value := getattr(self, kind)) is not None:
                return kind, value
        return "template", self.template or "base"


class AcquireRequest(SandboxConfig):
    """A config and how long to wait for a slot: `acquire_timeout` in seconds, None for as long as it takes."""

    acquire_timeout: float | None = Field(default=None, gt=0)


@dataclass(frozen=True)
class Host:
    """Where a process lives. Two processes can see each other's pids only when all three are the same."""

    machine_id: str
    boot_id: str
    pid_namespace: str


@dataclass(frozen=True)
class Owner:
    """One row of the ledger's `owners`: one open lifecycle. `pid_started` is the kernel's start time of the process."""

    id: str
    host: Host
    pid: int
    pid_started: int
    label: str
    heartbeat: int
    stale_after: int
    closed_at: int | None = None


@dataclass(frozen=True)
class SandboxRecord:
    """One row of the ledger's `sandboxes`."""

    ticket: str
    sandbox_id: str | None
    account: str
    owner: str
    state: State
    source_kind: str
    source: str
    timeout: int
    """Seconds: the hard limit of its life."""
    lease: int
    """Seconds: the backend's own timeout, renewed while the owner lives."""
    hard_deadline: int | None
    remote_expiry: int | None
    claimed_by: str | None
    claimed_at: int | None
    reason: str | None
    last_error: str | None
    metadata: Mapping[str, str]
    queued_at: int
    creating_at: int | None
    running_at: int | None
    cleaning_at: int | None
    ended_at: int | None


@dataclass(frozen=True)
class RemoteSandbox:
    """A sandbox as the backend lists it. A clue, never a proof: lists lag and lose."""

    sandbox_id: str
    template: str
    state: str
    metadata: Mapping[str, str]
    started_at: int
    end_at: int


@dataclass(frozen=True)
class CommandResult:
    """What a command left.

    `stdout` and `stderr` are its output as text (UTF-8, what is broken replaced by U+FFFD); the bytes as
    they came are in `stdout_bytes` and `stderr_bytes`. `exit_code` is -1 when it was killed by a signal or
    timed out. `duration` is in seconds, as the caller saw it.
    """

    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    exit_code: int
    timed_out: bool
    duration: float

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", errors="replace")

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True)
class PortForward:
    """A port of a sandbox that can be dialled from the caller's machine."""

    port: int
    host: str
    url: str


@dataclass(frozen=True)
class Reaped:
    """What a reaper did with one row, and why."""

    ticket: str
    sandbox_id: str | None
    owner: str
    action: Literal["cleaned", "pending", "taken"]
    why: str


@dataclass(frozen=True)
class ReapReport:
    """What one pass of the reaper did. `items` in the order in which they were seen."""

    items: tuple[Reaped, ...] = ()

    @property
    def cleaned(self) -> tuple[Reaped, ...]:
        """Rows that are terminal now: nothing of them runs."""
        return tuple(item for item in self.items if item.action == "cleaned")

    @property
    def pending(self) -> tuple[Reaped, ...]:
        """Rows that could not be proved dead yet; the next pass tries again."""
        return tuple(item for item in self.items if item.action == "pending")
