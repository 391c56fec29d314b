"""Whether an owner still lives: by its process on the same host, by its heartbeat from anywhere else."""

from __future__ import annotations

from ..models import Host, Owner


def is_alive(owner: Owner, here: Host, observed_start: int | None, now: int) -> bool:
    """Judge an owner at `now` on the ledger's clock.

    `observed_start` is the start time of the process that has the owner's pid on this host now, None when
    there is none. It is looked at only when `sees_its_process`. A recycled pid has another start time.
    """
    if owner.closed_at is not None:
        return False
    if sees_its_process(owner, here):
        return observed_start == owner.pid_started
    if owner.host.machine_id == here.machine_id and owner.host.boot_id != here.boot_id:
        return False  # this machine has been restarted since
    return now - owner.heartbeat <= owner.stale_after


def sees_its_process(owner: Owner, here: Host) -> bool:
    """Whether the owner's pid means on this host what it meant to the owner."""
    return owner.host == here
