"""`me2b serve`: the local E2B-compatible server, in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from managed_e2b.cli.output import fail

DEFAULT_PORT = 7820


def serve(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Loopback port; 0 takes a free one.")
    ] = DEFAULT_PORT,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Where sandboxes keep their files while they live.")
    ] = None,
) -> None:
    """Run the local E2B-compatible server until Ctrl-C or SIGTERM; its sandboxes end with it.

    It listens on the loopback address only. The API key is E2B_API_KEY when that is set, else one that the server
    makes and keeps readable for you alone: `me2b env` prints what any E2B SDK needs.
    """
    try:
        from managed_e2b.local.server import run_server
    except ModuleNotFoundError as error:
        fail(f"the local server needs the extra 'local' ({error.name} is missing): pip install 'managed-e2b[local]'")
    run_server(port, data_dir=data_dir)
