"""What the service asks of a kernel, whichever language it speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from .outputs import Event


class Died(Exception):
    """The kernel's process ended, or was ended, while something was to be run in it."""


class Kernel(Protocol):
    """One process of a language, which keeps its state from one execution to the next."""

    async def start(self) -> None:
        """Raises OSError and RuntimeError when there will be none."""
        ...

    async def run(self, code: str, put: Callable[[Event], None]) -> None:
        """Run code to its end, whatever that is; `put` gets the events as they come, the errors of the code among them.

        One at a time. Raises Died.
        """
        ...

    async def set_variables(self, values: Mapping[str, str | None]) -> None:
        """Set variables of its environment; None takes one away. Not while code runs. Raises Died."""
        ...

    async def interrupt(self) -> None:
        """As Ctrl-C does. Nothing happens when nothing runs."""
        ...

    async def stop(self) -> None:
        """End its process. What runs raises Died."""
        ...
