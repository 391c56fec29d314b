"""What the ledger's rows are in the models."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row

from ..models import Host, Owner, SandboxRecord, State


def owner(row: Row[Any]) -> Owner:
    return Owner(
        id=row.id,
        host=Host(row.machine_id, row.boot_id, row.pid_namespace),
        pid=row.pid,
        pid_started=row.pid_started,
        label=row.label,
        heartbeat=row.heartbeat,
        stale_after=row.stale_after,
        closed_at=row.closed_at,
    )


def record(row: Row[Any]) -> SandboxRecord:
    values: dict[str, Any] = {name: row._mapping[name] for name in SandboxRecord.__dataclass_fields__}
    values["state"] = State(values["state"])
    return SandboxRecord(**values)
