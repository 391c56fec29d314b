"""`python -m managed_e2b.local`: the server as a child of the program that uses it (see `background`).

It reads one line of JSON, `{"api_key": …, "chaos": …, "tls_domain": …}`, from the pipe `--parent-fd` and writes one,
`{"state": …}` (`keys.ServerState` without the key) or `{"error": …}`, to `--announce-fd`. It ends, with all its
sandboxes, when its parent does: at the end of the pipe or of the parent's process, whichever is first (a child that the
parent forked may hold the pipe open).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from managed_e2b.local.chaos.rules import Script
from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.server import LocalServer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m managed_e2b.local", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--announce-fd", type=int, required=True)
    parser.add_argument("--parent-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="me2b local server: %(message)s")
    return asyncio.run(_serve(options))


async def _serve(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        parent = os.pidfd_open(options.parent_pid)
    except ProcessLookupError:
        return 1
    if os.getppid() != options.parent_pid:  # it died, and another process has its number
        return 1
    line = _read_line(options.parent_fd)
    if not line:
        return 1

    def parent_is_gone() -> None:
        # both stay readable from now on: watching on would spin
        loop.remove_reader(parent)
        loop.remove_reader(options.parent_fd)
        stop.set()

    loop.add_reader(parent, parent_is_gone)
    loop.add_reader(options.parent_fd, parent_is_gone)
    told = json.loads(line)
    chaos = Script() if told["chaos"] else None
    server = LocalServer(options.port, told["api_key"], options.data_dir, chaos=chaos, tls_domain=told["tls_domain"])
    try:
        try:
            await server.start()
        except (RuntimeUnavailable, OSError, ValueError) as error:
            _announce(options.announce_fd, {"error": str(error)})
            return 1
        state = {name: value for name, value in asdict(server.state()).items() if name != "api_key"}
        _announce(options.announce_fd, {"state": state})
        stopping = asyncio.create_task(stop.wait())
        serving = asyncio.create_task(server.serve_forever())
        try:
            await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        except RuntimeUnavailable as error:
            logging.error("%s", error)
            return 1
        finally:
            stopping.cancel()
            serving.cancel()
    finally:
        await server.close()
    return 0


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(descriptor, 1)):
            return b""
        line += byte
    return line


def _announce(descriptor: int, value: dict[str, Any]) -> None:
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
