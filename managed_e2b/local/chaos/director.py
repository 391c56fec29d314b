"""Which rules strike a request. No I/O and no clock: the same script and the same requests give the same plans."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from managed_e2b.local.chaos.rules import (
    AccountCap,
    CutStream,
    Delay,
    Drop,
    EarlyDeath,
    Fault,
    Hang,
    ListFault,
    RateLimit,
    Rule,
    Script,
    Status,
)

Step: TypeAlias = Delay | Hang | Status | Drop
"""What can happen on one side of the effect."""


@dataclass(frozen=True)
class Subject:
    """A request as rules see it. `replay`: its effect happened before, and an idempotency key says so."""

    op: str
    sandbox_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    replay: bool = False


@dataclass(frozen=True)
class World:
    """What limits look at: how many sandboxes run or start now, and monotonic seconds."""

    live: int
    now: float


@dataclass
class Plan:
    """What happens to one request. A `Status` or `Drop` ends its side; before the effect it also prevents that."""

    before: list[Step] = field(default_factory=list)
    after: list[Step] = field(default_factory=list)
    lists: list[tuple[ListFault, random.Random]] = field(default_factory=list)
    cut: CutStream | None = None
    death: float | None = None
    struck: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """Whether the answer is decided and the effect does not happen."""
        return _is_final(self.before)


@dataclass
class Standing:
    """A rule in force: how many requests it was about, how many of these it struck."""

    id: int
    rule: Rule
    seen: int = 0
    hits: int = 0
    admitted: deque[float] = field(default_factory=deque)
    """When a rate limit let requests pass, as far back as matters."""


class Director:
    """The rules in force and their counts."""

    def __init__(self, script: Script) -> None:
        self._next_id = 1
        self._standing: dict[int, Standing] = {}
        self.seed = script.seed
        self.play(script)

    def __iter__(self) -> Iterator[Standing]:
        return iter(self._standing.values())

    def play(self, script: Script) -> None:
        """Replace all rules and the seed; ids and counts begin anew."""
        self._next_id = 1
        self._standing.clear()
        self.seed = script.seed
        for rule in script.rules:
            self.add(rule)

    def add(self, rule: Rule) -> Standing:
        """Put a rule in force, after the others."""
        standing = Standing(self._next_id, rule)
        self._standing[standing.id] = standing
        self._next_id += 1
        return standing

    def remove(self, rule_id: int) -> bool:
        """Take a rule out of force; False when there is none of that id."""
        return self._standing.pop(rule_id, None) is not None

    def plan(self, subject: Subject, world: World) -> Plan:
        """Count a request and decide what happens to it."""
        plan = Plan()
        admissions: list[Standing] = []
        for standing in self._standing.values():
            if not standing.rule.is_about(subject.op, subject.sandbox_id, subject.metadata):
                continue
            standing.seen += 1
            # by rule and number, so that other requests in between change nothing
            dice = random.Random(f"{self.seed}/{standing.id}/{standing.seen}")
            if plan.refused or not standing.rule.strikes(standing.seen, standing.hits, dice):
                continue
            fault = self._in_force(standing, subject, world)
            if fault is None:
                if isinstance(standing.rule.fault, RateLimit):
                    admissions.append(standing)
            elif _enter(plan, fault, standing.rule, dice):
                standing.hits += 1
                plan.struck.append(str(standing.rule))
        if not plan.refused:
            for standing in admissions:
                standing.admitted.append(world.now)
        return plan

    def _in_force(self, standing: Standing, subject: Subject, world: World) -> Fault | None:
        """The fault, limits turned into the refusal that they are at this moment, if they are one."""
        fault = standing.rule.fault
        match fault:
            case AccountCap():
                if subject.replay or world.live < fault.limit:
                    return None
                message = f"you have reached the maximum number of concurrent sandboxes ({fault.limit})"
                return Status(status=429, message=message, headers=fault.headers)
            case RateLimit():
                wait = _until_room(standing.admitted, fault.per_second, world.now)
                if wait <= 0:
                    return None
                value = str(math.ceil(wait)) if fault.retry_after == "auto" else fault.retry_after
                return Status(
                    status=429, message="Rate limit exceeded", headers={} if value is None else {"Retry-After": value}
                )
            case _:
                return fault


def _is_final(steps: list[Step]) -> bool:
    return bool(steps) and isinstance(steps[-1], Status | Drop)


def _enter(plan: Plan, fault: Fault, rule: Rule, dice: random.Random) -> bool:
    """Write a fault into the plan; False when an earlier one leaves it no room."""
    match fault:
        case Delay() | Hang() | Status() | Drop():
            side = plan.after if rule.phase == "after" else plan.before
            if _is_final(side):
                return False
            side.append(fault)
        case CutStream():
            if plan.cut is not None:
                return False
            plan.cut = fault
        case EarlyDeath():
            plan.death = fault.age if plan.death is None else min(plan.death, fault.age)
        case AccountCap() | RateLimit():
            raise AssertionError("limits are decided before")
        case _:
            plan.lists.append((fault, dice))
    return True


def _until_room(admitted: deque[float], per_second: float, now: float) -> float:
    """Seconds until one more may pass: no window of a second (or of `1 / per_second`) holds more than allowed."""
    window = max(1.0, 1 / per_second)
    allowed = max(1, math.floor(per_second * window + 1e-9))
    while admitted and now - admitted[0] >= window:
        admitted.popleft()
    return 0.0 if len(admitted) < allowed else admitted[-allowed] + window - now
