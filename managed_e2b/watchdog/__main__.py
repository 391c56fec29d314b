"""The process: it waits, and knows what it would have to do. The engine is imported only when there is something to do.

    python -P -m managed_e2b.watchdog [PIDFD]

Standard input is the socket to the owner; PIDFD an inherited descriptor of the owner's process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any

LINE = 0

Message = dict[str, Any]


def main() -> None:
    # What is sent to a whole group, or by a service manager to all of a service, is for the owner.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    left = Watch(LINE, int(sys.argv[1]) if len(sys.argv) > 1 else -1).run()
    if left.registered:
        left.settle()
    os._exit(0)  # nothing to tear down: the owner may be waiting for this end


class Watch:
    """Follows one owner process through its socket and its pidfd."""

    def __init__(self, line: int, process: int) -> None:
        self.registered: dict[str, Message] = {}
        self._hello: Message = {"path": [], "environment": {}}
        self._line = line
        self._process = process
        self._rest = b""

    def run(self) -> Watch:
        """Until the owner is gone; `registered` is then what it never said goodbye for."""
        os.set_blocking(self._line, False)
        poller = select.poll()
        poller.register(self._line, select.POLLIN)
        if self._process >= 0:
            poller.register(self._process, select.POLLIN)
        self._answer(b"ready\n")
        gone = False
        while not gone:
            ready = {descriptor for descriptor, _ in poller.poll()}
            # A forked child may hold the socket's other end open, so the process's own end counts; what it said
            # before that is still read.
            gone = self._process in ready
            gone |= not self._read()
        return self

    def settle(self) -> None:
        """End what the registered owners left. Imports the engine."""
        sys.path += [entry for entry in self._hello["path"] if entry not in sys.path]
        os.environ.update(self._hello["environment"])
        from .estate import settle_all

        settle_all(list(self.registered.values()))

    def _read(self) -> bool:
        """Take what there is; False once the other end is closed."""
        while True:
            try:
                data = os.read(self._line, 65536)
            except BlockingIOError:
                return True
            except ConnectionResetError:  # it died before it read our answer
                return False
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: Message) -> None:
        match message:
            case {"hello": hello}:
                self._hello = hello
            case {"register": registration}:
                self.registered[registration["owner"]] = registration
            case {"goodbye": owner}:
                self.registered.pop(owner, None)
            case {"hand_over": owner}:
                registration = self.registered.pop(owner, None)
                if registration is not None:
                    self._hand_over(registration)

    def _hand_over(self, registration: Message) -> None:
        """In a process of its own: this one stays small, and goes on watching."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for it
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._line)
            self.registered = {registration["owner"]: registration}
            self.settle()
            os._exit(0)

    def _answer(self, data: bytes) -> None:
        try:
            os.write(self._line, data)
        except OSError:  # it is gone already: the next read tells
            return


if __name__ == "__main__":
    main()
