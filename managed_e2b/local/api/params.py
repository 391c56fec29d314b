"""What paths and query strings hold, read and checked."""

from __future__ import annotations

import re

from starlette.requests import Request

from managed_e2b.local.errors import bad_request, sandbox_not_found


def short_id(sandbox_id: str) -> str:
    """Old clients write `<sandbox id>-<client id>`."""
    return sandbox_id.partition("-")[0]


def sandbox_id(request: Request) -> str:
    """The sandbox a path names. Raises ApiError(404) for what cannot be one's id."""
    found = short_id(request.path_params["id"])
    if not re.fullmatch(r"[a-z0-9]{1,64}", found):
        raise sandbox_not_found(found[:64])
    return found


def whole_number(request: Request, name: str, what: str, most: int | None = None) -> int | None:
    """A number of the query string, 0 or more; None when it is absent. `what`: what was expected, for people.

    Raises ApiError(400).
    """
    raw = request.query_params.get(name)
    if raw is None:
        return None
    if not re.fullmatch(r"[0-9]{1,15}", raw) or (most is not None and int(raw) > most):
        raise bad_request(f"Invalid {name}, expected {what}")
    return int(raw)
