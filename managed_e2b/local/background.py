"""A local server in a process of its own, for as long as this process needs it: what `backend="local"` starts.

A process of its own, because a program that is busy (or holds the GIL, or is stopped in a debugger) must not stop
the server's clocks and streams. It dies with this process, however this one dies, and its sandboxes with it.
Importing this module is cheap: nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

from managed_e2b.local.keys import ServerState

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class LocalServerError(RuntimeError):
    """The server did not come up. The message says why, in one line, with the fix where there is one."""


class LocalServerProcess:
    """A local server as a child process.

    Blocking, and safe to use from several threads. After `start`, `url` and `api_key` are what an E2B SDK needs;
    they stay the same until `stop`. In a process forked from the one that started it, `stop` does nothing.
    `chaos`: whether whoever has the key may make it fail on purpose, see `chaos.api`. `tls_domain`: the sandboxes'
    domain, for which it then also answers https (see `environment`); None: plain HTTP only.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        data_dir: Path | None = None,
        port: int = 0,
        chaos: bool = False,
        tls_domain: str | None = None,
    ) -> None:
        self.api_key = api_key or "e2b_" + secrets.token_hex(20)
        self.url = ""
        self._data_dir = data_dir
        self._port = port
        self._chaos = chaos
        self._tls_domain = tls_domain
        self._state: ServerState | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._life = -1  # the pipe whose end means to the child that we are gone
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The server's process; None when it is not started."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def environment(self) -> dict[str, str]:
        """What points an E2B SDK of another process at it. Raises RuntimeError before `start`."""
        if self._state is None:
            raise RuntimeError("the local server is not started")
        return self._state.environment()

    def start(self, timeout: float = 30.0) -> None:
        """Start it and return when it listens, within `timeout` seconds. Raises LocalServerError."""
        with self._lock:
            if self._process is not None:
                return
            announce = self._spawn()
            try:
                answer = _read_line(announce, time.monotonic() + timeout)
            except BaseException:
                self._stop(0)
                raise
            finally:
                os.close(announce)
            if "state" not in answer:
                self._stop(5.0)
                raise LocalServerError(answer.get("error") or f"the local server did not start within {timeout:g} s")
            self._state = ServerState(api_key=self.api_key, **answer["state"])
            self.url = self._state.url

    def stop(self, timeout: float = 15.0) -> None:
        """End it and all its sandboxes; kill it when that takes more than `timeout` seconds. May be called again."""
        with self._lock:
            self._stop(timeout)

    def __enter__(self) -> LocalServerProcess:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _spawn(self) -> int:
        """Start the child. Returns the descriptor its announcement comes on."""
        life_read, self._life = os.pipe()
        announce_read, announce_write = os.pipe()
        command = [sys.executable, "-P", "-m", "managed_e2b.local", "--port", str(self._port)]
        command += ["--parent-pid", str(os.getpid()), "--parent-fd", str(life_read)]
        command += ["--announce-fd", str(announce_write)]
        if self._data_dir is not None:
            command += ["--data-dir", str(self._data_dir)]
        try:
            self._process = subprocess.Popen(
                command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(life_read, announce_write),
                # Ctrl-C is for us: the server must outlive our own cleanup
                start_new_session=True,
            )
            self._owner = os.getpid()
            told = {"api_key": self.api_key, "chaos": self._chaos, "tls_domain": self._tls_domain}
            os.write(self._life, json.dumps(told).encode() + b"\n")
        except BaseException:
            os.close(announce_read)
            self._stop(0)
            raise
        finally:
            os.close(life_read)
            os.close(announce_write)
        return announce_read

    def _stop(self, timeout: float) -> None:
        if self._owner not in (0, os.getpid()):
            return
        if self._life >= 0:
            os.close(self._life)
            self._life = -1
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()  # its sandboxes die with it
            process.wait()


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    if str(_PACKAGE_ROOT) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        # a checkout: the child must import the same code as we do
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(_PACKAGE_ROOT) + (os.pathsep + inherited if inherited else "")
    return environment


def _read_line(descriptor: int, deadline: float) -> dict[str, Any]:
    """The child's announcement; what it said of it when it ended, or ran out of time, before one."""
    line = b""
    while not line.endswith(b"\n"):
        # poll, not select: a busy program's descriptors have large numbers
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return {}
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return {"error": "the local server ended before it was ready; its messages are on stderr"}
        line += chunk
    answer: dict[str, Any] = json.loads(line)
    return answer
