"""What a client is told about an execution: one JSON object a line. From the kernel's messages, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

Event = dict[str, Any]

_NAMES = {
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}

END: Event = {"type": "end_of_execution"}


def error(name: str, value: str, traceback: str = "") -> Event:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def stream(name: str, text: str, timestamp: str) -> Event:
    """`name`: stdout or stderr."""
    return {"type": name, "text": text, "timestamp": timestamp}


def count(number: int) -> Event:
    return {"type": "number_of_executions", "execution_count": number}


def result(bundle: Mapping[str, Any], *, main: bool) -> Event:
    """A MIME bundle in the client's words; what it has no word for goes under `extra`. `main`: the cell's own value."""
    rest = dict(bundle)
    event: Event = {"type": "result"}
    text = rest.pop("text/plain", None)
    if text is not None:
        event["text"] = _unquoted(text)
    for mime, name in _NAMES.items():
        value = rest.pop(mime, None)
        if value is not None:
            event[name] = value
    event["extra"] = rest
    event["is_main_result"] = main
    return event


def from_message(message: Mapping[str, Any]) -> Event | None:
    """The event of a message of the Jupyter protocol's iopub channel; None for one that clients are not told of."""
    content = message["content"]
    match message["header"]["msg_type"]:
        case "stream" if content["name"] in ("stdout", "stderr"):
            return stream(content["name"], content["text"], _time(message["header"]["date"]))
        case "display_data":
            return result(content["data"], main=False)
        case "execute_result":
            return result(content["data"], main=True)
        case "error":
            return error(content["ename"], content["evalue"], "".join(content["traceback"]))
        case "execute_input":
            return count(content["execution_count"])
        case _:
            return None


def _unquoted(text: str) -> str:
    """A string's value is shown without the quotes of its repr."""
    for quote in "'\"":
        if text.startswith(quote) and text.endswith(quote):
            return text[1:-1]
    return text


def _time(date: datetime | str) -> str:
    return date if isinstance(date, str) else date.isoformat()
