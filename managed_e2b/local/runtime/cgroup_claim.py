"""Where this server may have control groups of its own: found, tried, and told why not.

Version 1: below the group that the server is in, in each hierarchy that is of use. Version 2: in the nearest group
above or at the server's that is ours to write to and hands its controllers down; the kernel allows no group to have
both processes and controllers for groups below it. systemd gives such a place to an ordinary user.

Standard library only; runs in a fork of the spawner.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from managed_e2b.local.runtime import cgroups
from managed_e2b.local.runtime.cgroups import Tree
from managed_e2b.local.runtime.limits import lacking

_OF_USE = frozenset({"memory", "pids", "cpu", "cpuacct"})
_PROTECTS = frozenset({"memory", "pids"})  # the others on the host; cpu time is only shared more fairly


@dataclass(frozen=True)
class Mount:
    """One mounted hierarchy. `own` is the directory of the group that a process is in, at or below `top`."""

    top: str
    own: str
    version: int
    controllers: frozenset[str]


def mounts(mountinfo: str, own_groups: str) -> list[Mount]:
    """Those of use, from the texts of /proc/PID/mountinfo and /proc/PID/cgroup. One in which the process's own group
    cannot be seen is left out.
    """
    paths: dict[str, str] = {}
    for line in own_groups.splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)  # version 2 has no names: ""
    found: list[Mount] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(" "), right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        version = 1 if kind == "cgroup" else 2
        controllers = _OF_USE.intersection(options.split(",")) if version == 1 else frozenset()
        if version == 1 and not controllers:
            continue
        path = paths.get(min(controllers, default=""), "/..")
        root = "" if fields[3] == "/" else fields[3]
        if not f"{path}/".startswith(f"{root}/") or "/../" in f"{path}/":
            continue
        top = _plain(fields[4])
        mount = Mount(top, f"{top}{path.removeprefix(root)}".rstrip("/"), version, controllers)
        if not any(mount.controllers == other.controllers and mount.version == other.version for other in found):
            found.append(mount)
    return found


def _plain(text: str) -> str:
    """A path of mountinfo, which writes white space as octal numbers."""
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape") if "\\" in text else text


def claim(name: str, server: Sequence[int]) -> dict[str, Any]:
    """Directories of that name, tried: `{"trees": lists as of Tree, "missing": sentences}`.

    `server`: the pids of the server and of what it has started. What a spawner of it that died has claimed stays, but
    for the groups in there: all its sandboxes are dead, or dying.
    """
    trees: list[Tree] = []
    refused: set[str] = set()
    found = mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    for mount in sorted(found, key=lambda mount: -mount.version):  # version 2 first: it kills, and so frees the others
        try:
            trees.append(_below(mount.own, name, mount) if mount.version == 1 else _in_version_2(mount, name, server))
        except OSError as error:
            refused.add(error.strerror or str(error))
    missing = lacking(frozenset().union(*(tree.controllers for tree in trees)))
    if not found:
        refused = {"none are mounted here"}
    why = ", ".join(sorted(refused)) or "the server's own group does not hand them down"
    said = [f"no control groups of its own for {', '.join(missing)}: {why}"] if missing else []
    return {"trees": [tree.as_list() for tree in trees], "missing": said}


def _below(parent: str, name: str, mount: Mount) -> Tree:
    """A tree in a group, proved by a process that joins a group of it. Raises OSError."""
    directory = f"{parent}/{name}"
    _mkdir(directory)
    try:
        cgroups.empty_tree(directory)
        controllers = mount.controllers if mount.version == 1 else _hand_down(directory)
        if mount.version == 1 and "cpu" in controllers:
            _weigh(directory)
        _try_to_join(f"{directory}/probe")
    except OSError:
        cgroups.remove_tree(directory)
        raise
    return Tree(directory, mount.version, controllers)


def _mkdir(directory: str) -> None:
    with contextlib.suppress(FileExistsError):  # of a spawner of this server that died
        os.mkdir(directory, 0o755)


def _try_to_join(directory: str) -> None:
    _mkdir(directory)
    pid = os.fork()
    if not pid:
        status = 255
        try:
            cgroups.write(f"{directory}/cgroup.procs", "0")
            status = 0
        except OSError as error:
            status = error.errno or status
        finally:
            os._exit(status)
    _, ended = os.waitpid(pid, 0)
    cgroups.remove_group(directory)
    if ended:
        number = os.waitstatus_to_exitcode(ended)
        raise OSError(number, os.strerror(number))


def _weigh(directory: str) -> None:
    """All sandboxes together compete with each single process beside them: let them have the weight of the host."""
    with contextlib.suppress(FileNotFoundError):
        cgroups.write(f"{directory}/cpu.shares", str(1024 * (os.cpu_count() or 1)))


def _hand_down(directory: str) -> frozenset[str]:
    """Let groups below an (empty) group have its controllers; those of use that they then have."""
    there = set(Path(f"{directory}/cgroup.controllers").read_text().split())
    for controller in sorted(_OF_USE & there):
        with contextlib.suppress(OSError):  # seen in what they have
            cgroups.write(f"{directory}/cgroup.subtree_control", f"+{controller}")
    return _OF_USE.intersection(Path(f"{directory}/cgroup.subtree_control").read_text().split())


def _in_version_2(mount: Mount, name: str, server: Sequence[int]) -> Tree:
    """In the nearest group that protects the host; else in the one that does most. Raises OSError."""
    best: Tree | None = None
    refused: OSError = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if mount.own.endswith(f"/{name}-server"):  # an earlier spawner has made room
        mount = replace(mount, own=os.path.dirname(mount.own))
    for parent in _upwards(mount):
        if not all(os.access(path, os.W_OK) for path in (parent, f"{parent}/cgroup.procs")):
            continue
        if parent == mount.own:
            _make_room(parent, name, server)
        try:
            tree = _below(parent, name, mount)
        except OSError as error:
            refused = error
            continue
        worse = tree
        if best is None or len(tree.controllers) > len(best.controllers):
            worse, best = best or tree, tree
        if worse is not best:
            cgroups.remove_tree(worse.directory)
        if best.controllers >= _PROTECTS:
            break
    if best is None:
        raise refused
    return best


def _upwards(mount: Mount) -> Iterator[str]:
    directory = mount.own
    while True:
        yield directory
        if directory == mount.top or not directory.startswith(f"{mount.top}/"):
            return
        directory = os.path.dirname(directory)


def _make_room(own: str, name: str, server: Sequence[int]) -> None:
    """A group that holds only the server, as systemd's Delegate= makes one: the server moves into one below it, and
    the controllers can be handed down.
    """
    controllers = _OF_USE.intersection(Path(f"{own}/cgroup.controllers").read_text().split())
    handed = set(Path(f"{own}/cgroup.subtree_control").read_text().split())
    inside = {int(pid) for pid in Path(f"{own}/cgroup.procs").read_text().split()}
    if controllers <= handed or not inside <= {*server, os.getpid()}:
        return
    home = f"{own}/{name}-server"
    with contextlib.suppress(OSError):  # seen in what is handed down
        _mkdir(home)
        for pid in inside:
            cgroups.write(f"{home}/cgroup.procs", str(pid))
        for controller in sorted(controllers - handed):
            cgroups.write(f"{own}/cgroup.subtree_control", f"+{controller}")
