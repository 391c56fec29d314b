"""The program's side of its watchdog: starts it with the first acquire, and tells it whom to look after."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger("managed_e2b")

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

_FOR_THE_INTERPRETER = ("PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_FOR_THE_NETWORK = ("E2B_", "PG", "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "HOME")
"""Variables, by prefix, that the SDK and the database's driver read."""

_STOP_PATIENCE = 5.0

_STARTS = 3
"""How many in a row may end before they were up."""

CALM = 60.0
"""Seconds: a watchdog that ends is replaced at once, the next ones 1, 2, 4 … and at most so many seconds after the one
before. Once one has lived for as long, it begins anew."""

_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class Companion:
    """The watchdog of this process, if it has one. Safe to use from any thread; a forked child starts without one."""

    def __init__(self) -> None:
        self._reset()

    def watch(self, owner: str, registration: dict[str, Any]) -> None:
        """See to it that a watchdog runs and knows this owner. Cheap when it does; a failure is a warning.

        Returns once the registration is in the socket, where it lasts whatever happens to this process.
        """
        with self._lock:
            if self._broken:
                return
            self._registrations[owner] = registration
            self._tend(owner)

    def look(self) -> None:
        """Start another watchdog when the one that somebody needs has ended. Cheap when it has not."""
        with self._lock:
            if self._registrations and not self._broken:
                self._tend()

    def dismiss(self, owner: str, *, left_something: bool = False) -> None:
        """Say goodbye for an owner that is closed. `left_something`: the watchdog goes on with it at once."""
        with self._lock:
            if self._registrations.pop(owner, None) is None:
                return
            try:
                self._send({"hand_over" if left_something else "goodbye": owner})
            except OSError:
                if left_something:
                    logger.warning(
                        "the watchdog is gone; what is still `cleaning` is for the next lifecycle or `me2b reap`"
                    )
            if not self._registrations:
                self._stop()

    def forked(self) -> None:
        """In a forked child: the parent's watchdog is the parent's, and must not take us for it."""
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._process.returncode = 0  # not our child: nothing to wait for, nothing to warn of
        self._reset()

    @property
    def pid(self) -> int | None:
        """The watchdog's process, None while there is none."""
        return None if self._process is None else self._process.pid

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._registrations: dict[str, dict[str, Any]] = {}
        self._told: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._came_up = False
        self._started = self._due = 0.0
        self._deaths = self._young_deaths = 0
        self._broken = False

    def _tend(self, owner: str | None = None) -> None:
        try:
            if not self._alive():
                self._bury()
                if not self._broken and time.monotonic() >= self._due:
                    self._start()
            elif owner is not None and owner not in self._told:
                self._register(owner)
        except OSError as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _bury(self) -> None:
        """Take note of the end of the one that was there, and of when the next one may be started."""
        if self._line is None:
            return
        now = time.monotonic()
        self._young_deaths = 0 if self._came_up else self._young_deaths + 1
        if now - self._started >= CALM:
            self._deaths = 0
        self._deaths += 1
        self._due = now + (0.0 if self._deaths == 1 else min(CALM, 2.0 ** min(self._deaths - 2, 10)))
        self._stop()
        if self._young_deaths >= _STARTS:
            self._give_up("it ends at once")
        elif self._deaths == _STARTS:
            logger.warning(
                "the watchdog has ended %d times in a row; it is started again, less and less often. While there is "
                "none: if this process is killed, its sandboxes live until their lease ends or the next lifecycle on "
                "this ledger reaps them",
                self._deaths,
            )

    def _alive(self) -> bool:
        """Whether its end of the socket is open: one system call, on every acquire."""
        if self._line is None:
            return False
        try:
            while self._line.recv(64, socket.MSG_DONTWAIT):
                self._came_up = True
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        return False

    def _start(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            self._give_up("this program runs in no Python interpreter that could be started again")
            return
        ours, theirs = socket.socketpair()
        process = _own_process()
        command = [sys.executable, "-P", "-m", "managed_e2b.watchdog"]
        try:
            self._process = subprocess.Popen(
                command if process is None else [*command, str(process)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=() if process is None else (process,),
                cwd="/",
                env=_environment(),
                # What is sent to our group (Ctrl-C) is not for it.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if process is not None:
                os.close(process)
        self._line, self._came_up, self._told = ours, False, set()
        self._started = time.monotonic()
        self._send({"hello": _hello()})
        for owner in self._registrations:
            self._register(owner)

    def _register(self, owner: str) -> None:
        self._send({"register": self._registrations[owner]})
        self._told.add(owner)

    def _send(self, message: dict[str, Any]) -> None:
        if self._line is None:
            raise BrokenPipeError("no watchdog runs")
        data = json.dumps(message).encode() + b"\n"
        # The buffer holds hundreds of messages: a watchdog that reads none of them is as good as dead.
        sent = self._line.send(data, socket.MSG_DONTWAIT | _NO_SIGNAL)
        if sent < len(data):
            raise BlockingIOError("it does not read what it is told")

    def _stop(self) -> None:
        """Close the line and wait for its end, which takes a moment: it has nothing left to do."""
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            try:
                self._process.wait(_STOP_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._line = self._process = None

    def _give_up(self, why: str) -> None:
        if self._process is not None:
            self._process.kill()  # it may be alive, and would take the end of the line for ours
        self._stop()
        self._broken = True
        self._registrations.clear()
        logger.warning(
            "no watchdog (%s): if this process is killed, its sandboxes live until their lease ends or the next "
            "lifecycle on this ledger reaps them; watchdog=False is without one, and without this warning",
            why,
        )


def _own_process() -> int | None:
    """A pidfd of this process, where the system has them."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(os.getpid())
    except OSError:
        return None


def _environment() -> dict[str, str]:
    environment = {name: os.environ[name] for name in _FOR_THE_INTERPRETER if name in os.environ}
    # Absolute, for it runs elsewhere.
    path = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if str(_PACKAGE_ROOT) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        path.insert(0, str(_PACKAGE_ROOT))  # a checkout: it must import the same code as we do
    return {**environment, "PYTHONPATH": os.pathsep.join(path)} if path else environment


def _hello() -> dict[str, Any]:
    return {
        "path": [entry for entry in sys.path if os.path.isabs(entry)],
        "environment": {name: value for name, value in os.environ.items() if name.upper().startswith(_FOR_THE_NETWORK)},
    }


companion = Companion()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=companion.forked)
