"""Volumes of a real server, through E2B's SDK: their content API, sandboxes that share them, what cannot get out."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from e2b import AsyncSandbox, AsyncVolume, InvalidArgumentException, SandboxException, SandboxState, Volume
from e2b.exceptions import (
    AuthenticationException,
    VolumeException,
    VolumeNotFoundException,
    VolumePathNotFoundException,
)

from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime
from managed_e2b.local.server import LocalServer

from ..places import server_at

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def data_dir() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="me2b-volumes-"))
    yield place
    assert not list(place.glob("sandboxes/*/volumes"))  # the server has closed
    shutil.rmtree(place)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(data_dir: Path) -> AsyncIterator[LocalServer]:
    async with server_at(data_dir) as server:
        yield server


@pytest.fixture(autouse=True)
def content_url(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_VOLUME_API_URL", server.url)


@pytest.fixture
def options(server: LocalServer) -> dict[str, Any]:
    return {"api_key": server.api_key, "api_url": server.url}


Make = Callable[..., Awaitable[AsyncSandbox]]


@pytest_asyncio.fixture(loop_scope="module")
async def make(server: LocalServer, options: dict[str, Any]) -> AsyncIterator[Make]:
    async def make(**more: Any) -> AsyncSandbox:
        return await AsyncSandbox.create(sandbox_url=server.url, **more, **options)

    yield make
    for sandbox in list(server.registry):
        await server.registry.kill(sandbox.sandbox_id)


@pytest_asyncio.fixture(loop_scope="module")
async def volume(options: dict[str, Any]) -> AsyncIterator[AsyncVolume]:
    volume = await AsyncVolume.create("shared", **options)
    yield volume
    await AsyncVolume.destroy(volume.volume_id, **options)


@pytest.fixture
async def content(server: LocalServer, volume: AsyncVolume) -> AsyncIterator[httpx.AsyncClient]:
    """The content API of the volume, without the SDK."""
    async with httpx.AsyncClient(
        base_url=f"{server.url}/volumecontent/{volume.volume_id}/",
        headers={"Authorization": f"Bearer {volume.token}"},
        trust_env=False,
        timeout=30,
    ) as client:
        yield client


async def out(sandbox: AsyncSandbox, command: str, **more: Any) -> str:
    return (await sandbox.commands.run(command, **more)).stdout.strip()


# --- volumes


async def test_a_volume_lives_from_create_to_destroy(options):
    volume = await AsyncVolume.create("life", **options)
    assert (await AsyncVolume.get_info(volume.volume_id, **options)).token == volume.token
    assert (await AsyncVolume.connect(volume.volume_id, **options)).name == "life"
    assert [info.name for info in await AsyncVolume.list(**options)] == ["life"]
    assert await AsyncVolume.destroy(volume.volume_id, **options)
    assert not await AsyncVolume.destroy(volume.volume_id, **options)
    with pytest.raises(VolumeNotFoundException):
        await AsyncVolume.get_info(volume.volume_id, **options)
    assert await AsyncVolume.list(**options) == []


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", "a.b", "ü", "x" * 129, "a\0"])
async def test_names_that_are_none(options, name):
    with pytest.raises(VolumeException, match="Invalid volume name"):
        await AsyncVolume.create(name, **options)


async def test_a_name_is_taken_once(options, volume):
    with pytest.raises(VolumeException, match="Volume with name 'shared' already exists"):
        await AsyncVolume.create("shared", **options)
    made = await asyncio.gather(*(AsyncVolume.create("race", **options) for _ in range(5)), return_exceptions=True)
    (winner,) = [result for result in made if isinstance(result, AsyncVolume)]
    await AsyncVolume.destroy(winner.volume_id, **options)


async def test_an_id_that_is_none(options):
    with pytest.raises(VolumeException, match="Invalid volume ID"):
        await AsyncVolume.destroy("no-id", **options)


# --- content


async def test_files_and_directories(volume):
    made = await volume.make_dir("/a/b", force=True)
    assert (made.type, made.path, made.mode) == ("directory", "/a/b", 0o777)
    written = await volume.write_file("/a/b/f.txt", "hello", mode=0o640)
    assert (written.size, written.mode, written.name) == (5, 0o640, "f.txt")
    assert await volume.read_file("/a/b/f.txt") == "hello"
    assert await volume.read_file("a/./b/../b/f.txt", format="bytes") == b"hello"
    assert [entry.path for entry in await volume.list("/")] == ["/a"]
    assert [entry.path for entry in await volume.list("/", depth=3)] == ["/a", "/a/b", "/a/b/f.txt"]
    info = await volume.get_info("/a/b/f.txt")
    assert (info.type, info.size, info.mtime) == ("file", 5, written.mtime)
    assert (await volume.update_metadata("/a/b/f.txt", mode=0o600)).mode == 0o600
    assert await volume.exists("/a/b/f.txt")
    await volume.remove("/a")
    assert not await volume.exists("/a/b/f.txt")
    assert await volume.list("/") == []


async def test_the_same_with_the_synchronous_sdk(options):
    await asyncio.to_thread(_use_synchronously, options)


def _use_synchronously(options: dict[str, Any]) -> None:
    volume = Volume.create("plain", **options)
    try:
        volume.make_dir("/d")
        volume.write_file("/d/f", io.BytesIO(b"x" * 100))
        assert volume.read_file("/d/f", format="bytes") == b"x" * 100
        assert b"".join(volume.read_file("/d/f", format="stream")) == b"x" * 100
        assert [entry.name for entry in volume.list("/d")] == ["f"]
        volume.update_metadata("/d", mode=0o700)
        volume.remove("/d/f")
        with pytest.raises(VolumePathNotFoundException):
            volume.read_file("/d/f")
    finally:
        assert Volume.destroy(volume.volume_id, **options)


async def test_force_makes_parents_and_writes_over(volume):
    with pytest.raises(VolumePathNotFoundException):
        await volume.write_file("/no/parents", "x")
    with pytest.raises(VolumePathNotFoundException):
        await volume.make_dir("/no/parents")
    await volume.write_file("/some/parents/f", "long text", force=True)
    with pytest.raises(VolumeException, match="File exists"):
        await volume.write_file("/some/parents/f", "x")
    await volume.write_file("/some/parents/f", "x", force=True)
    assert await volume.read_file("/some/parents/f") == "x"
    with pytest.raises(VolumeException, match="File exists"):
        await volume.make_dir("/some/parents")
    await volume.make_dir("/some/parents", force=True)
    with pytest.raises(VolumeException, match="File exists"):
        await volume.make_dir("/some/parents/f", force=True)


async def test_owners(server, volume):
    if server.registry is None or (await volume.make_dir("/d")).uid == 0:
        pytest.skip("this host has one id for a sandbox: install newuidmap and give this user a range in /etc/subuid")
    written = await volume.write_file("/d/f", "x", uid=1000, gid=27)
    assert (written.uid, written.gid) == (1000, 27)
    changed = await volume.update_metadata("/d/f", uid=0)
    assert (changed.uid, changed.gid) == (0, 27)
    default = await volume.write_file("/d/g", "x")
    assert (default.uid, default.gid) == (9090, 9090)
    with pytest.raises(VolumeException, match="Invalid argument"):
        await volume.update_metadata("/d/f", uid=70_000)  # no id of a sandbox


async def test_the_root_stays(volume):
    for path in ("/", "/..", "//", "/."):
        with pytest.raises(VolumeException, match="root"):
            await volume.remove(path)
    assert (await volume.get_info("/")).type == "directory"


async def test_what_is_no_file_or_directory(volume):
    await volume.write_file("/f", "x")
    with pytest.raises(VolumeException, match="Not a directory"):
        await volume.list("/f")
    with pytest.raises(VolumeException, match="Is a directory"):
        await volume.read_file("/")
    with pytest.raises(VolumeException, match="Not a directory"):
        await volume.write_file("/f/g", "x")
    with pytest.raises(VolumeException, match="depth must be between 1 and 10"):
        await volume.list("/", depth=11)


@pytest.mark.parametrize(
    ("method", "place", "query", "body"),
    [
        ("GET", "path", {}, None),
        ("GET", "path", {"path": ""}, None),
        ("GET", "path", {"path": "a\0b"}, None),
        ("GET", "path", {"path": "/" + "x" * 300}, None),
        ("GET", "path", {"path": "/" + "x/" * 3000}, None),
        ("GET", "dir", {"path": "/", "depth": "-1"}, None),
        ("POST", "dir", {"path": "/d", "mode": "777777"}, None),
        ("POST", "dir", {"path": "/d", "uid": "4294967295"}, None),
        ("POST", "dir", {"path": "/d", "force": "maybe"}, None),
        ("PATCH", "path", {"path": "/"}, {"mode": "0777"}),
        ("PATCH", "path", {"path": "/"}, {"mode": 0o4755}),
        ("PATCH", "path", {"path": "/"}, {"uid": -1}),
    ],
)
async def test_bad_requests_get_an_error_with_a_word_for_a_code(content, method, place, query, body):
    answer = await content.request(method, place, params=query, json=body)
    assert answer.status_code == 400
    assert answer.json().keys() == {"code", "message"}
    assert isinstance(answer.json()["code"], str)


async def test_a_token_is_of_one_volume(server, options, volume, content):
    other = await AsyncVolume.create("other", **options)
    url = f"{server.url}/volumecontent/{other.volume_id}/path?path=/"
    tokens = (volume.token, server.api_key, "x" * 10_000)
    async with httpx.AsyncClient(trust_env=False) as client:
        for token in tokens:
            answer = await client.get(url, headers={"Authorization": f"Bearer {token}"})
            assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHORIZED")
        assert (await client.get(url, headers={"X-API-KEY": server.api_key})).status_code == 401
        assert (await client.get(url, headers={"Authorization": f"Bearer {other.token}"})).status_code == 200
        assert (await client.get(f"{server.url}/volumes", headers={"X-API-KEY": other.token})).status_code == 401
    with pytest.raises((VolumeException, AuthenticationException)):
        await AsyncVolume(volume.volume_id, "shared", token="no").list("/")
    await AsyncVolume.destroy(other.volume_id, **options)


async def test_a_large_file_goes_through(content):
    piece, count = b"0123456789abcdef" * 65536, 40

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield piece

    answer = await content.put("file", params={"path": "/large"}, content=pieces())
    assert (answer.status_code, answer.json()["size"]) == (201, count * len(piece))
    got = 0
    async with content.stream("GET", "file", params={"path": "/large"}) as response:
        assert response.headers["content-length"] == str(count * len(piece))
        async for data in response.aiter_bytes():
            got += len(data)
    assert got == count * len(piece)


async def test_who_is_still_sending_reads_the_answer_that_refuses(content, volume):
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * (1 << 20)

    answer = await content.put("file", params={"path": "/no/parent"}, content=pieces())
    assert (answer.status_code, answer.json()["code"]) == (404, "PATH_NOT_FOUND")
    stranger = {"Authorization": "Bearer none"}
    answer = await content.put("file", params={"path": "/f"}, content=pieces(), headers=stranger)
    assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHORIZED")
    assert not await volume.exists("/f")


async def test_many_entries_are_listed(volume, make):
    sandbox = await make(volume_mounts={"/v": volume})
    await out(sandbox, "mkdir /v/d && cd /v/d && seq 5000 | xargs touch")
    assert len(await volume.list("/d")) == 5000
    await volume.remove("/d")


# --- sandboxes


async def test_sandboxes_share_a_volume_that_outlives_them(volume, make, options):
    first = await make(volume_mounts={"/data": volume})
    second = await make(volume_mounts={"/home/user/deep/er": "shared"})
    await first.commands.run("echo from-first > /data/f")
    assert await out(second, "cat /home/user/deep/er/f && echo from-second > /home/user/deep/er/g") == "from-first"
    assert await out(first, "cat /data/g") == "from-second"
    assert await volume.read_file("/g") == "from-second\n"
    await volume.write_file("/h", "from outside", force=True)
    assert await out(first, "cat /data/h; echo more >> /data/h") == "from outside"
    assert await first.files.read("/data/h") == "from outsidemore\n"
    info = await AsyncSandbox.get_info(first.sandbox_id, **options)
    assert info.volume_mounts == [{"name": "shared", "path": "/data"}]
    await first.kill()
    await second.kill()
    assert await volume.read_file("/f") == "from-first\n"


async def test_who_has_not_mounted_it_does_not_see_it(volume, make):
    await volume.write_file("/secret-name", "secret-text", force=True)
    sandbox = await make()
    assert await out(sandbox, "find / -name secret-name 2>/dev/null; grep volumes /proc/mounts; true") == ""
    await volume.remove("/secret-name")


async def test_mounts_tell_nothing_of_the_host(volume, make, data_dir):
    sandbox = await make(volume_mounts={"/data": volume})
    text = await out(sandbox, "cat /proc/mounts /proc/self/mountinfo", user="root")
    assert f"/{volume.volume_id} /data " in text
    assert str(data_dir) not in text
    assert not re.search(r"[=:]/(?!usr\b)", text)
    (line,) = [line for line in text.splitlines() if " /data " in line and line[0].isdigit()]
    assert {"nosuid", "nodev"} <= set(line.split()[5].split(","))


async def test_no_link_in_a_volume_leads_out(volume, make, tmp_path):
    target = tmp_path / "of-the-host"
    target.write_text("of the host")
    sandbox = await make(volume_mounts={"/data": volume})
    script = f"""
    cd /data && ln -s {target} absolute && ln -s ../../../../../../..{target} relative && ln -s / root
    ln -s /etc/passwd passwd && ln -s loop loop && mkfifo fifo && ln -s {tmp_path} directory
    """
    await out(sandbox, script, user="root")
    for path in ("/absolute", "/relative", f"/root{target}", "/passwd", "/directory/of-the-host", f"/../..{target}"):
        with pytest.raises(VolumePathNotFoundException):
            await volume.read_file(path)
    for path in ("/loop", "/fifo"):
        with pytest.raises(VolumeException):
            await volume.read_file(path)
        with pytest.raises(VolumeException):
            await volume.write_file(path, "x", force=True)
    with pytest.raises(VolumePathNotFoundException):
        await volume.write_file("/absolute", "x")
    found = {entry.name: entry for entry in await volume.list("/", depth=5)}
    assert found["absolute"].type == "symlink"
    assert found["absolute"].target == str(target)
    assert found["fifo"].type == "unknown"
    await volume.remove("/directory")
    assert target.read_text() == "of the host"


async def test_what_a_hostile_sandbox_leaves_can_be_told_and_removed(volume, make):
    sandbox = await make(volume_mounts={"/data": volume})
    script = r"""
    cd /data && mkdir bad && cd bad
    touch "$(printf 'not-utf8-\377')" "$(printf 'line\nbreak')" '"quotes"'
    touch -d '@253402300800' late; touch -d '@-62135596801' early
    mkdir locked && touch locked/f && chmod 000 locked
    python3 -c 'import os
for _ in range(300):
    os.mkdir("d" * 200); os.chdir("d" * 200)'
    """
    await out(sandbox, script, user="root")
    names = {entry.name for entry in await volume.list("/bad")}
    assert {"not-utf8-\ufffd", "line\nbreak", '"quotes"', "late", "early", "locked"} <= names
    assert len(await volume.list("/bad", depth=10)) > len(names)
    await volume.remove("/bad")
    assert await volume.list("/") == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "path cannot be empty"),
        ("data", "path must be absolute"),
        ("/a/../b", "path must not contain"),
        ("/a/", "path must not contain"),
        ("//a", "path must not contain"),
        ("/", "is the system's"),
        ("/proc/x", "is the system's"),
        ("/usr/share/x", "is the system's"),
        ("/dev", "is the system's"),
        ("/etc/me2b", "is the system's"),
        ("/a\0b", "NUL"),
        ("/var/run/x", "Too many levels of symbolic links"),
        ("/home/user/.bashrc", "Not a directory"),
    ],
)
async def test_where_nothing_can_be_mounted(server, volume, make, path, problem):
    with pytest.raises((SandboxException, InvalidArgumentException), match=problem):
        await make(volume_mounts={path: volume})
    assert list(server.registry) == []


async def test_mounts_that_cannot_be_together(volume, make):
    with pytest.raises(SandboxException, match="lie within each other"):
        await make(volume_mounts={"/a": volume, "/a/b": volume})
    with pytest.raises(SandboxException, match="volume 'nope' not found"):
        await make(volume_mounts={"/a": "nope"})
    with pytest.raises(SandboxException, match="at most 16"):
        await make(volume_mounts={f"/m{number}": volume for number in range(17)})
    sandbox = await make(volume_mounts={f"/m{number}": volume for number in range(16)})
    await out(sandbox, "echo x > /m0/same")
    assert await out(sandbox, "cat /m*/same | wc -l") == "16"


async def test_a_volume_that_goes_is_empty_for_who_has_it(options, make):
    volume = await AsyncVolume.create("gone", **options)
    sandbox = await make(volume_mounts={"/data": volume})
    await out(sandbox, "mkdir -p /data/a/b && echo x > /data/a/b/f")
    assert await AsyncVolume.destroy(volume.volume_id, **options)
    assert await out(sandbox, "ls -A /data; touch /data/x 2>&1; true") != ""
    assert await out(sandbox, "ls -A /data") == ""
    with pytest.raises((VolumeException, AuthenticationException)):
        await volume.list("/")
    again = await AsyncVolume.create("gone", **options)
    assert again.volume_id != volume.volume_id
    assert await again.list("/") == []
    await AsyncVolume.destroy(again.volume_id, **options)


async def test_pause_and_fork_keep_the_mounts_and_snapshots_do_not(volume, make, options):
    sandbox = await make(volume_mounts={"/data": volume})
    await out(sandbox, "echo here > /data/kept; echo mine > /home/user/own")
    await sandbox.pause(keep_memory=False)
    await sandbox.connect()
    assert await out(sandbox, "cat /data/kept /home/user/own") == "here\nmine"
    (fork,) = await sandbox.fork()
    assert await out(fork, "cat /data/kept; echo fork > /data/kept") == "here"
    assert await out(sandbox, "cat /data/kept") == "fork"
    snapshot = await sandbox.create_snapshot()
    other = await make(template=snapshot.snapshot_id)
    assert await out(other, "ls -A /data; cat /home/user/own") == "mine"
    await volume.remove("/kept")


async def test_what_was_paused_does_not_start_without_its_volume(options, make):
    volume = await AsyncVolume.create("needed", **options)
    sandbox = await make(volume_mounts={"/data": volume})
    await sandbox.pause(keep_memory=False)
    await AsyncVolume.destroy(volume.volume_id, **options)
    with pytest.raises(SandboxException, match="one was deleted"):
        await sandbox.connect()
    assert (await AsyncSandbox.get_info(sandbox.sandbox_id, **options)).state == SandboxState.PAUSED
    assert await AsyncSandbox.kill(sandbox.sandbox_id, **options)


async def test_content_goes_on_when_the_process_that_makes_sandboxes_is_replaced(volume, make, server):
    await volume.write_file("/kept", "text", force=True)
    sandbox = await make(volume_mounts={"/data": volume})
    runtime = server._runtime
    assert isinstance(runtime, BubblewrapRuntime)
    os.kill(runtime.spawner_link.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        await server.registry.find(sandbox.sandbox_id).guest.dead.wait()
        other = await make(volume_mounts={"/data": volume})
    assert await out(other, "cat /data/kept") == "text"
    assert await volume.read_file("/kept") == "text"


async def test_what_points_sdks_here_names_the_content_api(server):
    assert server.state().environment()["E2B_VOLUME_API_URL"] == server.url


async def test_the_same_where_no_place_can_hold_an_overlay(tmp_path, monkeypatch):
    """Then the mounts are plain ones, and mountinfo tells where on the host the files are."""
    runtime = BubblewrapRuntime(tmp_path)
    async with LocalServer(runtime=runtime) as server:
        monkeypatch.setattr(runtime._ground, "overlay", False)
        options = {"api_key": server.api_key, "api_url": server.url}
        volume = await AsyncVolume.create("plain", **options)
        await volume.write_file("/in", "text", api_url=server.url)
        sandboxes = [
            await AsyncSandbox.create(volume_mounts={"/data": volume}, sandbox_url=server.url, **options)
            for _ in range(2)
        ]
        await out(sandboxes[0], "cat /data/in > /data/out; ln -s /etc/passwd /data/link")
        assert await out(sandboxes[1], "cat /data/out") == "text"
        assert await volume.read_file("/out", api_url=server.url) == "text"
        with pytest.raises(VolumePathNotFoundException):
            await volume.read_file("/link", api_url=server.url)


async def test_a_volume_goes_while_a_sandbox_is_busy_with_it(options, make, data_dir):
    volume = await AsyncVolume.create("busy", **options)
    sandbox = await make(volume_mounts={"/data": volume})
    script = "echo on; i=0; while mkdir -p /data/$i/a/b; do echo x > /data/$i/a/f; i=$((i+1)); done"
    busy = await sandbox.commands.run(script, background=True, timeout=0)
    async with asyncio.timeout(30):
        while not (await volume.list("/")):  # noqa: ASYNC110 -- what a process in there does has no event here
            await asyncio.sleep(0.01)
    assert await AsyncVolume.destroy(volume.volume_id, **options)
    result = await busy.wait()
    assert "No such file" in result.stderr  # there is no directory any more to make one in
    assert not list(data_dir.glob(f"sandboxes/*/volumes/{volume.volume_id}"))
