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
    "Holder",
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

    # Values of `envs` may be secrets: they show up neither in an error nor in a repr.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    template: str | None = Field(default=None, min_length=1)
    image: str | None = Field(default=None, min_length=1)
    dockerfile: str | None = Field(default=None, min_length=1)
    timeout: int = Field(default=300, ge=1, le=MAX_TIMEOUT, strict=True)
    metadata: dict[str, str] = Field(default_factory=dict)
    envs: dict[str, str] = Field(default_factory=dict, repr=False)
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
            if not (key + item).isprintable() and any("\ud800" <= char <= "\udfff" for char in key + item):
                raise ValueError(f"{key!r}: holds half a surrogate pair, which is no text and cannot be sent")
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
    """A config and how long to wait for a slot: `acquire_timeout` in seconds, None for as long as it takes.

    `keep_on_error`: a block that raises leaves its sandbox running, until its timeout or the lifecycle's end.
    """

    acquire_timeout: float | None = Field(default=None, gt=0)
    keep_on_error: bool = Field(default=False, strict=True)


UNKNOWN = "unknown"
"""What a system without /proc tells of a boot or a pid namespace."""


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
    refused_at: int | None = None
    """While it is `creating`: its last create was answered by a 429, and it waits in line for the next try."""
    sdk_version: str | None = None
    """The version of the `e2b` package that asked for it."""
    template_id: str | None = None
    """The backend's id of the template that `source` stood for; None until the backend has told it."""
    envd_version: str | None = None
    """The version of the agent in the sandbox, which is that of the template's build."""


@dataclass(frozen=True)
class Holder:
    """A sandbox that holds a slot which somebody else waited for. `age` in seconds since it had the slot."""

    sandbox_id: str | None
    """None while its create is not answered."""
    ticket: str
    state: State
    age: float
    owner: str
    label: str
    """The owner's name, as it gave it."""

    def __str__(self) -> str:
        name = self.sandbox_id or f"ticket {self.ticket}"
        return f"{name} {self.state} for {self.age:.0f} s, owner {self.owner} ({self.label})"


@dataclass(frozen=True)
class RemoteSandbox:
    """A sandbox as the backend lists it. A clue, never a proof: lists lag and lose."""

    sandbox_id: str
    template: str
    state: str
    metadata: Mapping[str, str]
    started_at: int
    end_at: int
    alias: str | None = None
    """The template's name, where the backend tells one beside its id."""
    envd_version: str | None = None
    """The version of the agent in it."""


@dataclass(frozen=True)
class CommandResult:
    """What a command left.

    `stdout` and `stderr` are its output as text (UTF-8, what is broken replaced by U+FFFD); the bytes as
    they came are in `stdout_bytes` and `stderr_bytes`. `exit_code` is -1 when it was killed by a signal or
    timed out. `duration` is in seconds, as the caller saw it. `output_lost`: the connection to the sandbox was cut
    while it ran; the exit code is its true one, but output written before it was picked up again may be missing.
    """

    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    exit_code: int
    timed_out: bool
    duration: float
    output_lost: bool = False

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


ReapAction = Literal["cleaned", "never_existed", "gone", "pending", "taken", "kept", "due"]


@dataclass(frozen=True)
class Reaped:
    """What a reaper did with one sandbox, and why.

    `action`: "cleaned", proved dead by a per-id answer. "never_existed", proved that its create made nothing.
    "gone", listed, but not there. "pending", tried and not proved: the row stays `cleaning`, for the next pass.
    "taken", somebody else ended it or is at it, or its owner showed life. "kept", left alone on purpose. "due", would
    be ended if this were no dry run.
    """

    ticket: str | None
    """None when it carries none: nothing of this package made it."""
    sandbox_id: str | None
    owner: str | None
    action: ReapAction
    why: str
    age: float | None = None
    """Seconds since its create."""
    listed: bool = False
    """Found in the backend's list by `purge_foreign`, with no open row in the ledger."""


@dataclass(frozen=True)
class ReapReport:
    """What a reaper did: one item for each sandbox, in the order in which they were seen.

    `cut` tells why it ended before it had seen everything (a bound was reached, the list broke off); None when it saw
    all. What a list did not show is not in here.
    """

    items: tuple[Reaped, ...] = ()
    cut: str | None = None

    @property
    def cleaned(self) -> tuple[Reaped, ...]:
        """Those of which nothing runs any more."""
        return self._with("cleaned", "never_existed", "gone")

    @property
    def pending(self) -> tuple[Reaped, ...]:
        """Those that could not be proved dead yet; the next pass tries again."""
        return self._with("pending")

    @property
    def kept(self) -> tuple[Reaped, ...]:
        """Those that were left alone on purpose."""
        return self._with("kept")

    @property
    def due(self) -> tuple[Reaped, ...]:
        """Those that a dry run would have ended."""
        return self._with("due")

    def _with(self, *actions: ReapAction) -> tuple[Reaped, ...]:
        return tuple(item for item in self.items if item.action in actions)


ReconcileKind = Literal["running", "paused", "vanished", "untracked", "orphaned", "ending", "unknown"]


@dataclass(frozen=True)
class Compared:
    """What ledger and backend say of one sandbox.

    `kind`: "running", by both. "paused", at the backend. "vanished", the row says running, and the backend, asked for
    the id, knows nothing of it. "untracked", it runs and its row has ended. "orphaned", its owner is dead: `reap` ends
    it. "ending", its row is `cleaning`. "unknown", the backend could not be asked, or the create is not answered yet.
    `ended`: reconcile has ended it: the row of what vanished, or the sandbox that was untracked.
    """

    ticket: str | None
    sandbox_id: str | None
    owner: str | None
    kind: ReconcileKind
    why: str
    ended: bool = False


@dataclass(frozen=True)
class ReconcileReport:
    """What `reconcile` found. `cut` tells why it ended before it had compared everything; None when it did."""

    items: tuple[Compared, ...] = ()
    cut: str | None = None

    def of(self, kind: ReconcileKind) -> tuple[Compared, ...]:
        """The items of one kind."""
        return tuple(item for item in self.items if item.kind == kind)

    @property
    def agrees(self) -> bool:
        """Whether everything was compared, and ledger and backend say the same of it."""
        return self.cut is None and all(item.kind in ("running", "ending") for item in self.items)
