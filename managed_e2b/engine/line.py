"""The part of the line that is in this process: the requests of one lifecycle, in the ledger's own order."""

from __future__ import annotations

import bisect
import threading

Place = tuple[int, str]
"""When the ledger says that the row joined the line, and its ticket."""


class Line:
    """Only the first of a lifecycle asks the ledger; the others sleep until it is they. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: list[Place] = []

    def join(self, place: Place) -> None:
        with self._lock:
            bisect.insort(self._places, place)

    def leave(self, place: Place) -> str | None:
        """The ticket of who is first now, if somebody is. One that never joined may leave, too."""
        with self._lock:
            index = bisect.bisect_left(self._places, place)
            if self._places[index : index + 1] == [place]:
                del self._places[index]
            return self._places[0][1] if self._places else None

    def is_first(self, place: Place) -> bool:
        with self._lock:
            return self._places[0] == place
