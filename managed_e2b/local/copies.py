"""Copies of a sandbox's files: kept as an image of the runtime, which other sandboxes are made of.

Memory is not copied: a copy has the files as they were at one moment, and starts without any process.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace

from managed_e2b.local.counters import Counters
from managed_e2b.local.errors import ApiError, sandbox_not_found
from managed_e2b.local.model import Sandbox, SandboxSpec, State
from managed_e2b.local.runtime.base import GuestError, GuestGone, Runtime

log = logging.getLogger(__name__)

MAX_FORKS = 20
"""Of one request, as the SDK has it."""

_REFUSALS = {
    errno.ENOSPC: (507, "there is no space left for a copy of the files of sandbox {id!r}"),
    errno.EDQUOT: (507, "the server's disk quota does not allow a copy of the files of sandbox {id!r}"),
    errno.EMLINK: (400, "the files of sandbox {id!r} are copies of copies, too many one upon another"),
    errno.EOPNOTSUPP: (501, "this server keeps the files of sandboxes in memory, where they cannot be copied"),
}


class Copies:
    def __init__(self, runtime: Runtime, counters: Counters) -> None:
        self._runtime = runtime
        self._counters = counters

    async def commit(self, sandbox: Sandbox) -> str:
        """Keep its files as a new image, whose name is returned. Its processes stand still meanwhile.

        The caller holds `sandbox.transition`. Raises ApiError: 404 when it was killed meanwhile, 507 (no space), and
        what else keeps files from being copied; no image is left then.
        """
        state = sandbox.state
        image = f"copy-{secrets.token_hex(8)}"
        try:
            await sandbox.guest.commit(image)
        except GuestGone as error:
            raise sandbox_not_found(sandbox.sandbox_id) from error
        except GuestError as error:
            if self._ended(sandbox, state):  # its files were being removed
                raise sandbox_not_found(sandbox.sandbox_id) from error
            raise _refusal(sandbox.sandbox_id, error) from error
        if self._ended(sandbox, state):  # of files that were being removed the copy need not be whole
            await self.drop(image)
            raise sandbox_not_found(sandbox.sandbox_id)
        return image

    def _ended(self, sandbox: Sandbox, before: State) -> bool:
        return not sandbox.is_in(before) or sandbox.guest.dead.is_set()

    async def drop(self, image: str) -> None:
        """Forget an image that `commit` made."""
        await self._runtime.remove_image(image)

    async def snapshot(self, sandbox: Sandbox) -> str:
        """`commit` of a sandbox that runs and goes on running. Raises ApiError: also 409 when it is paused."""
        async with sandbox.transition:
            self._check_running(sandbox, "snapshotted")
            return await self.commit(sandbox)

    async def fork(
        self, sandbox: Sandbox, seconds: int, count: int, create: Callable[[SandboxSpec], Awaitable[Sandbox]]
    ) -> list[Sandbox | ApiError]:
        """`count` sandboxes like this one, each with a copy of its files: the same for all, as they are now.

        They live for `seconds`. Environment, metadata, template and network are the source's; ids and tokens their own.
        Raises ApiError before any is made: 404, 409 when it is paused, and those of `commit`.
        """
        async with sandbox.transition:
            self._check_running(sandbox, "forked")
            image = await self.commit(sandbox)
        try:
            spec = replace(sandbox.spec, image=image, timeout=seconds)
            made = await asyncio.gather(*(create(spec) for _ in range(count)), return_exceptions=True)
        finally:
            await self.drop(image)  # those made of it keep its files
        results = [_outcome(result) for result in made]
        self._counters.forked += sum(isinstance(result, Sandbox) for result in results)
        return results

    def _check_running(self, sandbox: Sandbox, what: str) -> None:
        if sandbox.is_in(State.PAUSED):
            message = f"Sandbox '{sandbox.sandbox_id}' is paused and cannot be {what}; resume it first"
            raise ApiError(409, message)
        if not sandbox.is_in(State.RUNNING):
            raise sandbox_not_found(sandbox.sandbox_id)


def _outcome(result: Sandbox | BaseException) -> Sandbox | ApiError:
    if isinstance(result, Sandbox | ApiError):
        return result
    if not isinstance(result, Exception):
        raise result
    log.error("a fork failed", exc_info=result)
    return ApiError(500, "Internal server error")


def _refusal(sandbox_id: str, error: GuestError) -> ApiError:
    status, text = _REFUSALS.get(error.errno, (500, "the files of sandbox {id!r} could not be copied"))
    if status == 500:
        log.error("the files of sandbox %s could not be copied: %s", sandbox_id, error.message)
    # trying again at once changes nothing
    return ApiError(status, text.format(id=sandbox_id), headers={"Should-Retry": "false"})
