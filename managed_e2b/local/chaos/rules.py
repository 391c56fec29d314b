"""What goes wrong: rules as values. Pure, and the same thing as the JSON that `me2b serve --chaos` reads.

A `Rule` says which requests it is about (`ops`, `sandbox_id`, `metadata`), which of these it strikes (`nth`, `start`,
`stop`, `every`, `probability`, `times`), and with which fault, before or after the request had its effect. A `Script`
is rules and the seed that all chance comes from. Rules are tried in their order; delays and hangs add up, the first
fault that decides the answer wins.

Operations: `create`, `list`, `info`, `kill`, `timeout`, `refresh`, `pause`, `resume`, `connect`, `metrics`, `logs`,
`fork`, `snapshot`, `template` and `other` of the control plane; `health`, `files.read`, `files.write`,
`process.start`, `process.connect`, … (the RPC in snake case), `filesystem.stat`, …, `envd` (the rest of envd) and
`port` (traffic to any other port) of a sandbox. A pattern with `*` names several: `files.*`, `process.*`, `*`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

CONTROL_PLANE_OPS = frozenset(
    {
        "create", "list", "info", "kill", "timeout", "refresh", "pause", "resume", "connect", "metrics", "logs",
        "fork", "snapshot", "template", "other",
    }
)  # fmt: skip
SANDBOX_OPS = frozenset(
    {
        "health", "files.read", "files.write", "envd", "port",
        "process.start", "process.connect", "process.list", "process.send_input", "process.stream_input",
        "process.close_stdin", "process.send_signal", "process.update",
        "filesystem.stat", "filesystem.make_dir", "filesystem.move", "filesystem.list_dir", "filesystem.remove",
        "filesystem.watch_dir", "filesystem.create_watcher", "filesystem.get_watcher_events",
        "filesystem.remove_watcher",
    }
)  # fmt: skip
OPS = CONTROL_PLANE_OPS | SANDBOX_OPS
STREAMS = frozenset({"process.start", "process.connect", "filesystem.watch_dir"})


def _sendable(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name) or not re.fullmatch(_HEADER_VALUE, value):
            raise ValueError(f"header {name!r}: names are letters, digits and -, values printable ASCII")
    return headers


_HEADER_VALUE = r"^[ -~]{0,1024}$"
HeaderValue: TypeAlias = Annotated[str, Field(pattern=_HEADER_VALUE)]
Headers: TypeAlias = Annotated[dict[str, str], AfterValidator(_sendable)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Phase: TypeAlias = Literal["before", "after"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Delay(_Value):
    """It takes `seconds` longer. Whoever hangs up meanwhile changes nothing: the effect comes all the same.

    Only the end of all faults (`DELETE /me2b/chaos`) drops it.
    """

    kind: Literal["delay"] = "delay"
    seconds: Seconds


class Hang(_Value):
    """The request is taken and never answered, until the client leaves or the test releases it (then all goes on)."""

    kind: Literal["hang"] = "hang"


class Status(_Value):
    """Another answer. `body` None: the JSON error the API has for `status` (no body for 2xx)."""

    kind: Literal["status"] = "status"
    status: Annotated[int, Field(ge=200, le=599)]
    headers: Headers = Field(default_factory=dict)
    message: str | None = None
    body: Any = None


class Drop(_Value):
    """The connection ends without an answer: with a TCP reset, or closed as if all were said."""

    kind: Literal["drop"] = "drop"
    how: Literal["reset", "close"] = "reset"


class EmptyList(_Value):
    """No items and no next token."""

    kind: Literal["empty"] = "empty"


class StaleList(_Value):
    """The list as it was `calls` lists ago (as early as it is known, when there were fewer)."""

    kind: Literal["stale"] = "stale"
    calls: Annotated[int, Field(ge=1, le=20)] = 1


class LossyList(_Value):
    """Each item is missing with the probability `fraction`."""

    kind: Literal["lossy"] = "lossy"
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.5


class TruncatedList(_Value):
    """The first `keep` items and no next token, as if that were all."""

    kind: Literal["truncated"] = "truncated"
    keep: Annotated[int, Field(ge=0)] = 1


class RepeatingList(_Value):
    """Always the first page, always with a next token."""

    kind: Literal["repeating"] = "repeating"


class CutStream(_Value):
    """A stream ends early. What runs in the sandbox runs on.

    Before its end event (the command is over, nobody tells), or after `after_events` events (the start is the first;
    keepalives do not count), when the command may still run. `reset` and `close`: the connection; `end`: the stream
    ends as if in order, but without its end event; `truncated`: the body ends without the stream's own last word;
    `unavailable`: the stream ends with that error.
    """

    kind: Literal["cut"] = "cut"
    how: Literal["reset", "close", "end", "truncated", "unavailable"] = "reset"
    after_events: Annotated[int, Field(ge=1)] | None = None


class EarlyDeath(_Value):
    """The sandbox that this request creates dies by itself at the age of `age` seconds, whatever its timeout."""

    kind: Literal["early_death"] = "early_death"
    age: Seconds


class AccountCap(_Value):
    """With `limit` sandboxes running or starting, more are refused: 429, `maximum number of ... (limit)`."""

    kind: Literal["cap"] = "cap"
    limit: Annotated[int, Field(ge=0)]
    headers: Headers = Field(default_factory=dict)


class RateLimit(_Value):
    """More than `per_second` a second (less than one: one in `1 / per_second` seconds) are refused with 429.

    Refused requests do not count. `retry_after` is the header as it is sent; None sends none, `"auto"` the truth in
    whole seconds.
    """

    kind: Literal["rate"] = "rate"
    per_second: Annotated[float, Field(gt=0, le=1e6)]
    retry_after: HeaderValue | None = None


ListFault: TypeAlias = EmptyList | StaleList | LossyList | TruncatedList | RepeatingList
Fault: TypeAlias = Annotated[
    Delay | Hang | Status | Drop | ListFault | CutStream | EarlyDeath | AccountCap | RateLimit,
    Field(discriminator="kind"),
]

_PHASED = (Delay, Hang, Status, Drop)
_ONLY_FOR: Mapping[type[BaseModel], frozenset[str]] = {
    EmptyList: frozenset({"list"}),
    StaleList: frozenset({"list"}),
    LossyList: frozenset({"list"}),
    TruncatedList: frozenset({"list"}),
    RepeatingList: frozenset({"list"}),
    CutStream: STREAMS,
    EarlyDeath: frozenset({"create"}),
    AccountCap: frozenset({"create"}),
}


class Rule(_Value):
    """One thing that goes wrong.

    Requests are counted from 1, from the moment the rule came into force, and only those that the rule is about.
    It strikes those of the numbers `nth`, or of every `every`-th from `start` to `stop`, each with `probability`, and
    no more than `times` in all. `metadata` is a part of the sandbox's.
    """

    ops: Annotated[tuple[str, ...], Field(min_length=1)]
    fault: Fault
    phase: Phase = "before"
    nth: tuple[Annotated[int, Field(ge=1)], ...] = ()
    start: Annotated[int, Field(ge=1)] = 1
    stop: Annotated[int, Field(ge=1)] | None = None
    every: Annotated[int, Field(ge=1)] = 1
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    times: Annotated[int, Field(ge=1)] | None = None
    sandbox_id: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _makes_sense(self) -> Rule:
        possible = {op for pattern in self.ops for op in OPS if fnmatchcase(op, pattern)}
        for pattern in self.ops:
            if not any(fnmatchcase(op, pattern) for op in OPS):
                raise ValueError(f"no operation is called {pattern!r}; there are {', '.join(sorted(OPS))}")
        allowed = _ONLY_FOR.get(type(self.fault), OPS)
        if not possible <= allowed:
            raise ValueError(f"the fault {self.fault.kind!r} is for {', '.join(sorted(allowed))} only")
        if self.phase == "after" and not isinstance(self.fault, _PHASED):
            raise ValueError(f"the fault {self.fault.kind!r} has no before and after")
        if self.sandbox_id is not None and "create" in possible:
            raise ValueError("a create has no sandbox id yet: choose it by metadata")
        return self

    def is_about(self, op: str, sandbox_id: str | None, metadata: Mapping[str, str]) -> bool:
        """Whether a request is one of those that this rule counts."""
        return (
            any(fnmatchcase(op, pattern) for pattern in self.ops)
            and self.sandbox_id in (None, sandbox_id)
            and self.metadata.items() <= metadata.items()
        )

    def strikes(self, number: int, hits: int, dice: random.Random) -> bool:
        """Whether the request of that number is struck, after so many hits."""
        if self.times is not None and hits >= self.times:
            return False
        if self.nth:
            chosen = number in self.nth
        else:
            within = self.start <= number and (self.stop is None or number <= self.stop)
            chosen = within and (number - self.start) % self.every == 0
        return chosen and (self.probability >= 1 or dice.random() < self.probability)

    def __str__(self) -> str:
        """What the journal shows: `status 504 after`."""
        fault = self.fault
        values = [value for name, value in fault if name != "kind" and isinstance(value, str | int | float)]
        where = [self.phase] if isinstance(fault, _PHASED) else []
        return " ".join(map(str, [fault.kind, *values, *where]))


class Script(_Value):
    """All that goes wrong, and the seed of all chance. The same script and the same requests: the same faults."""

    seed: int = 0
    rules: tuple[Rule, ...] = ()
