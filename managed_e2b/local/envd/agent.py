"""How envd's file services talk to a sandbox's file agent, and how they tell what went wrong."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem import filesystem_pb as pb

from managed_e2b.local.envd.entries import entry_info, printable
from managed_e2b.local.envd.streams import attended
from managed_e2b.local.runtime.base import Guest, GuestError, GuestGone

# A directory of the sandbox must not be able to fill the memory of the server, which all sandboxes share.
MAX_ENTRIES = 200_000
MAX_WEIGHT = 128 << 20  # bytes, about

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


async def run_job(guest: Guest, op: str, **args: Any) -> tuple[list[pb.EntryInfo], Any]:
    """Run an operation that the agent does in slices; the entries it tells, and its result.

    When the call it is for ends before, the agent is told to forget the work. Raises GuestError and GuestGone, and
    ConnectError(FAILED_PRECONDITION) for more than the server wants to hold.
    """
    answer = (await guest.call(op, **args)).value
    entries = [entry_info(item) for item in answer["items"]]
    total = answer["weight"]
    while (job := answer["job"]) is not None:
        try:
            if len(entries) > MAX_ENTRIES or total > MAX_WEIGHT:
                raise ConnectError(
                    Code.FAILED_PRECONDITION,
                    f"more than {MAX_ENTRIES} entries, or {MAX_WEIGHT >> 20} MiB of them: "
                    "lower the depth, or list its directories one by one",
                )
            answer = (await attended(guest.call("job", job=job))).value
        except (ConnectError, asyncio.CancelledError):
            in_background(_drop(guest, job))
            raise
        entries += [entry_info(item) for item in answer["items"]]
        total += answer["weight"]
    return entries, answer["result"]


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
