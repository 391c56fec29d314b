"""`me2b reap`: finish now what owners that died have left."""

from __future__ import annotations

import dataclasses

import typer

from managed_e2b.cli.options import DEFAULT_DB, ApiUrl, AsJson, Backend, Db
from managed_e2b.cli.output import console, message, print_json, table


def reap(db: Db = DEFAULT_DB, api_url: ApiUrl = None, backend: Backend = None, as_json: AsJson = False) -> None:
    """Make one pass over the ledger: kill, and prove dead, what owners that died have left.

    Sandboxes whose owner lives are not touched. Exit code 1 when something could not be proved dead yet; a later pass
    tries again.
    """
    from managed_e2b.lifecycle import SandboxLifecycle

    lifecycle = SandboxLifecycle(db_path=db, e2b_api_url=api_url, backend=backend, opening_reap=False)
    try:
        report = lifecycle.reap()
    finally:
        lifecycle.shutdown()
    if as_json:
        print_json({"items": [dataclasses.asdict(item) for item in report.items], "pending": len(report.pending)})
    elif not report.items:
        message("nothing to reap")
    else:
        rows = table("SANDBOX", "DONE", "WHY", "OWNER")
        for item in report.items:
            rows.add_row(item.sandbox_id or item.ticket, item.action, item.why, item.owner[:12])
        console().print(rows)
    if report.pending:
        raise typer.Exit(1)
