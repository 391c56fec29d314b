"""The options that several commands share, so that they are spelt and explained the same everywhere.

A key is never an option: every process of the host can read command lines. It comes from `E2B_API_KEY` or `.env`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Db = Annotated[
    str, typer.Option("--db", envvar="ME2B_DB", metavar="PATH", help="The ledger: a SQLite file, made when missing.")
]
ApiUrl = Annotated[
    str | None,
    typer.Option(
        "--api-url", metavar="URL", help="The E2B-compatible endpoint; default: E2B_API_URL, .env, then E2B Cloud."
    ),
]
Backend = Annotated[
    Literal["local"] | None,
    typer.Option(
        "--backend",
        envvar="ME2B_BACKEND",
        help="'local' starts the local server for this command and ends it afterwards: no account, no network.",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", metavar="DIR", help="Where sandboxes keep their files while they live.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs; messages stay on stderr.")]

DEFAULT_DB = "sandboxes.db"
