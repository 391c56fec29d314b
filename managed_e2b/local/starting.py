"""What a template starts in each of its sandboxes: its start command, until its ready command passes.

Upstream takes a picture of the running process when the template is built. Here no memory is kept, so the command is
run in each new sandbox, and a create answers when the ready command has passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from managed_e2b.local.builds import commands
from managed_e2b.local.builds.commands import CommandFailed
from managed_e2b.local.builds.steps import command_env
from managed_e2b.local.logbook import Logbook
from managed_e2b.local.runtime.base import Guest, User
from managed_e2b.local.runtime.standins import PATH
from managed_e2b.local.templates import Settings

READY_SECONDS = 50.0
"""How long a sandbox may take to be ready: SDKs wait a minute for the answer to a create."""
_INTERVAL = 0.2


class StartFailed(Exception):
    """A sandbox did not become ready. The message says which command failed and how."""


async def start_template(
    guest: Guest,
    settings: Settings,
    env: Mapping[str, str],
    output: commands.Output = lambda stream, line: None,
    seconds: float = READY_SECONDS,
) -> asyncio.Task[None] | None:
    """Start the start command and return when the ready command passes, at once when there is none.

    `output` gets the lines of the start command. Returns what carries them, as long as it runs; None: there is no start
    command. Raises StartFailed: the start command failed, or nothing was ready within `seconds`.
    """
    try:
        user = await commands.user_of(guest, settings.user)
    except CommandFailed as error:
        raise StartFailed(str(error)) from error
    run = _Runner(guest, user, command_env(env, PATH), settings.workdir)
    started: asyncio.Task[None] | None = None
    if settings.start_cmd:
        started = asyncio.create_task(run(settings.start_cmd, output, None))
        started.add_done_callback(_seen)
    try:
        if settings.ready_cmd:
            async with asyncio.timeout(seconds):
                await _until_ready(run, settings.ready_cmd, started)
    except BaseException as error:
        if started is not None:
            started.cancel()
        if isinstance(error, TimeoutError):
            raise StartFailed(f"the ready command did not pass within {seconds:g} s") from error
        raise
    return started


def tell_end(started: asyncio.Task[None] | None, logbook: Logbook) -> None:
    """Have the end of a start command written down."""
    if started is None:
        return

    def tell(ended: asyncio.Task[None]) -> None:
        if not ended.cancelled():
            error = ended.exception()
            logbook.add("template", "Start command ended", result="success" if error is None else error)

    logbook.add("template", "Start command runs")
    started.add_done_callback(tell)


def _seen(ended: asyncio.Task[None]) -> None:
    """A failure that nobody waits for any more."""
    if not ended.cancelled():
        ended.exception()


@dataclass(frozen=True)
class _Runner:
    guest: Guest
    user: User
    env: Mapping[str, str]
    cwd: str | None

    async def __call__(self, script: str, output: commands.Output, seconds: float | None) -> None:
        await commands.run(
            self.guest, script, user=self.user, env=self.env, cwd=self.cwd, output=output, seconds=seconds
        )


async def _until_ready(run: _Runner, ready: str, started: asyncio.Task[None] | None) -> None:
    while True:
        trying = asyncio.create_task(run(ready, lambda stream, line: None, None))
        try:
            await asyncio.wait({trying, started} if started else {trying}, return_when=asyncio.FIRST_COMPLETED)
            if started is not None and started.done() and started.exception() is not None:
                raise StartFailed(f"error running start command: {started.exception()}")
            await asyncio.wait({trying})
        finally:
            trying.cancel()
        if trying.exception() is None:
            return
        await asyncio.sleep(_INTERVAL)
