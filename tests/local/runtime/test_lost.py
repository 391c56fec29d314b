"""Descriptors that are lost on their way, because a process may have no more: nothing runs on that nobody can see."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from managed_e2b.local.runtime.base import Command, GuestError

from .boxes import Box, eventually, pid_namespace, processes_in

pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextmanager
def no_descriptor_above(pid: int, spare: int) -> Iterator[None]:
    """Let a process open `spare` descriptors more, and then none."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = [number for number in range(max(taken) + spare + 2) if number not in taken]
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[spare], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


# The server takes none before the answer comes. The spawner takes two for the report, of which it closes one, and the
# command brings four.
@pytest.mark.parametrize(("place", "spare"), [("server", 1), ("spawner", 3)])
async def test_a_command_whose_descriptors_are_lost_is_killed(box: Box, place: str, spare: int) -> None:
    namespace = pid_namespace(box.guest)
    user = await box.guest.user("user")
    await eventually(lambda: len(processes_in(namespace)) == 1)
    marks = Command(["/bin/bash", "-c", "sleep 1000 & sleep 1000"], {"PATH": "/usr/bin"}, "/", user)
    pid = os.getpid() if place == "server" else box.runtime.spawner_link.pid
    with no_descriptor_above(pid, spare), pytest.raises(GuestError) as caught:
        async with asyncio.timeout(30):
            await box.guest.spawn(marks)
    assert caught.value.errno == errno.EMFILE
    await eventually(lambda: len(processes_in(namespace)) == 1)
    assert (await box.run("echo works")).out == "works\n"
