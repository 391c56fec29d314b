"""The file services in real sandboxes, through the whole local server: whose files they are, what they can reach."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from e2b import AsyncSandbox, FilesystemEventType, SandboxException, SandboxNotRunningException
from e2b.exceptions import AuthenticationException, NotEnoughSpaceException

from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.server import LocalServer

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for all: starting one takes its time


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[LocalServer]:
    server = LocalServer()
    try:
        await server.start()
    except RuntimeUnavailable as error:
        pytest.skip(f"no sandboxes on this host: {error}")
    yield server
    await server.close()


@pytest_asyncio.fixture(loop_scope="module")
async def box(server: LocalServer) -> AsyncIterator[AsyncSandbox]:
    box = await AsyncSandbox.create(api_key=server.api_key, api_url=server.url, sandbox_url=server.url)
    yield box
    await box.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def two_ids(box: AsyncSandbox) -> None:
    """For tests of what needs root and `user` to be two."""
    if len(set((await box.commands.run("id -u user; id -u root")).stdout.split())) == 1:
        pytest.skip("this host has one id for a sandbox: install newuidmap and give this user a range in /etc/subuid")


@pytest.fixture
def host_file() -> Iterator[Path]:
    """A file of the host that everybody may read and write, in a place that everybody may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="me2b-test-") as directory:
        os.chmod(directory, 0o777)
        path = Path(directory) / "secret-of-the-host"
        path.write_text("secret")
        path.chmod(0o666)
        yield path


async def test_files_belong_to_the_user(box, two_ids):
    await box.files.write("a/b/f", "x")
    await box.files.make_dir("d")
    shown = (await box.commands.run("stat -c '%U %G %a %n' a a/b a/b/f d")).stdout.splitlines()
    assert shown == [f"user user {mode}" for mode in ("755 a", "755 a/b", "644 a/b/f", "755 d")]
    entry = await box.files.get_info("a/b/f")
    assert (entry.owner, entry.group, entry.path) == ("user", "user", "/home/user/a/b/f")


async def test_another_user_may_be_named(box, two_ids):
    await box.files.write("f", "x", user="root")
    assert (await box.files.get_info("/root/f")).owner == "root"
    await box.files.write("/home/user/g", "x")
    await box.files.write("/home/user/g", "x", user="root")
    assert (await box.files.get_info("/home/user/g")).owner == "root"


async def test_a_root_file_can_be_changed_for_the_user(box):
    """envd acts as root for everybody: the user's name decides whose the file is afterwards."""
    await box.commands.run("install -d -m 700 /root/d && echo old > /root/d/f && chmod 600 /root/d/f", user="root")
    assert await box.files.read("/root/d/f") == "old\n"
    await box.files.write("/root/d/f", "new")
    assert (await box.commands.run("cat /root/d/f; stat -c %a /root/d/f", user="root")).stdout == "new600\n"


async def test_files_in_sticky_directories(box):
    """With fs.protected_symlinks and fs.protected_regular the kernel refuses root what others made in /tmp."""
    await box.commands.run("echo mine > /tmp/f; ln -s /tmp/f /tmp/link; mkdir -p /tmp/d; ln -s /tmp/d /tmp/dlink")
    assert await box.files.read("/tmp/link") == "mine\n"
    await box.files.write("/tmp/f", "new")
    await box.files.write("/tmp/link", "newer")
    await box.files.write("/tmp/dlink/g", "x")
    assert (await box.commands.run("cat /tmp/f /tmp/d/g")).stdout == "newerx"
    assert [e.name for e in await box.files.list("/tmp/dlink")] == ["g"]


async def test_metadata_is_kept_on_the_files(box):
    await box.files.write("f", "x", metadata={"a": "1"})
    await box.commands.run("cp --preserve=xattr f copy; mv f moved")
    for name in ("copy", "moved"):
        assert (await box.files.get_info(name)).metadata == {"a": "1"}


async def test_no_path_leads_to_the_host(box, host_file):
    for path in (str(host_file), f"/proc/1/root{host_file}", f"/proc/self/root{host_file}", f"/../../..{host_file}"):
        assert not await box.files.exists(path)
    await box.commands.run(f"ln -s {host_file} link; ln -s {host_file.parent} dir; ln -s /proc/1/root/{host_file} proc")
    for path in ("link", f"dir/{host_file.name}", "proc"):
        with pytest.raises(SandboxException):
            await box.files.read(path)
    await box.files.write("link", "from inside")  # makes a file of that path in the sandbox, as `echo > link` would
    await box.files.write(f"dir/{host_file.name}", "from inside")
    assert (await box.commands.run(f"cat {host_file}")).stdout == "from inside"
    await box.files.remove("dir")
    await box.files.remove(str(host_file.parent))
    assert host_file.read_text() == "secret"


async def test_links_that_are_swapped_while_files_are_written(box, host_file):
    """Whoever wins the race, it is a file of the sandbox."""
    links = f"ln -sfn {host_file} x; ln -sfn {host_file.parent} y"
    script = f"while :; do {links}; rm -rf x y; mkdir y; echo > x; rm -rf x y; done"
    swapping = await box.commands.run(script, background=True, timeout=0)
    results = await asyncio.gather(
        *(box.files.write(path, f"inside {i}") for i in range(100) for path in ("x", f"y/{host_file.name}")),
        *(box.files.read(path) for _ in range(100) for path in ("x", f"y/{host_file.name}")),
        *(box.files.remove(path) for _ in range(20) for path in ("x", "y")),
        *(box.files.rename("x", f"y/{host_file.name}") for _ in range(20)),
        return_exceptions=True,
    )
    await swapping.kill()
    assert all(isinstance(result, SandboxException) for result in results if isinstance(result, BaseException))
    assert "secret" not in results
    assert host_file.read_text() == "secret"
    assert host_file.stat().st_uid == os.getuid()


async def test_special_files_keep_nobody_waiting(box):
    await box.commands.run("mkfifo fifo; ln -s fifo link; mkfifo d && rm d; mkdir d; mkfifo d/fifo")
    for path in ("fifo", "link", "/dev/zero", "/dev/tty", "/dev/ptmx"):
        with pytest.raises(SandboxException, match="not a regular file"):
            await box.files.read(path)
        with pytest.raises(SandboxException, match="not a regular file"):
            await box.files.write(path, "x")
    assert await box.files.list("d") == []  # it is of no type that envd knows, and SDKs leave those out
    await box.files.remove("d")


async def test_a_filesystem_that_is_full(box):
    room = int((await box.commands.run("df --output=avail -B1 /dev/shm | tail -1")).stdout)
    if room > 1 << 30:
        pytest.skip("/dev/shm of a sandbox is too large here to be filled in a test")

    async def more_than_there_is():
        piece = bytes(1 << 20)
        for _ in range(room // len(piece) + 20):
            yield piece

    with pytest.raises(NotEnoughSpaceException, match="not enough disk space"):
        await box.files.write("/dev/shm/f", more_than_there_is())
    await box.files.remove("/dev/shm/f")
    await box.files.write("/dev/shm/f", "fits")


async def test_users_are_the_sandboxes_own(box, two_ids):
    await box.commands.run("echo 'late:x:4321:4321::/home/late:/bin/sh' >> /etc/passwd", user="root")
    with pytest.raises(AuthenticationException, match="nobody-knows"):
        await box.files.read("f", user="nobody-knows")
    await box.files.write("f", "x", user="late")
    assert (await box.files.get_info("/home/late/f")).owner == "late"


async def test_watching_what_commands_do(box):
    await box.commands.run("mkdir -p w")
    seen: asyncio.Queue = asyncio.Queue()
    handle = await box.files.watch_dir("w", on_event=seen.put_nowait, recursive=True, include_entry=True)
    await box.commands.run("echo 1 > w/f; mkdir -p w/a/b/c; mv w/f w/a/b/c/g")
    async with asyncio.timeout(20):
        while (event := await seen.get()).name != "a/b/c/g":
            pass
    assert event.type == FilesystemEventType.CREATE
    assert event.entry.path == "/home/user/w/a/b/c/g"
    await handle.stop()


async def test_a_sandbox_that_is_killed(server):
    box = await AsyncSandbox.create(api_key=server.api_key, api_url=server.url, sandbox_url=server.url)
    ended: asyncio.Queue = asyncio.Queue()
    await box.files.watch_dir(".", on_event=lambda event: None, on_exit=ended.put_nowait)
    await box.kill()
    async with asyncio.timeout(20):
        assert isinstance(await ended.get(), SandboxNotRunningException)
    with pytest.raises(SandboxNotRunningException):
        await box.files.exists("f")
    with pytest.raises(SandboxException):
        await box.files.read("f")


async def test_signed_urls_need_nothing_else(server, box):
    other = await AsyncSandbox.create(api_key=server.api_key, api_url=server.url, sandbox_url=server.url)
    name = f"file {secrets.token_hex(4)} ü+%.txt"
    await box.files.write(name, "of one sandbox")
    await other.files.write(name, "of another")

    def read(url: str, data: bytes | None = None) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(url, data, {"Content-Type": "application/octet-stream"})) as answer:
            return answer.read()

    assert await asyncio.to_thread(read, box.download_url(name, "user")) == b"of one sandbox"
    assert await asyncio.to_thread(read, other.download_url(name)) == b"of another"
    await asyncio.to_thread(read, box.upload_url("uploaded", "user", 60), b"by url")
    assert await box.files.read("uploaded") == "by url"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        await asyncio.to_thread(read, box.download_url(name, "user").replace("signature=v1_", "signature=v1_x"))
    url = other.download_url(name)
    await other.kill()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        await asyncio.to_thread(read, url)


async def test_nothing_stays_open_in_the_server(server, until):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def use() -> None:
        box = await AsyncSandbox.create(api_key=server.api_key, api_url=server.url, sandbox_url=server.url)
        await asyncio.gather(*(box.files.write(f"{i}/f", "x" * 100_000) for i in range(20)))
        await asyncio.gather(*(box.files.read(f"{i}/f") for i in range(20)), *(box.files.list("/") for _ in range(5)))
        await box.files.watch_dir("/home/user", on_event=lambda event: None, recursive=True)
        with pytest.raises(SandboxException):
            await box.files.read("missing")
        await box.kill()

    await use()  # connections and threads that stay
    before = descriptors()
    for _ in range(3):
        await use()
    await until(lambda: descriptors() <= before)
