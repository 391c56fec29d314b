"""SQLite across `os.fork`: no connection is open while the process forks, so that a child inherits none.

SQLite keeps in memory which locks its process holds. A child that inherits a connection inherits that memory but not
the locks: it waits for ever for a writer that is a thread of its parent, or writes without the lock that it believes to
have. Closing the connection in the child is no way out either, for that belongs to the same memory.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine

FORK_PATIENCE = 2.0
"""Seconds that a fork waits for the transactions of other threads, which take milliseconds; then it goes on."""


class _Gate:
    """Counts the transactions that are open, and holds newcomers back while the process forks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._forking = False

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forking, FORK_PATIENCE)
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._forking = True
            self._changed.wait_for(lambda: self._inside <= 0, FORK_PATIENCE)

    def open(self) -> None:
        with self._changed:
            self._forking = False
            self._changed.notify_all()


_gate = _Gate()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@contextmanager
def unforked() -> Iterator[None]:
    """The process does not fork within this block, which must be short."""
    gate = _gate
    gate.enter()
    try:
        yield
    finally:
        gate.leave()


def close_at_fork(engine: Engine) -> None:
    """Close this engine's idle connections before each fork. It opens new ones when it needs them."""
    _engines.add(engine)


def _before() -> None:
    _gate.close()
    for engine in list(_engines):
        engine.dispose()


def _after_in_parent() -> None:
    _gate.open()


def _after_in_child() -> None:
    global _gate
    _gate = _Gate()  # a thread that is not here may hold the old one's lock
    for engine in list(_engines):
        engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
