"""What may be a volume's name, and where in a sandbox volumes may be mounted. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from managed_e2b.local.runtime.volumes import MOST_MOUNTS

MAX_NAME = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_TAKEN = frozenset({"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sbin", "sys", "usr"})
"""Top directories that a sandbox cannot do without, or that are mounts themselves."""
_MAX_PATH = 1024


@dataclass(frozen=True)
class VolumeMount:
    """A volume, by its name, at a path of a sandbox; `volume_id` is whose name that was when it was asked for."""

    name: str
    path: str
    volume_id: str


def is_name(name: str) -> bool:
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def path_problem(path: str) -> str | None:
    """Why nothing can be mounted there, in upstream's words where it has some; None: it can."""
    if not path:
        return "path cannot be empty"
    if not path.startswith("/"):
        return "path must be absolute"
    if posixpath.normpath(path) != path or path.startswith("//"):
        return "path must not contain any '.' or '..' components"
    if "\0" in path or len(path.encode("utf-8", "replace")) > _MAX_PATH:
        return f"path must not hold a NUL and have at most {_MAX_PATH} bytes"
    if path == "/" or path.split("/")[1] in _TAKEN:
        return f"path '{path}' is the system's"
    return None


def mount_problems(paths: Sequence[str]) -> list[str]:
    """What is wrong with mounts at these paths of one sandbox, if anything: a line for each."""
    if len(paths) > MOST_MOUNTS:
        return [f"at most {MOST_MOUNTS} volumes can be mounted in one sandbox"]
    problems = []
    for number, path in enumerate(paths):
        others = paths[:number]
        problem = path_problem(path)
        if problem is None and path in others:
            problem = f"path '{path}' is already used"
        if problem is None:
            nested = [other for other in others if other.startswith(f"{path}/") or path.startswith(f"{other}/")]
            problem = f"path '{path}' and '{nested[0]}' lie within each other" if nested else None
        if problem is not None:
            problems.append(f"volume mount #{number}: {problem}")
    return problems
