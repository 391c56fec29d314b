"""How large sandboxes are: as their template asks, else as the server gives; and what answers show of that."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Protocol

from managed_e2b.local.runtime.limits import Enforced, Limits

MB = 1024 * 1024

SMALLEST_MEMORY_MB = 16
"""Less does not even hold a shell."""
SMALLEST_PIDS = 16
SMALLEST_CPUS = 0.01
_ENDLESS = 1_000_000
"""More than any host has, and no number that a kernel refuses: CPUs, processes, or MB."""


@dataclass(frozen=True)
class Sizes:
    """What a sandbox gets whose template does not ask for anything else.

    `cpus` are upstream's two. Memory is more than upstream's 512 MB: what is not used costs nothing here, and builds of
    ordinary projects die with so little. A sandbox may use `pids` processes and threads. No file of it is larger than
    `disk_mb`: all of them together no host can bound without quotas that its filesystem was made for.
    """

    cpus: float = 2.0
    memory_mb: int = 4096
    disk_mb: int = 10240
    pids: int = 4096

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not self.cpus >= SMALLEST_CPUS:
            raise ValueError(f"a sandbox needs at least {SMALLEST_CPUS} of a CPU")
        if self.memory_mb < SMALLEST_MEMORY_MB:
            raise ValueError(f"a sandbox needs at least {SMALLEST_MEMORY_MB} MB of memory")
        if self.disk_mb < 1:
            raise ValueError("a sandbox needs at least 1 MB of disk")
        if self.pids < SMALLEST_PIDS:
            raise ValueError(f"a sandbox needs at least {SMALLEST_PIDS} processes")

    def limits(self, cpu_count: int | None = None, memory_mb: int | None = None) -> Limits:
        """Of a sandbox whose template asks for that many CPUs and that much memory; None: it does not ask."""
        memory = min(max(SMALLEST_MEMORY_MB, memory_mb or self.memory_mb), _ENDLESS)
        cpus = min(float(cpu_count or self.cpus), _ENDLESS)
        return Limits(memory * MB, cpus, min(self.pids, _ENDLESS), min(self.disk_mb, _ENDLESS) * MB)


class Asked(Protocol):
    """What a template, or a sandbox made of it, asks for. None: nothing of its own."""

    @property
    def cpu_count(self) -> int | None: ...
    @property
    def memory_mb(self) -> int | None: ...


@dataclass(frozen=True)
class Size:
    """As answers show it, in whole CPUs and MB."""

    cpu_count: int
    memory_mb: int
    disk_mb: int


def shown(limits: Limits, enforced: Enforced) -> Size:
    """What a sandbox with these limits can really use on this host: the host's own, where a limit is not enforced."""
    kept = enforced.kept(limits)
    cpus, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Size(
        min(cpus, math.ceil(kept.cpus or cpus)),
        min(memory, kept.memory or memory) // MB,
        enforced.disk_bytes // MB,
    )
