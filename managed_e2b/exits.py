"""The end of the program: open lifecycles are shut down at its exit and at SIGTERM, within a bound.

What is not done by then is the watchdog's. SIGINT stays what it is: a KeyboardInterrupt, that leaves `with` blocks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import Protocol

from .errors import Me2bError

logger = logging.getLogger("managed_e2b")

EXIT_SECONDS = 10.0
"""The longest that an exit, or a death by SIGTERM, is held up."""

_FORCE_SECONDS = 1.0
_RETRY_SECONDS = 0.005

_HOLDING = ("managed_e2b.exits", "managed_e2b.ledger", "managed_e2b.watchdog", "sqlalchemy", "logging")
"""Rooms in which an interrupted main thread may hold a lock that a shutdown needs."""


class Endable(Protocol):
    """What a lifecycle is, seen from here."""

    def end(self, timeout: float) -> None:
        """Shut down, or wait for a shutdown that has begun. Blocking, for up to about `timeout` seconds."""
        ...


class Exits:
    """The open lifecycles of this process. Held weakly; safe to use from any thread."""

    def __init__(self) -> None:
        self._registered_for = 0
        self._parents: list[Endable] = []
        self._reset()

    def opened(self, lifecycle: Endable) -> None:
        """From now on it is shut down at exit; at SIGTERM too, when nobody else handles that."""
        with self._lock:
            self._open.add(lifecycle)
            self._register()
        self._sigterm.install(self._end_all)

    def closed(self, lifecycle: Endable) -> None:
        """It has been shut down."""
        with self._lock:
            self._open.discard(lifecycle)
        self.restore()

    def restore(self) -> None:
        """Give SIGTERM back when nothing is open any more; on the main thread, which alone may do that."""
        with self._lock:
            unused = not self._open
        if unused:
            self._sigterm.uninstall()

    def forking(self) -> None:
        """Before a fork: what a signal for the new child writes must not be read here."""
        self._sigterm.deafen()

    def forked_here(self) -> None:
        """After it, in the parent."""
        self._sigterm.listen()

    def forked(self) -> None:
        """After it, in the child: what is open is the parent's."""
        self._parents += self._open  # kept for ever: what they hold is shared with the parent
        self._sigterm.forget()
        self._reset()

    def at_exit(self) -> None:
        """Shut down what is open, on this thread: at the end of an interpreter no other can be started."""
        self._end_all(EXIT_SECONDS)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Endable] = weakref.WeakSet()
        self._sigterm = SigtermHandler()

    def _register(self) -> None:
        if self._registered_for == os.getpid():
            return
        if self._registered_for == 0:  # a forked child inherits it
            atexit.register(self.at_exit)
        self._registered_for = os.getpid()
        multiprocessing = sys.modules.get("multiprocessing")
        if multiprocessing is not None and multiprocessing.parent_process() is not None:
            from multiprocessing import util

            util.Finalize(None, self.at_exit, exitpriority=100)  # these children run no `atexit`

    def _end_all(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._lock:
            lifecycles = list(self._open)
        for lifecycle in lifecycles:
            try:
                lifecycle.end(max(0.0, deadline - time.monotonic()))
            except (Me2bError, OSError) as error:
                logger.warning("at the end of the program: %s", error)


class Release(Protocol):
    def __call__(self, timeout: float) -> None: ...


class SigtermHandler:
    """Releases everything, then lets the process die by the signal, as if there were no handler.

    It is installed only over the default, so a handler of the caller's own is never touched. A thread of its own does
    the work: an interrupted main thread may hold any lock, and may be in a call that hears of no signal until it
    returns, as those of the sync SDK. The kernel's word comes through `signal.set_wakeup_fd`, which waits for nobody.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ends: tuple[int, int] | None = None
        self._installed = False
        self._released: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put may interrupt its own get
        self._main_is_busy = False

    def install(self, release: Release) -> None:
        """On the main thread, over SIG_DFL only."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        if self._ends is None:
            read_end, write_end = self._ends = os.pipe()
            os.set_blocking(write_end, False)
            threading.Thread(target=self._main, args=(read_end, release), name="me2b-sigterm", daemon=True).start()
        signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        self.listen()

    def uninstall(self) -> None:
        """Put the default back, unless somebody has replaced us. Only the main thread can."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False
        # An event loop that has taken our place may put us back when it ends: what is kept then is used again.
        if self.deafen() and self._ends is not None:
            os.close(self._ends[1])  # the thread reads the end, and ends
            self._ends = None

    def listen(self) -> None:
        """Be told by the kernel, if nobody else is."""
        if self._installed and self._ends is not None and threading.current_thread() is threading.main_thread():
            theirs = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
            if theirs not in (-1, self._ends[1]):
                signal.set_wakeup_fd(theirs)

    def deafen(self) -> bool:
        """Whether it was us whom the kernel told. It does not any more."""
        if self._ends is None or threading.current_thread() is not threading.main_thread():
            return False
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._ends[1]):
            signal.set_wakeup_fd(current)
        return current == self._ends[1]

    def forget(self) -> None:
        """In a forked child, which has neither the thread nor anything to release."""
        ends = self._ends
        self.uninstall()
        if ends is not None:
            os.close(ends[0])
            if self._ends is not None:
                os.close(ends[1])

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        ends = self._ends
        if ends is None or os.getpid() != self._pid:
            _die()
            return
        with contextlib.suppress(BlockingIOError):
            os.write(ends[1], bytes([signal.SIGTERM]))
        self._main_is_busy = _is_holding(frame)
        if self._main_is_busy and self._released.empty():
            return  # let it go on; the thread signals again in a moment
        with contextlib.suppress(queue.Empty):
            self._released.get(timeout=EXIT_SECONDS + _FORCE_SECONDS)
        _die()

    def _main(self, read_end: int, release: Release) -> None:
        try:
            while data := os.read(read_end, 64):
                if signal.SIGTERM in data and signal.getsignal(signal.SIGTERM) == self._handle:
                    self._end(release)
        finally:
            os.close(read_end)

    def _end(self, release: Release) -> None:
        main = threading.main_thread().ident or 0
        work = threading.Thread(target=release, args=(EXIT_SECONDS,), name="me2b-sigterm-release", daemon=True)
        work.start()
        deadline = time.monotonic() + EXIT_SECONDS
        while work.is_alive() and time.monotonic() < deadline:
            work.join(_RETRY_SECONDS)
            if self._main_is_busy:
                signal.pthread_kill(main, signal.SIGTERM)
        for _ in range(2):
            self._released.put(None)
        signal.pthread_kill(main, signal.SIGTERM)
        time.sleep(_FORCE_SECONDS)  # the main thread is deaf: nothing to wait for but time
        _die()


def _is_holding(frame: FrameType | None) -> bool:
    while frame is not None:
        room = str(frame.f_globals.get("__name__", ""))
        # One thread that starts another holds what every other start needs; a mere wait holds nothing.
        if room.startswith(_HOLDING) or (room == "threading" and frame.f_code.co_name == "start"):
            return True
        frame = frame.f_back
    return False


def _die() -> None:
    """Die by SIGTERM, from any thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    else:
        ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, 0)  # `signal.signal` is for the main thread only
    signal.raise_signal(signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)  # as process 1 of a container: the kernel spares that


exits = Exits()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=exits.forking, after_in_parent=exits.forked_here, after_in_child=exits.forked)
