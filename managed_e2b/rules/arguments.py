"""What the methods of a handle may be given. Each function raises a ValidationError that names the argument.

No value of an environment variable, of standard input or of a file is in an error: it may be a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ValidationError

MAX_SECONDS = 9_999_999
"""The longest timeout that a sandbox's protocol can carry: 115 days."""

TASK_DIR = "/task"
"""Where staged files go, and the working directory of scripts."""


def text(call: str, name: str, value: Any, *, what: str = "a non-empty str") -> str:
    """A str that a system call can be given: not empty, no NUL, no half of a surrogate pair."""
    if not isinstance(value, str):
        raise ValidationError(f"{call}({name}=…): {what}, not {type(value).__name__}")
    if not value:
        raise ValidationError(f"{call}({name}=''): {what}")
    _whole(call, name, value)
    return value


def optional_text(call: str, name: str, value: Any) -> str | None:
    """As `text`; None for the default."""
    return None if value is None else text(call, name, value, what="a non-empty str, or None")


def seconds(call: str, name: str, value: Any) -> float | None:
    """A timeout: seconds above 0, None for no limit of its own."""
    if value is None:
        return None
    told = f"{call}({name}={value!r}): seconds above 0, or None for no limit of its own"
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValidationError(told)
    if value > MAX_SECONDS:
        raise ValidationError(f"{told}; at most {MAX_SECONDS}")
    return value


def flag(call: str, name: str, value: Any) -> bool:
    """A bool, and nothing that could be taken for one."""
    if not isinstance(value, bool):
        raise ValidationError(f"{call}({name}=…): True or False, not {type(value).__name__}")
    return value


def callback(call: str, name: str, value: Any) -> Callable[[str], object] | None:
    """Something that can be called, or None."""
    if value is not None and not callable(value):
        raise ValidationError(f"{call}({name}=…): something to call with a str, or None, not {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def variables(call: str, name: str, value: Any) -> dict[str, str]:
    """Environment variables: str to str; None for none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValidationError(f"{call}({name}=…): a mapping of str to str, not {type(value).__name__}")
    for key, item in value.items():
        if not isinstance(key, str) or not key or "=" in key:
            raise ValidationError(f"{call}({name}=…): {key!r} is not a name of an environment variable")
        _whole(call, f"{name}, a name", key)
        if not isinstance(item, str):
            raise ValidationError(f"{call}({name}=…): {key!r}: {type(item).__name__} is not a str; use str(...)")
        _whole(call, f"{name}[{key!r}]", item)
    return dict(value)


def standard_input(call: str, name: str, value: Any) -> bytes | None:
    """Bytes, or text as UTF-8; None for none."""
    return None if value is None else data(call, name, value)


def words(call: str, name: str, value: Any) -> list[str]:
    """Arguments of a script: each a str, which may be empty."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValidationError(f"{call}({name}=…): a list of str, not {type(value).__name__}")
    for word in value:
        if not isinstance(word, str):
            raise ValidationError(f"{call}({name}=…): {type(word).__name__} is not a str; use str(...)")
        _whole(call, name, word)
    return list(value)


def data(call: str, name: str, value: Any) -> bytes:
    """Content that is here already: bytes, or text as UTF-8."""
    if isinstance(value, str):
        return _encoded(call, name, value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ValidationError(f"{call}({name}=…): str or bytes, not {type(value).__name__}")


def contents(call: str, name: str, value: Any) -> dict[str, tuple[str, bytes | Path]]:
    """Files to write: by their path in the sandbox, the name they have and the content, or the file that holds it."""
    if not isinstance(value, Mapping):
        raise ValidationError(f"{call}({name}=…): a mapping of names to contents, not {type(value).__name__}")
    found: dict[str, tuple[str, bytes | Path]] = {}
    for key, item in value.items():
        target = path(call, name, key)
        if isinstance(item, Path):
            if "\0" in str(item):
                raise ValidationError(f"{call}({name}[{key!r}]=…): {item!r} is not a path on this machine")
            found[target] = key, item
        elif isinstance(item, str | bytes | bytearray | memoryview):
            found[target] = key, data(call, f"{name}[{key!r}]", item)
        else:
            raise ValidationError(f"{call}({name}[{key!r}]=…): str, bytes or pathlib.Path, not {type(item).__name__}")
    return found


def paths(call: str, name: str, value: Any) -> dict[str, str]:
    """Files to read: by their name, the path in the sandbox."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        shown = repr(value) if isinstance(value, str) else type(value).__name__
        raise ValidationError(f"{call}({name}=…): give a list of paths, not one {shown}")
    return {item: path(call, name, item) for item in value}


def path(call: str, name: str, value: Any) -> str:
    """The absolute path in a sandbox of a name relative to TASK_DIR; absolute names stay."""
    if not isinstance(value, str) or not value:
        raise ValidationError(f"{call}({name}=…): {value!r} is not a path in a sandbox")
    _whole(call, name, value)
    found = PurePosixPath(value)
    if ".." in found.parts or found == PurePosixPath():
        raise ValidationError(f"{call}({name}=…): {value!r}: a path below {TASK_DIR}, without '..'")
    return str(PurePosixPath(TASK_DIR) / found)


def _whole(call: str, name: str, value: str) -> None:
    if "\0" in value:
        raise ValidationError(f"{call}({name}=…): a str without NUL, which no system call can be given")
    _encoded(call, name, value)


def _encoded(call: str, name: str, value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValidationError(
            f"{call}({name}=…): holds half a surrogate pair, which is no text and cannot be sent"
        ) from None
