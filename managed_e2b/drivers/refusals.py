"""What an HTTP answer said beside its status, read from an exception of the SDK that does not tell.

The SDK makes its exceptions from an answer and drops the headers. The answer itself is still a local variable of the
frames that the exception came through: they are read, never changed. Where it is not found, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

_CAUSES = 8
"""The most exceptions of a chain that are looked through."""


def header_of(error: BaseException, name: str, status: int) -> str | None:
    """The value of a header of the answer with this HTTP status that led to `error`, None when that is not known."""
    for answer in _answers(error, status):
        headers = getattr(answer, "headers", None)
        get = getattr(headers, "get", None)
        value = get(name) if callable(get) else None
        if isinstance(value, str):
            return value
    return None


def _answers(error: BaseException, status: int) -> Iterator[object]:
    """Answers with that status in the frames below ours, the innermost frames first."""
    link: BaseException | None = error
    for _ in range(_CAUSES):
        if link is None:
            return
        frames = list(_frames(link.__traceback__))
        for frame in reversed(frames):
            for value in frame.values():
                # httpx and the SDK's REST client say `status_code`, its RPC client says `status`.
                if status in (getattr(value, "status_code", None), getattr(value, "status", None)):
                    yield value
        link = link.__cause__ or link.__context__


def _frames(traceback: TracebackType | None) -> Iterator[dict[str, object]]:
    while traceback is not None:
        if not traceback.tb_frame.f_globals.get("__name__", "").startswith("managed_e2b."):
            yield traceback.tb_frame.f_locals
        traceback = traceback.tb_next
