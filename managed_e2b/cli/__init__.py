"""The command `me2b`: one file a command, assembled in `app`.

Every command prints for people on a terminal and, with `--json`, one JSON value on stdout for programs;
messages go to stderr. Exit codes: 0 done, 1 done and something is wrong (told in the output), 2 could not be
done (one line on stderr says why and what to do), `run` passes on the code of the command that it ran.
"""

from __future__ import annotations


def main() -> None:
    """The console script. Everything is imported here, so that importing this package costs nothing."""
    from managed_e2b.cli.app import run

    run()
