"""How the commands print: tables for people, JSON for programs, one line for an error."""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

_PIPED_WIDTH = 200  # a pipe has no width: wide enough that `me2b ls | grep` sees whole rows


def console() -> Console:
    """Where results for people go."""
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)


def table(*columns: str, title: str | None = None) -> Table:
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", title_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def print_json(value: Any) -> None:
    """One JSON value on stdout, and nothing else ever in this mode."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, default=str)
    sys.stdout.write("\n")


def message(text: str) -> None:
    """A remark for people: on stderr, so that it never mixes with a result."""
    sys.stderr.write(f"me2b: {text}\n")


def fail(text: str, code: int = 2) -> NoReturn:
    """End the command: one line on stderr and the exit code."""
    message(" ".join(text.split()))
    raise typer.Exit(code)


def duration(seconds: float) -> str:
    """A length of time in its two largest units: `4s`, `2m 5s`, `3h 10m`, `2d 4h`."""
    whole = max(0, int(seconds))
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    shown = [f"{count}{unit}" for count, unit in parts if count]
    first = next((index for index, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2] if count) if shown else "0s"
