"""Which ids of the host stand for the ids inside a sandbox.

Inside there are root (0) and `user` (1000); on the host both are nobody in particular. Root of the host maps a range
far from every id in use; an ordinary user maps themselves to root and a range of /etc/subuid to the rest. Where
neither can be had, a single id is mapped: everything in the sandbox then runs as that one, `user` included.
"""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from managed_e2b.local.runtime.userns import OWNERS

RANGE = 65536
_SMALLEST_RANGE = 1001  # ids 0…1000
# Above what SSSD and systemd hand out (2000200000), below systemd's foreign ids (2147352576).
_ROOT_BASE = 2_100_000_000
_OWNERS_BASE = _ROOT_BASE + RANGE

Extent = tuple[int, int, int]  # first id inside, first id outside, how many


@dataclass(frozen=True)
class IdMap:
    """`via`: "write" by root itself, "helpers" by newuidmap and newgidmap, "single" by the user itself.

    `owners`: the first of OWNERS ids of which each sandbox gets one to be counted by (`userns.enter_new`), or None.
    """

    uids: tuple[Extent, ...]
    gids: tuple[Extent, ...]
    via: Literal["write", "helpers", "single"]
    owners: int | None = None

    @property
    def full(self) -> bool:
        """Whether `user` has an id of its own."""
        return sum(extent[2] for extent in self.uids) >= _SMALLEST_RANGE

    @property
    def root_uid(self) -> int:
        """Root of the sandboxes, as the host sees it."""
        return self.uids[0][1]

    @property
    def root_gid(self) -> int:
        return self.gids[0][1]


def detect() -> IdMap:
    """The best map that this process can have written."""
    if os.geteuid() == 0:
        return root_map(_own_map("uid"), _own_map("gid"))
    return user_map(
        os.geteuid(),
        os.getegid(),
        subordinate(_read("/etc/subuid"), os.geteuid()),
        subordinate(_read("/etc/subgid"), os.geteuid()),
        helpers=bool(shutil.which("newuidmap") and shutil.which("newgidmap")),
    )


def root_map(own_uids: list[Extent], own_gids: list[Extent]) -> IdMap:
    """For root, whose own namespace has these ids: a range of them that nothing uses, never the host's root.

    Root of a namespace with a single id is an ordinary user outside, and maps that.
    """
    if all(extent[2] == 1 for extent in (*own_uids, *own_gids)):
        return IdMap(((0, own_uids[0][0], 1),), ((0, own_gids[0][0], 1),), "single")
    uid_base, uid_count = _free_range(own_uids)
    gid_base, gid_count = _free_range(own_gids)
    count = min(uid_count, gid_count)
    owners = _OWNERS_BASE if _has(own_uids, _OWNERS_BASE, OWNERS) else None
    return IdMap(((0, uid_base, count),), ((0, gid_base, count),), "write", owners)


def _free_range(own: list[Extent]) -> tuple[int, int]:
    if _has(own, _ROOT_BASE, RANGE):
        return _ROOT_BASE, RANGE
    # A container with few ids: take the end of its longest run, and never id 0.
    first, _, count = max(own, key=lambda extent: extent[2])
    size = min(RANGE, max(count - 1, 1))
    if size < _SMALLEST_RANGE:
        return max(first + count - 1, 1), 1
    return first + count - size, size


def _has(own: list[Extent], wanted: int, size: int) -> bool:
    return any(first <= wanted and first + count >= wanted + size for first, _, count in own)


def user_map(uid: int, gid: int, subuid: Extent | None, subgid: Extent | None, *, helpers: bool) -> IdMap:
    """For an ordinary user: themselves as root, and the subordinate range if it can be used and suffices."""
    if helpers and subuid and subgid and min(subuid[2], subgid[2]) >= _SMALLEST_RANGE - 1:
        count = min(subuid[2], subgid[2], RANGE - 1)
        return IdMap(((0, uid, 1), (1, subuid[1], count)), ((0, gid, 1), (1, subgid[1], count)), "helpers")
    return IdMap(((0, uid, 1),), ((0, gid, 1),), "single")


def subordinate(text: str, uid: int) -> Extent | None:
    """The longest range that /etc/subuid (or subgid) gives to a user, by name or by number."""
    try:
        names = {str(uid), pwd.getpwuid(uid).pw_name}
    except KeyError:
        names = {str(uid)}
    found: Extent | None = None
    for line in text.splitlines():
        fields = line.strip().split(":")
        if len(fields) == 3 and fields[0] in names and fields[1].isdecimal() and fields[2].isdecimal():
            extent = (1, int(fields[1]), int(fields[2]))
            if found is None or extent[2] > found[2]:
                found = extent
    return found


def _own_map(kind: str) -> list[Extent]:
    lines = _read(f"/proc/self/{kind}_map").splitlines()
    return [(int(inside), int(outside), int(count)) for inside, outside, count in map(str.split, lines)]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""  # no such file: no ranges
