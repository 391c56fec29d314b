"""Who and where this process is, as the ledger tells owners apart."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import time
import uuid
from pathlib import Path

from ..models import UNKNOWN, Host, Owner
from ..rules import liveness


@functools.cache
def here() -> Host:
    """The identity of this host. The machine id is hashed: systemd asks that it is not given away as it is."""
    machine = (
        _read("/etc/machine-id") or _read("/var/lib/dbus/machine-id") or f"{socket.gethostname()}-{uuid.getnode()}"
    )
    boot = _read("/proc/sys/kernel/random/boot_id") or UNKNOWN
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = UNKNOWN
    return Host(hashlib.sha256(f"managed-e2b {machine}".encode()).hexdigest()[:32], boot, namespace)


def steady() -> float:
    """Seconds on a clock that nobody sets; it goes on while the host sleeps, where there is one that does."""
    return time.clock_gettime(_STEADY) if _STEADY is not None else time.monotonic()


_STEADY: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def process_started(pid: int) -> int | None:
    """The kernel's start time of a process, in clock ticks since boot; None when there is none, or only a zombie."""
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return None
    # The command name is in parentheses and may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else started


def is_gone(owner: Owner) -> bool:
    """Whether the owner's process is seen to have ended. False where it cannot be seen from here."""
    return liveness.sees_its_process(owner, here()) and process_started(owner.pid) != owner.pid_started


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
