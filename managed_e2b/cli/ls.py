"""`me2b ls`: the sandboxes that the ledger knows and, when asked for, those that the backend lists."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from managed_e2b.cli.options import DEFAULT_DB, ApiUrl, AsJson, Db
from managed_e2b.cli.output import console, duration, message, print_json, table
from managed_e2b.models import RemoteSandbox, SandboxRecord, State

_MICROSECONDS = 1_000_000
_TIMES = (
    "hard_deadline",
    "remote_expiry",
    "claimed_at",
    "queued_at",
    "creating_at",
    "running_at",
    "cleaning_at",
    "ended_at",
    "started_at",
    "end_at",
)


def ls(
    db: Db = DEFAULT_DB,
    api_url: ApiUrl = None,
    show_all: Annotated[bool, typer.Option("--all", "-a", help="Also rows that are closed.")] = False,
    state: Annotated[
        list[State] | None, typer.Option("--state", help="Only rows in this state; may be repeated.")
    ] = None,
    remote: Annotated[bool, typer.Option("--remote", help="Also ask the backend for its own list.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the ledger's sandboxes; with --remote also the backend's own list.

    Without --all or --state these are the rows that are not closed: what is wanted, running, or being cleaned.
    """
    from managed_e2b.cli.reading import OPEN, ledger_records, list_remote
    from managed_e2b.settings import get_e2b_config

    listed = list_remote(get_e2b_config(e2b_api_url=api_url)) if remote else None
    records = ledger_records(db, state or (None if show_all else OPEN))
    if as_json:
        print_json({"ledger": _plain(records or []), "remote": None if listed is None else _plain(listed)})
        return
    if records is None:
        message(f"{db} is not there yet: nothing was acquired with this ledger (--db names another)")
    else:
        _show_records(records, is_everything=show_all)
    if listed is not None:
        _show_remote(listed)


def _show_records(records: Sequence[SandboxRecord], *, is_everything: bool) -> None:
    if not records:
        message(
            "no sandboxes in the ledger"
            if is_everything
            else "no open sandboxes in the ledger (--all shows closed ones)"
        )
        return
    now = time.time_ns() // 1000
    rows = table("SANDBOX", "STATE", "SOURCE", "AGE", "ENDS IN", "OWNER", "WHY", "METADATA")
    for record in records:
        ended = record.ended_at is not None
        why = "; ".join(part for part in (record.reason, record.last_error) if part)
        rows.add_row(
            record.sandbox_id or "-",
            record.state,
            record.source if record.source_kind == "template" else f"{record.source_kind}: {record.source}",
            duration((now - record.queued_at) / _MICROSECONDS),
            "-" if ended or record.hard_deadline is None else duration((record.hard_deadline - now) / _MICROSECONDS),
            record.owner[:12],
            why or "-",
            _pairs(record.metadata),
        )
    console().print(rows)


def _show_remote(listed: Sequence[RemoteSandbox]) -> None:
    if not listed:
        message("the backend lists no sandboxes")
        return
    now = time.time_ns() // 1000
    rows = table("SANDBOX", "STATE", "TEMPLATE", "AGE", "ENDS IN", "METADATA", title="The backend's own list")
    for sandbox in listed:
        rows.add_row(
            sandbox.sandbox_id,
            sandbox.state,
            sandbox.template,
            duration((now - sandbox.started_at) / _MICROSECONDS),
            duration((sandbox.end_at - now) / _MICROSECONDS),
            _pairs(sandbox.metadata),
        )
    console().print(rows)


def _pairs(metadata: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(metadata.items())) or "-"


def _plain(values: Sequence[SandboxRecord] | Sequence[RemoteSandbox]) -> list[dict[str, Any]]:
    """As JSON wants it: times as ISO 8601 in UTC instead of microseconds."""
    made = []
    for value in values:
        fields = dataclasses.asdict(value)
        for name in _TIMES:
            if fields.get(name) is not None:
                fields[name] = datetime.fromtimestamp(fields[name] / _MICROSECONDS, UTC).isoformat()
        made.append(fields)
    return made
