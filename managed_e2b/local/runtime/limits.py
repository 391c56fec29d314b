"""What a sandbox may use, and which of it a host enforces. Values only; standard library only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one sandbox, all its processes together. None: no limit.

    `memory` in bytes, files in its /dev/shm included; `cpus` in cores' worth of time; `pids` counts processes and
    threads; `file` in bytes is the size of its largest file. What cannot be enforced on this host is `Enforced`'s to
    tell.
    """

    memory: int | None = None
    cpus: float | None = None
    pids: int | None = None
    file: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Enforced:
    """How this host keeps sandboxes to their limits. `missing` says, for people, why it does not keep others.

    `disk_bytes`: the size of the filesystem that their files are in.
    """

    controllers: frozenset[str] = frozenset()
    freezer: bool = False
    disk_bytes: int = 0
    missing: tuple[str, ...] = ()

    def kept(self, limits: Limits) -> Limits:
        """Those of the limits that are enforced."""
        return Limits(
            limits.memory if "memory" in self.controllers else None,
            limits.cpus if "cpu" in self.controllers else None,
            limits.pids,
            limits.file,
        )

    def describe(self) -> str:
        """For people."""
        kept = {"memory": "memory", "cpu": "cpu", "pids": "processes"}
        by_groups = [word for controller, word in kept.items() if controller in self.controllers]
        parts = [f"{', '.join(by_groups)} by control groups"] if by_groups else []
        if "pids" not in self.controllers:
            parts.append("processes by RLIMIT_NPROC")
        parts.append("the size of a file by RLIMIT_FSIZE")
        others = [kept[controller] for controller in ("memory", "cpu") if controller not in self.controllers]
        parts.append(f"not enforced: {', '.join([*others, 'disk as a whole'])}")
        parts.append("pause by the control group freezer" if self.freezer else "pause by SIGSTOP")
        return "; ".join(parts)


def lacking(controllers: Collection[str]) -> list[str]:
    """Controllers that are wanted and not there."""
    return [name for name in ("memory", "pids", "cpu") if name not in controllers]
