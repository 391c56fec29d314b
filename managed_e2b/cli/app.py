"""The command's assembly: which commands there are, and what becomes of an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from managed_e2b.cli.doctor import doctor
from managed_e2b.cli.env import env
from managed_e2b.cli.ls import ls
from managed_e2b.cli.output import message
from managed_e2b.cli.reap import reap
from managed_e2b.cli.run import run as run_command
from managed_e2b.cli.serve import serve
from managed_e2b.errors import Me2bError
from managed_e2b.local.runtime.base import RuntimeUnavailable

app = typer.Typer(
    name="me2b",
    help="No E2B sandbox is ever left running that nobody is using, whatever dies.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve)
# Everything from the first word of CMD on belongs to CMD, options included.
app.command("run", context_settings={"allow_interspersed_args": False}, no_args_is_help=True)(run_command)
app.command("ls")(ls)
app.command("reap")(reap)
app.command("doctor")(doctor)
app.command("env")(env)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"me2b {version('managed-e2b')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit. An error of ours is one line on stderr and exit code 2, never a traceback."""
    try:
        app(arguments, prog_name="me2b")
    except (Me2bError, RuntimeUnavailable) as error:
        message(" ".join(str(error).split()))
        sys.exit(2)
    sys.exit(0)
