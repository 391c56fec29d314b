"""What holds one sandbox to its limits: its control groups, and resource limits where a host has none.

Standard library only; runs in the spawner and its forks.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from managed_e2b.local.runtime import cgroups
from managed_e2b.local.runtime.cgroups import Tree
from managed_e2b.local.runtime.limits import Limits

MOST_PROCESSES = 8192  # of one user in one sandbox, or of a whole one with an owner of its own; a fork bomb ends there
_OPEN_FILES = 1024  # the usual soft limit; a program may raise it


@dataclass(frozen=True)
class Confinement:
    """`group`: the name of its directory in each tree."""

    group: str
    trees: Sequence[Tree]
    limits: Limits

    @classmethod
    def parse(cls, group: str, trees: Sequence[Tree], limits: dict[str, Any]) -> Confinement:
        """Raises TypeError or ValueError for anything that is not a limit."""
        found = Limits(**limits)
        values = (found.memory, found.cpus, found.pids, found.file)
        if not all(value is None or (isinstance(value, (int, float)) and value > 0) for value in values):
            raise ValueError("a limit must be positive")
        return cls(group, trees, found)

    @property
    def most_processes(self) -> int:
        return min(MOST_PROCESSES, self.limits.pids or MOST_PROCESSES)

    def make(self) -> None:
        """Its groups, with this process in them. Raises OSError."""
        cgroups.make(self.trees, self.group)

    def apply(self) -> None:
        """Let its groups have the limits. Raises OSError."""
        cgroups.limit(self.trees, self.group, self.limits)

    def join(self) -> None:
        """Every process of the sandbox does it before it enters the namespaces, from where no group can be seen."""
        cgroups.join(self.trees, self.group)

    def limit_resources(self) -> None:
        """Of this process and those that it will start. Once inside, as its root."""
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(_OPEN_FILES, files), files))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _lower(resource.RLIMIT_NPROC, self.most_processes)
        self.limit_file_size()

    def limit_file_size(self) -> None:
        if self.limits.file is not None:
            _lower(resource.RLIMIT_FSIZE, self.limits.file)

    def freezer(self) -> str | None:
        """The directory of its group that can be frozen, if there is one."""
        tree = cgroups.freezer(self.trees)
        return None if tree is None else f"{tree.directory}/{self.group}"

    def end(self) -> None:
        """Let nothing of it stand still that is to die. Raises OSError."""
        group = self.freezer()
        if group is not None:
            cgroups.end(group)

    def usage(self) -> dict[str, int]:
        """`cgroups.usage`."""
        return cgroups.usage(self.trees, self.group)


def _lower(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    value = most if hard == resource.RLIM_INFINITY else min(hard, most)
    resource.setrlimit(what, (value, value))
