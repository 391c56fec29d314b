"""`me2b reap`: finish now, or again and again, what owners that died have left."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from managed_e2b.cli.options import DEFAULT_DB, ApiUrl, AsJson, Backend, Db
from managed_e2b.cli.output import console, duration, message, print_json, table
from managed_e2b.errors import BackendError, LedgerError, ValidationError

if TYPE_CHECKING:
    from managed_e2b.models import ReapReport

EVERY = 30.0
"""Seconds between two passes of `--watch`."""

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def reap(
    seconds: Annotated[
        float | None,
        typer.Argument(min=1, metavar="[SECONDS]", help=f"With --watch: between two passes. Default: {EVERY:g}."),
    ] = None,
    db: Db = DEFAULT_DB,
    api_url: ApiUrl = None,
    backend: Backend = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Make a pass every SECONDS (30), until it is interrupted.")
    ] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Also sandboxes of this key that no live owner of this ledger has.")
    ] = False,
    metadata: Annotated[
        list[str] | None, typer.Option("--metadata", metavar="KEY=VALUE", help="Only with this pair; may be repeated.")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", metavar="NAME", help="Only those made from this template.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="TIME", help="Only those created so long ago: 90, 15m, 2h, 1d."),
    ] = None,
    include_other_ledgers: Annotated[
        bool,
        typer.Option(
            "--include-other-ledgers",
            help="With --foreign and --older-than: also those of owners that this ledger does not know, of whom nobody "
            "here can tell whether they live.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="End nothing; tell what would be.")] = False,
    as_json: AsJson = False,
) -> None:
    """Kill, and prove dead, what owners that died have left; with --foreign also what nobody here owns.

    Sandboxes whose owner lives are not touched. Exit code 1 when something could not be proved dead yet; a later pass
    tries again. With --watch --json each pass is one line of JSON.
    """
    from managed_e2b.lifecycle import SandboxLifecycle

    if seconds is not None and not watch:
        raise ValidationError("SECONDS goes with --watch")
    options: dict[str, Any] = {
        "purge_foreign": foreign,
        "metadata": dict(_pair(item) for item in metadata or ()),
        "template": template,
        "older_than": None if older_than is None else _seconds(older_than),
        "include_other_ledgers": include_other_ledgers,
        "dry_run": dry_run,
    }
    lifecycle = SandboxLifecycle(db_path=db, e2b_api_url=api_url, backend=backend, opening_reap=False, watchdog=False)
    try:
        if watch:
            _watch(lifecycle, options, EVERY if seconds is None else seconds, as_json=as_json)
            return
        report = lifecycle.reap(**options)
    finally:
        lifecycle.shutdown()
    _show(report, as_json=as_json, is_one_of_many=False)
    if report.pending:
        raise typer.Exit(1)


def _watch(lifecycle: Any, options: dict[str, Any], seconds: float, *, as_json: bool) -> None:
    """Pass after pass. An endpoint or a ledger that fails for a while is told, and tried again; Ctrl-C ends it."""
    try:
        while True:
            try:
                _show(lifecycle.reap(**options), as_json=as_json, is_one_of_many=True)
            except (BackendError, LedgerError) as error:
                message(f"{' '.join(str(error).split())}; trying again in {duration(seconds)}")
            sys.stdout.flush()
            time.sleep(seconds)
    except KeyboardInterrupt:
        message("interrupted")


def _show(report: ReapReport, *, as_json: bool, is_one_of_many: bool) -> None:
    if as_json:
        counts = {"pending": len(report.pending), "kept": len(report.kept), "due": len(report.due)}
        made = {"items": [dataclasses.asdict(item) for item in report.items], **counts, "cut": report.cut}
        if is_one_of_many:
            print(json.dumps(made, ensure_ascii=False))
        else:
            print_json(made)
        return
    if report.items:
        rows = table("SANDBOX", "DONE", "AGE", "WHY", "OWNER")
        for item in report.items:
            age = "-" if item.age is None else duration(item.age)
            done = item.action.replace("_", " ")
            rows.add_row(item.sandbox_id or item.ticket, done, age, item.why, (item.owner or "-")[:12])
        console().print(rows)
    elif not is_one_of_many:
        message("nothing to reap")
    if report.cut is not None:
        message(f"not all was seen: {report.cut}; the next pass goes on")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValidationError(f"--metadata {text!r}: write KEY=VALUE")
    return key, value


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise ValidationError(f"--older-than {text!r}: write seconds, or a number with s, m, h or d: 90, 15m, 2h, 1d")
    return float(found[1]) * _UNITS[found[2]]
