"""Much of everything: small files, large ones, commands, sandboxes. The whole of it with --exhaustive."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from e2b import AsyncSandbox

from .conftest import Held, Seen, children

pytestmark = pytest.mark.timeout(900)

MB = 1024 * 1024
Size = Callable[[int, int], int]


async def test_many_small_files(seen: Seen, size: Size) -> None:
    count = size(1000, 10_000)
    before = seen.held()
    async with await AsyncSandbox.create(timeout=600, **seen.options) as sandbox:
        for start in range(0, count, 500):
            batch = [{"path": f"/home/user/many/{i:05}", "data": f"{i}"} for i in range(start, start + 500)]
            await sandbox.files.write_files(batch, request_timeout=300)
        listed = await sandbox.files.list("/home/user/many", request_timeout=120)
        assert [entry.name for entry in listed] == [f"{i:05}" for i in range(count)]
        assert await sandbox.files.read(f"/home/user/many/{count - 1:05}") == str(count - 1)
        await sandbox.files.remove("/home/user/many", request_timeout=120)
        assert not await sandbox.files.exists("/home/user/many")
    await seen.settled(before)


class Pattern:
    """A large body that is made as it is read, with its digest. `count` times 1 MB."""

    def __init__(self, count: int) -> None:
        self._blocks = ((i.to_bytes(8, "big") * (MB // 8)) for i in range(count))
        self._rest = b""
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        block = self._rest or next(self._blocks, b"")
        size = len(block) if size < 0 else size
        block, self._rest = block[:size], block[size:]
        self.digest.update(block)
        return block


async def test_a_large_file_up_and_down_in_flat_memory(seen: Seen, size: Size) -> None:
    count = size(96, 2048)
    body = Pattern(count)
    async with await AsyncSandbox.create(timeout=900, **seen.options) as sandbox:
        await sandbox.commands.run("true")
        before, most = seen.resident(), [0]

        async def look() -> None:
            while True:
                most[0] = max(most[0], seen.resident())
                await asyncio.sleep(0.05)

        looking = asyncio.create_task(look())
        try:
            await sandbox.files.write("/home/user/large", body, request_timeout=600)
            inside = await sandbox.commands.run("sha256sum < large; stat -c %s large", timeout=600)
            assert inside.stdout.split() == [body.digest.hexdigest(), "-", str(count * MB)]
            digest = hashlib.sha256()
            stream: AsyncIterator[bytes] = await sandbox.files.read(
                "/home/user/large", format="stream", request_timeout=600
            )
            async for chunk in stream:
                digest.update(chunk)
        finally:
            looking.cancel()
        assert digest.digest() == body.digest.digest()
        assert most[0] - before < 64 * MB, "the server keeps it"


async def test_many_commands_leave_nothing(seen: Seen, size: Size) -> None:
    count = size(150, 1000)
    async with await AsyncSandbox.create(timeout=600, **seen.options) as sandbox:
        for _ in range(50):
            await sandbox.commands.run("true")
        before, resident = seen.held(), seen.resident()
        for i in range(count):
            result = await sandbox.commands.run(f"echo {i}; exit {i % 3}" if i % 3 == 0 else f"echo {i}")
            assert result.stdout == f"{i}\n"
        await seen.settled(before)
        # what a command leaves for late readers goes after 30 seconds; a leak would be there for each
        assert seen.resident() - resident < 20_000 * count + 4 * MB


async def test_many_sandboxes_live_at_once(seen: Seen, size: Size, record_property: Callable[..., None]) -> None:
    count = size(30, 300)
    before = seen.held()
    many = asyncio.Semaphore(20)

    async def create() -> AsyncSandbox:
        async with many:
            return await AsyncSandbox.create(timeout=900, request_timeout=300, **seen.options)

    async def work(number: int, sandbox: AsyncSandbox) -> str:
        async with many:
            return (await sandbox.commands.run(f"echo {number} > ~/n; cat ~/n", request_timeout=120)).stdout

    sandboxes = await asyncio.gather(*(create() for _ in range(count)))
    try:
        answers = await asyncio.gather(*(work(number, sandbox) for number, sandbox in enumerate(sandboxes)))
        assert answers == [f"{number}\n" for number in range(count)]
        await seen.settled(Held(10**6, 10**6, before.children + 2 * count))
        processes, private = proportional(seen.spawner)
        record_property("processes of an idle sandbox", processes / count)
        record_property("kilobytes of an idle sandbox", private / count / 1024)
        assert processes <= 3 * count + before.children + 1
        assert private / count < 5 * MB
    finally:
        await asyncio.gather(*(sandbox.kill(request_timeout=120) for sandbox in sandboxes))
    await seen.settled(before)


def proportional(pid: int) -> tuple[int, int]:
    """How many processes are below one, and their memory in bytes, what they share by shares."""
    processes = total = 0
    pending = children(pid)
    while pending:
        child = pending.pop()
        pending += children(child)
        try:
            lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:  # for an ordinary user: what may not be traced may not be measured
            lines = ["Pss: 0 kB"]
        processes += 1
        total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return processes, total
