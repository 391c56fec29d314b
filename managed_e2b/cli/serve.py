"""`me2b serve`: the local E2B-compatible server, in the foreground."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from managed_e2b.cli.options import AsJson
from managed_e2b.cli.output import fail, message

if TYPE_CHECKING:
    from managed_e2b.local.server import LocalServer

DEFAULT_PORT = 7820


def serve(
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, metavar="PORT", help="Loopback port; 0 takes a free one.")
    ] = DEFAULT_PORT,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Where sandboxes keep their files while they live.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the local E2B-compatible server until Ctrl-C or SIGTERM; its sandboxes end with it.

    It listens on the loopback address only. The API key is E2B_API_KEY when that is set, else one that the server
    makes and keeps readable for you alone: `me2b env` prints what any E2B SDK needs. With --json one line
    `{"url": ..., "pid": ...}` tells when it listens.
    """
    try:
        from managed_e2b.local.server import run_server
    except ModuleNotFoundError as error:
        fail(f"the local server needs the extra 'local' ({error.name} is missing): pip install 'managed-e2b[local]'")
    logging.basicConfig(level=logging.WARNING, format="me2b serve: %(message)s")
    try:
        run_server(port, data_dir=data_dir, announce=_print_ready if as_json else _tell_ready)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fail(f"port {port} is taken: choose another with --port, or --port 0 for a free one")
        fail(f"the server cannot run: {error}")


def _tell_ready(server: LocalServer) -> None:
    message(f'listening on {server.url}; in another shell: eval "$(me2b env)"; Ctrl-C ends it and all its sandboxes')


def _print_ready(server: LocalServer) -> None:
    json.dump({"url": server.url, "pid": os.getpid()}, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()
