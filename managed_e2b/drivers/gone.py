"""Errors of ours that are also the SDK's own: handlers that users wrote for the SDK go on working.

`managed_e2b.errors` must not import the SDK, so the combined classes are made here, with the exceptions that the
installed SDK has. They carry the names of the public ones and pickle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from e2b import exceptions as sdk_errors

from ..errors import Me2bError, SandboxGoneError, SandboxPausedError, SandboxUnreachableError

E = TypeVar("E", bound=Me2bError)

# Newer than the oldest SDK that is supported (2.45), which says the general thing instead.
_NOT_RUNNING: type[Exception] = getattr(sdk_errors, "SandboxNotRunningException", sdk_errors.TimeoutException)
_NOT_FOUND: type[Exception] = getattr(sdk_errors, "SandboxNotFoundException", sdk_errors.NotFoundException)
_UNREACHABLE: type[Exception] = getattr(sdk_errors, "SandboxUnreachableException", sdk_errors.TimeoutException)


_made: dict[type[Me2bError], type[Any]] = {}


def combined(kind: type[E]) -> type[E]:
    """The class `kind`, which is also a subclass of what the SDK raises in this case; itself when there is nothing."""
    if kind not in _made:
        _made.setdefault(kind, _make(kind))
    return _made[kind]


def _make(kind: type[E]) -> type[E]:
    bases = _bases(kind)
    if not bases:
        return kind
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made: type[E] = type(
        kind.__name__, (kind, *bases), {**members, "__reduce__": functools.partialmethod(_reduce, kind)}
    )
    return made


def _bases(kind: type[Me2bError]) -> tuple[type[Exception], ...]:
    if issubclass(kind, SandboxPausedError):  # it is not running, but it is found
        return (_NOT_RUNNING,)
    if issubclass(kind, SandboxGoneError):  # envd's calls say the first, the control plane's the second
        return (_NOT_RUNNING, _NOT_FOUND)
    if issubclass(kind, SandboxUnreachableError):
        return (_UNREACHABLE,)
    return ()


def _reduce(error: Me2bError, kind: type[Me2bError]) -> tuple[Callable[..., Me2bError], tuple[Any, ...]]:
    return _again, (kind, error.args, vars(error))


def _again(kind: type[E], args: tuple[Any, ...], state: dict[str, Any]) -> E:
    made = combined(kind)
    error: E = made.__new__(made, *args)
    error.__dict__.update(state)
    return error
