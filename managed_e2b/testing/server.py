"""`local_server()`: a local server of one's own for a test, with chaos when that is wanted."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from ..local.background import LocalServerProcess
from ..local.chaos.rules import Script
from .chaos import Chaos, ChaosScript

_LOOK = 0.02
"""Seconds between two looks at a server that is about to have a sandbox, or to have none."""


class TestServer:
    """A local server that runs in a process of its own: `url` and `api_key` are what any E2B SDK needs."""

    __test__ = False  # for pytest: not a class of tests

    def __init__(self, process: LocalServerProcess, *, chaotic: bool) -> None:
        self._process = process
        self._chaos = Chaos(process.url, process.api_key) if chaotic else None
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def url(self) -> str:
        """`http://127.0.0.1:<port>`."""
        return self._process.url

    @property
    def api_key(self) -> str:
        """The key that it takes."""
        return self._process.api_key

    @property
    def pid(self) -> int | None:
        """Its process; None once it is stopped."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.alive

    @property
    def chaos(self) -> Chaos:
        """What makes it fail. Raises RuntimeError when it was started without chaos."""
        if self._chaos is None:
            raise RuntimeError("this server has no chaos: start it with local_server(chaos=True)")
        return self._chaos

    @property
    def environment(self) -> dict[str, str]:
        """What points an E2B SDK of another process at it."""
        return self._process.environment

    def stats(self) -> dict[str, Any]:
        """The server's own counters: `live`, `peak_live`, `created`, `ended`, … No fault touches them."""
        answer: dict[str, Any] = self._ask("GET", "/me2b/stats")
        return answer

    def live(self) -> int:
        """How many sandboxes exist, those that are starting or being killed included: the truth, whatever lists say."""
        stats = self.stats()
        return int(stats["live"]) + int(stats["ending"])

    def clear(self) -> None:
        """Kill all its sandboxes, whoever made them, and forget all chaos. When this returns, nothing runs there."""
        if self._chaos is not None:
            self._chaos.reset()
        while self.live():
            found = self._ask("GET", "/v2/sandboxes?state=running,paused")
            if not found:  # what is being made is in no list yet: it is killed when it comes
                time.sleep(_LOOK)
            for item in found:
                try:
                    self._ask("DELETE", f"/sandboxes/{item['sandboxID']}")
                except urllib.error.HTTPError as error:
                    with error:
                        if error.code != HTTPStatus.NOT_FOUND:  # it ended by itself
                            raise
        if self._chaos is not None:
            self._chaos.reset()  # these kills are nobody's: the journal begins empty

    def _ask(self, method: str, path: str) -> Any:
        request = urllib.request.Request(self.url + path, method=method, headers={"X-API-KEY": self.api_key})
        with self._http.open(request, timeout=30) as response:
            answer = response.read()
        return json.loads(answer) if answer else None


@contextmanager
def local_server(
    *,
    chaos: bool | Script | ChaosScript = False,
    api_key: str | None = None,
    data_dir: Path | None = None,
    port: int = 0,
    tls_domain: str | None = None,
) -> Iterator[TestServer]:
    """A local server for as long as the block runs; its sandboxes end with it.

    `chaos`: True allows it, a script also puts its rules in force. `tls_domain`: the sandboxes' domain ("e2b.app"), for
    which `https://` works where `environment` is set. Raises LocalServerError where the host cannot run
    sandboxes (`me2b doctor` says why).
    """
    chaotic = chaos is not False
    with LocalServerProcess(
        api_key=api_key, data_dir=data_dir, port=port, chaos=chaotic, tls_domain=tls_domain
    ) as process:
        server = TestServer(process, chaotic=chaotic)
        if not isinstance(chaos, bool):
            server.chaos.play(chaos)
        yield server
