"""How envd's file services talk to a sandbox's file agent, and how they tell what went wrong."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError

from managed_e2b.local.envd.streams import attended
from managed_e2b.local.runtime.base import Guest, GuestError, GuestGone

# A directory of the sandbox must not be able to fill the memory of the server, which all sandboxes share.
MAX_ENTRIES = 200_000

# The text by which SDKs know that the sandbox itself is gone.
SANDBOX_GONE = "The sandbox was not found"

MISSING = (errno.ENOENT, errno.ENOTDIR)

_CODES = {
    errno.ENOENT: Code.NOT_FOUND,
    errno.ENOTDIR: Code.INVALID_ARGUMENT,
    errno.EISDIR: Code.INVALID_ARGUMENT,
    errno.EINVAL: Code.INVALID_ARGUMENT,
    errno.ENAMETOOLONG: Code.INVALID_ARGUMENT,
    errno.EEXIST: Code.ALREADY_EXISTS,
    errno.EACCES: Code.PERMISSION_DENIED,
    errno.EPERM: Code.PERMISSION_DENIED,
    errno.EROFS: Code.PERMISSION_DENIED,
    errno.ENOTEMPTY: Code.FAILED_PRECONDITION,
    errno.EBUSY: Code.FAILED_PRECONDITION,
    errno.ELOOP: Code.FAILED_PRECONDITION,
}

_background: set[asyncio.Task[None]] = set()


async def run_job(guest: Guest, op: str, **args: Any) -> tuple[list[Any], Any]:
    """Run an operation that the agent does in slices; its items, and its result.

    When the call it is for ends before, the agent is told to forget the work. Raises GuestError and GuestGone, and
    ConnectError(FAILED_PRECONDITION) for more items than the server wants to hold.
    """
    items: list[Any] = []
    answer = (await guest.call(op, **args)).value
    items += answer["items"]
    while (job := answer["job"]) is not None:
        try:
            if len(items) > MAX_ENTRIES:
                raise ConnectError(
                    Code.FAILED_PRECONDITION,
                    f"more than {MAX_ENTRIES} entries: lower the depth, or list its directories one by one",
                )
            answer = (await attended(guest.call("job", job=job))).value
        except (ConnectError, asyncio.CancelledError):
            in_background(_drop(guest, job))
            raise
        items += answer["items"]
    return items, answer["result"]


async def _drop(guest: Guest, job: int) -> None:
    try:
        await guest.call("drop", job=job)
    except GuestGone:
        return  # with the sandbox all of it is gone


def in_background(work: Any) -> None:
    """Let a coroutine run on by itself; what it has to raise goes to the loop's exception handler."""
    task: asyncio.Task[None] = asyncio.ensure_future(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


@contextmanager
def rpc_errors(path: str) -> Iterator[None]:
    """Tell what the agent ran into as a ConnectError about this path."""
    try:
        yield
    except GuestError as error:
        raise rpc_error(error, path) from error
    except GuestGone as error:
        raise ConnectError(Code.UNAVAILABLE, SANDBOX_GONE) from error


def rpc_error(error: GuestError, path: str) -> ConnectError:
    return ConnectError(_CODES.get(error.errno, Code.INTERNAL), f"'{printable(path)}': {error.message}")


def printable(text: str) -> str:
    """A name as messages can carry it: bytes that are not UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
