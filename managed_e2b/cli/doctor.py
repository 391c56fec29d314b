"""`me2b doctor`: what this host and this configuration can and can't do, and how to fix it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import typer

from managed_e2b.cli.options import DEFAULT_DB, ApiUrl, AsJson, DataDir, Db
from managed_e2b.cli.output import console, print_json, table
from managed_e2b.errors import AuthenticationError, BackendError, ConfigError, LedgerError


class Check(Protocol):
    """One thing that was looked at; also what `managed_e2b.local.runtime.doctor` returns."""

    @property
    def name(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def detail(self) -> str: ...
    @property
    def fix(self) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class Finding:
    """A check of this module. `fix` says what to do when it is not ok."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None


def doctor(db: Db = DEFAULT_DB, api_url: ApiUrl = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Tell what this host can and can't do, and how to fix it.

    Looks at what the local server needs, at the endpoint and its key, and at the ledger.
    Exit code 1 when something is missing.
    """
    checks: list[Check] = [*local_server(data_dir), *endpoint(api_url), *ledger(db)]
    if as_json:
        print_json({"ok": all(check.ok for check in checks), "checks": [_as_dict(check) for check in checks]})
    else:
        rows = table("", "check", "what was found")
        for check in checks:
            fix = f"\n[yellow]fix:[/yellow] {check.fix}" if check.fix and not check.ok else ""
            rows.add_row("[green]ok[/green]" if check.ok else "[red]no[/red]", check.name, check.detail + fix)
        console().print(rows)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def local_server(data_dir: Path | None = None) -> Iterator[Check]:
    """What the local server needs of this host, with its files in `data_dir` (None: its own choice)."""
    try:
        from managed_e2b.local.runtime.doctor import examine
    except ModuleNotFoundError as error:
        yield Finding(
            "local server", False, f"the module {error.name!r} is missing", "pip install 'managed-e2b[local]'"
        )
        return
    yield from examine(data_dir)


def endpoint(api_url: str | None) -> Iterator[Check]:
    """The endpoint that is used without `backend="local"`, and whether it takes the key."""
    from managed_e2b.cli.reading import list_remote
    from managed_e2b.settings import get_e2b_config, load_env

    try:
        if not {**load_env(), **os.environ}.get("E2B_API_KEY"):
            yield Finding("endpoint", True, "no E2B_API_KEY: only the local server can be used (--backend local)")
            return
        config = get_e2b_config(e2b_api_url=api_url)
    except ConfigError as error:
        yield Finding("endpoint", False, str(error), "correct the variable, in the environment or in .env")
        return
    try:
        count = len(list_remote(config))
    except AuthenticationError as error:
        yield Finding("endpoint", False, str(error), "set E2B_API_KEY to a key of this endpoint")
    except BackendError as error:
        yield Finding("endpoint", False, str(error), "check E2B_API_URL; is the server running (me2b serve)?")
    else:
        yield Finding("endpoint", True, f"{config.endpoint} takes the key and lists {count} sandboxes")


def ledger(db: str) -> Iterator[Check]:
    """Whether the ledger can be opened; one that is not there yet is none of our making."""
    from managed_e2b.cli.reading import OPEN, ledger_records

    try:
        records = ledger_records(db, OPEN)
    except LedgerError as error:
        yield Finding("ledger", False, str(error), "correct it, or name another one with --db")
    else:
        found = " is not there yet; the first acquire makes it" if records is None else f": {len(records)} open rows"
        yield Finding("ledger", True, f"{db}{found}")


def _as_dict(check: Check) -> dict[str, Any]:
    return {"name": check.name, "ok": check.ok, "detail": check.detail, "fix": check.fix}
