"""What a request is called in the rules. Pure."""

from __future__ import annotations

import re

from managed_e2b.local.chaos.rules import SANDBOX_OPS
from managed_e2b.local.model import ENVD_PORT

_SANDBOXES = {"POST": "create", "GET": "list"}
_ONE = {"GET": "info", "DELETE": "kill"}
_OF_ONE = {
    "timeout": "timeout",
    "refreshes": "refresh",
    "pause": "pause",
    "resume": "resume",
    "connect": "connect",
    "metrics": "metrics",
    "logs": "logs",
    "fork": "fork",
    "snapshots": "snapshot",
}
_PATH = re.compile(r"(?:/v[0-9]+)?/sandboxes(?:/(?P<id>[^/]+)(?:/(?P<what>[a-z]+))?)?")


def control_plane_op(method: str, path: str) -> tuple[str, str | None]:
    """The operation, and the id of the sandbox it names."""
    if match := _PATH.fullmatch(path):
        sandbox_id, what = match["id"], match["what"]
        if sandbox_id is None:
            return _SANDBOXES.get(method, "other"), None
        if sandbox_id == "metrics":
            return "metrics", None
        # old clients write `<sandbox id>-<client id>`
        op = _ONE.get(method, "other") if what is None else _OF_ONE.get(what, "other")
        return op, sandbox_id.partition("-")[0]
    return ("template" if re.match(r"(?:/v[0-9]+)?/templates(?:/|$)", path) else "other"), None


def sandbox_op(method: str, path: str, port: int) -> str:
    """The operation of a request to a port of a sandbox."""
    if port != ENVD_PORT:
        return "port"
    if path == "/health":
        return "health"
    if path == "/files":
        return "files.read" if method in ("GET", "HEAD") else "files.write"
    if match := re.fullmatch(r"/(process\.Process|filesystem\.Filesystem)/([A-Za-z]+)", path):
        service = match[1].partition(".")[0]
        op = f"{service}.{re.sub(r'(?<!^)(?=[A-Z])', '_', match[2]).lower()}"
        return op if op in SANDBOX_OPS else "envd"
    return "envd"
