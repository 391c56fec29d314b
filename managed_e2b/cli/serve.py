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

from managed_e2b.cli.options import AsJson, DataDir
from managed_e2b.cli.output import fail, message

if TYPE_CHECKING:
    from managed_e2b.local.chaos.rules import Script
    from managed_e2b.local.server import LocalServer
    from managed_e2b.local.sizes import Sizes

DEFAULT_PORT = 7820
DEFAULT_DOMAIN = "e2b.app"


def serve(
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, metavar="PORT", help="Loopback port; 0 takes a free one.")
    ] = DEFAULT_PORT,
    data_dir: DataDir = None,
    chaos: Annotated[
        str | None,
        typer.Option(
            "--chaos",
            metavar="RULES",
            help="For tests: fail on purpose, by a JSON file or JSON; '{}' only lets tests ask for it.",
        ),
    ] = None,
    chaos_seed: Annotated[
        int | None,
        typer.Option("--chaos-seed", metavar="N", help="The seed of all chance in --chaos, in place of the script's."),
    ] = None,
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Answer https:// to its names as an HTTPS proxy; `me2b env` tells clients how."),
    ] = False,
    domain: Annotated[
        str | None, typer.Option("--domain", metavar="NAME", help="With --tls: the sandboxes' domain (e2b.app).")
    ] = None,
    internet: Annotated[
        bool, typer.Option("--internet/--no-internet", help="Whether sandboxes may reach anything outside at all.")
    ] = True,
    registry_mirror: Annotated[
        list[str] | None,
        typer.Option(
            "--registry-mirror",
            metavar="REGISTRY=URL",
            help="Pull a registry's images from another: docker.io=http://127.0.0.1:5000. May be given again.",
        ),
    ] = None,
    cache_size: Annotated[
        float | None,
        typer.Option("--cache-size", min=0, metavar="GB", help="What builds keep for later ones, at most (20)."),
    ] = None,
    cpus: Annotated[
        float | None,
        typer.Option("--sandbox-cpus", metavar="N", help="CPUs of a sandbox whose template does not say (2)."),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option("--sandbox-memory", metavar="MB", help="Memory of a sandbox whose template does not say (4096)."),
    ] = None,
    disk: Annotated[
        int | None, typer.Option("--sandbox-disk", metavar="MB", help="The largest file of a sandbox (10240).")
    ] = None,
    pids: Annotated[
        int | None, typer.Option("--sandbox-pids", metavar="N", help="Processes and threads of a sandbox (4096).")
    ] = None,
    keep_volumes: Annotated[
        bool,
        typer.Option("--keep-volumes/--forget-volumes", help="Whether volumes stay in --data-dir for the next server."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Run the local E2B-compatible server until Ctrl-C or SIGTERM; its sandboxes end with it.

    It listens on the loopback address only. The API key is E2B_API_KEY when that is set, else one that the server
    makes and keeps readable for you alone: `me2b env` prints what any E2B SDK needs. With --json one line
    `{"url": ..., "pid": ...}` tells when it listens. With --tls it is also the HTTPS proxy of its own names, so that
    `https://<port>-<id>.<domain>` works; the authority that signs for them is this user's own, kept in the state
    directory and good for that domain alone. With --chaos whoever has the key can make it fail on purpose
    (docs/testing.md): for tests only.

    `me2b doctor` tells which of the --sandbox-... limits this host enforces.
    """
    try:
        from managed_e2b.local.server import run_server
    except ModuleNotFoundError as error:
        fail(f"the local server needs the extra 'local' ({error.name} is missing): pip install 'managed-e2b[local]'")
    script = None if chaos is None else _script(chaos, chaos_seed)
    if script is None and chaos_seed is not None:
        fail("--chaos-seed needs --chaos")
    if domain is not None and not tls:
        fail("--domain needs --tls")
    logging.basicConfig(level=logging.WARNING, format="me2b serve: %(message)s")
    try:
        run_server(
            port,
            data_dir=data_dir,
            chaos=script,
            tls_domain=(domain or DEFAULT_DOMAIN) if tls else None,
            internet=internet,
            registry_mirrors=_mirrors(registry_mirror or []),
            keep_volumes=keep_volumes,
            cache_bytes=None if cache_size is None else int(cache_size * 10**9),
            sizes=_sizes(cpus=cpus, memory_mb=memory, disk_mb=disk, pids=pids),
            announce=_print_ready if as_json else _tell_ready,
        )
    except ValueError as error:
        fail(f"--domain: {error}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fail(f"port {port} is taken: choose another with --port, or --port 0 for a free one")
        fail(f"the server cannot run: {error}")


def _sizes(**given: float | None) -> Sizes:
    from managed_e2b.local.sizes import Sizes

    try:
        return Sizes(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    except ValueError as error:
        fail(f"what --sandbox-... says is too little: {error}")


def _mirrors(given: list[str]) -> dict[str, str]:
    from managed_e2b.local.builds.reference import parse_mirror

    try:
        return dict(parse_mirror(text) for text in given)
    except ValueError as error:
        fail(f"--registry-mirror: {error}")


def _script(given: str, seed: int | None) -> Script:
    from pydantic import ValidationError

    from managed_e2b.local.chaos.rules import Script

    try:
        text = given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8")
        script = Script.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        fail(f"--chaos: {place + ': ' if place else ''}{problem['msg']}")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--chaos: neither JSON that begins with {{ nor a file that can be read: {error}")
    return script if seed is None else script.model_copy(update={"seed": seed})


def _tell_ready(server: LocalServer) -> None:
    message(f'listening on {server.url}; in another shell: eval "$(me2b env)"; Ctrl-C ends it and all its sandboxes')


def _print_ready(server: LocalServer) -> None:
    json.dump({"url": server.url, "pid": os.getpid()}, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()
