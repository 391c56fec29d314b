"""Whether an owner still lives: by its process on the same host, by its heartbeat from anywhere else."""

from __future__ import annotations

from ..models import UNKNOWN, Host, Owner


def is_alive(owner: Owner, here: Host, observed_start: int | None, now: int) -> bool:
    """Judge an owner at `now` on the ledger's clock.

    `observed_start` is the start time of the process that has the owner's pid on this host now, None when
    there is none. It is looked at only when `sees_its_process`. A recycled pid has another start time.
    """
    if owner.closed_at is not None:
        return False
    if sees_its_process(owner, here):
        return observed_start == owner.pid_started
    # Not "same machine, another boot: dead": images and cloned machines carry one machine id to many hosts.
    return now - owner.heartbeat <= owner.stale_after


def sees_its_process(owner: Owner, here: Host) -> bool:
    """Whether the owner's pid means on this host what it meant to the owner, and can be looked up here."""
    return owner.host == here and UNKNOWN not in (here.boot_id, here.pid_namespace) and owner.pid_started > 0
