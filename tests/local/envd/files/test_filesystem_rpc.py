"""`filesystem.Filesystem` over real HTTP, by the SDK and by hand."""

from __future__ import annotations

import os

import pytest
from e2b import FileNotFoundException, FilesystemEventType, FileType, InvalidArgumentException, SandboxException
from e2b.exceptions import AuthenticationException, SandboxNotRunningException

from managed_e2b.local.envd import agent, filesystem


@pytest.fixture
def rpc(http):
    """Call a method; the answer's body, or (status, code, message) of an error."""

    async def call(method: str, user: str | None = None, **message):
        auth = None if user is None else (user, "")
        answer = await http.post(f"/filesystem.Filesystem/{method}", json=message, auth=auth)
        body = answer.json()
        return body if answer.status_code == 200 else (body["code"], body["message"])

    return call


# --- looking


async def test_an_entry_on_the_wire(rpc, tmp_path):
    (tmp_path / "f").write_text("four")
    os.utime(tmp_path / "f", ns=(0, 1_700_000_000_500_000_000))
    entry = (await rpc("Stat", path="f"))["entry"]
    owner, group = entry.pop("owner"), entry.pop("group")
    assert (bool(owner), bool(group)) == (True, True)
    assert entry == {
        "name": "f",
        "type": "FILE_TYPE_FILE",
        "path": f"{tmp_path}/f",
        "size": "4",
        "mode": 0o644,
        "permissions": "-rw-r--r--",
        "modifiedTime": "2023-11-14T22:13:20.500Z",
    }


async def test_a_link_has_the_type_of_its_target(rpc, sandbox, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to("d")
    entry = (await rpc("Stat", path="link"))["entry"]
    assert (entry["type"], entry["symlinkTarget"], entry.get("isSymlink")) == (
        "FILE_TYPE_DIRECTORY",
        str(tmp_path.resolve() / "d"),
        None,
    )
    assert (await sandbox.files.get_info("link")).type == FileType.DIR


@pytest.mark.parametrize("path", ["missing", "file/below", "file/below/deeper"])
async def test_what_is_not_there(sandbox, tmp_path, path):
    (tmp_path / "file").touch()
    assert not await sandbox.files.exists(path)
    with pytest.raises(FileNotFoundException):
        await sandbox.files.get_info(path)
    await sandbox.files.remove(path)


async def test_paths_start_at_home(sandbox, tmp_path):
    (tmp_path / "f").touch()
    for path in ("f", "./f", "~/f", "x/../f", f"{tmp_path}/f", f"{tmp_path}//f/"):
        assert (await sandbox.files.get_info(path)).path == f"{tmp_path}/f"
    assert [entry.name for entry in await sandbox.files.list("~")] == ["f"]
    assert [entry.name for entry in await sandbox.files.list("")] == ["f"]


async def test_a_directory_in_place_of_a_file_is_told_from_one_below_it(sandbox, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentException, match="path already exists but it is not a directory"):
        await sandbox.files.make_dir(f"{tmp_path}/file")
    with pytest.raises(InvalidArgumentException, match="Not a directory"):
        await sandbox.files.make_dir(f"{tmp_path}/file/below")


@pytest.mark.parametrize(
    ("method", "message", "code"),
    [
        ("Stat", {"path": "a\0b"}, "invalid_argument"),
        ("Stat", {"path": "~root/x"}, "invalid_argument"),
        ("ListDir", {"path": "file"}, "invalid_argument"),
        ("ListDir", {"path": "missing"}, "not_found"),
        ("ListDir", {"path": "loop"}, "failed_precondition"),
        ("MakeDir", {"path": "d"}, "already_exists"),
        ("MakeDir", {"path": "file"}, "invalid_argument"),
        ("MakeDir", {"path": "file/x"}, "invalid_argument"),
        ("MakeDir", {"path": "a" * 300}, "invalid_argument"),
        ("Move", {"source": "missing", "destination": "x/y"}, "not_found"),
        ("Move", {"source": "file", "destination": "d"}, "invalid_argument"),
        ("Move", {"source": "d", "destination": "full"}, "failed_precondition"),
        ("Move", {"source": "full", "destination": "full/below"}, "invalid_argument"),
        ("Remove", {"path": "/"}, "failed_precondition"),
        ("CreateWatcher", {"path": "missing"}, "not_found"),
        ("CreateWatcher", {"path": "file"}, "invalid_argument"),
        ("GetWatcherEvents", {"watcherId": "none"}, "not_found"),
        ("RemoveWatcher", {"watcherId": "none"}, "not_found"),
    ],
)
async def test_what_is_refused(rpc, tmp_path, method, message, code):
    (tmp_path / "file").touch()
    (tmp_path / "d").mkdir()
    (tmp_path / "full/x").mkdir(parents=True)
    (tmp_path / "loop").symlink_to("loop")
    assert (await rpc(method, **message))[0] == code
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("method", ["Stat", "ListDir", "MakeDir", "Move", "Remove", "CreateWatcher"])
async def test_an_unknown_user(rpc, sandbox, method):
    assert await rpc(method, user="who", path=".") == ("unauthenticated", "invalid username: 'who'") or method == "Move"
    with pytest.raises(AuthenticationException, match="invalid username: 'who'"):
        await sandbox.files.rename("a", "b", user="who")


async def test_names_that_are_not_utf8_do_not_spoil_a_list(sandbox, tmp_path):
    os.close(os.open(os.fsencode(tmp_path) + b"/a\xff", os.O_CREAT))
    (tmp_path / "b").symlink_to(os.fsencode("a\udcff"))
    first, second = await sandbox.files.list(".")
    assert (first.name, second.symlink_target) == ("a\ufffd", f"{tmp_path.resolve()}/a\ufffd")


async def test_ten_thousand_entries(sandbox, tmp_path):
    for i in range(10_000):
        os.close(os.open(tmp_path / f"{i:05}", os.O_CREAT))
    assert [entry.name for entry in await sandbox.files.list(".")] == [f"{i:05}" for i in range(10_000)]


async def test_a_list_is_bounded(rpc, tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "MAX_ENTRIES", 500)
    for i in range(2000):
        os.close(os.open(tmp_path / f"{i}", os.O_CREAT))
    code, message = await rpc("ListDir", path=".")
    assert (code, "more than 500 entries" in message) == ("failed_precondition", True)
    monkeypatch.setattr(agent, "MAX_ENTRIES", 5000)
    monkeypatch.setattr(agent, "MAX_WEIGHT", 100_000)
    assert (await rpc("ListDir", path="."))[0] == "failed_precondition"


# --- changing


async def test_making_moving_and_removing(sandbox, tmp_path):
    assert await sandbox.files.make_dir("a/b")
    assert not await sandbox.files.make_dir("a/b")
    (tmp_path / "a/b/f").write_text("x")
    info = await sandbox.files.rename("a", "new/place")
    assert (info.path, info.type) == (f"{tmp_path}/new/place", FileType.DIR)
    assert (tmp_path / "new/place/b/f").read_text() == "x"
    await sandbox.files.remove("new")
    assert list(tmp_path.iterdir()) == []


# --- watching, by asking


async def test_a_watcher_knows_all_that_happened_before_it_is_asked(sandbox, sync_sandbox, in_thread):
    await sandbox.files.make_dir("d")
    handle = await in_thread(sync_sandbox.files.watch_dir, "d", recursive=True, include_entry=True)
    for i in range(20):
        await sandbox.files.write(f"d/{i}/f", "x")
        events = await in_thread(handle.get_new_events)
        assert [event.type for event in events if event.name == f"{i}/f"] == [
            FilesystemEventType.CREATE,
            FilesystemEventType.CHMOD,
            FilesystemEventType.WRITE,
        ]
        assert events[0].entry.type == FileType.DIR
    await in_thread(handle.stop)
    with pytest.raises(SandboxException):
        await in_thread(handle.get_new_events)


async def test_watchers_are_limited(rpc, monkeypatch):
    monkeypatch.setattr(filesystem, "MAX_WATCHERS", 2)
    ids = [(await rpc("CreateWatcher", path="."))["watcherId"] for _ in range(2)]
    assert (await rpc("CreateWatcher", path="."))[0] == "resource_exhausted"
    await rpc("RemoveWatcher", watcherId=ids[0])
    assert "watcherId" in await rpc("CreateWatcher", path=".")


async def test_a_watcher_that_nobody_asks_fails_rather_than_forget(rpc, served, until, tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "WAITING_BYTES", 501 * 10)
    watcher = (await rpc("CreateWatcher", path="."))["watcherId"]
    other = (await rpc("CreateWatcher", path="."))["watcherId"]
    for i in range(4):
        (tmp_path / f"{i}").mkdir()
    assert len((await rpc("GetWatcherEvents", watcherId=other))["events"]) == 4
    for i in range(4, 12):
        (tmp_path / f"{i}").mkdir()
    assert len((await rpc("GetWatcherEvents", watcherId=other))["events"]) == 8
    for _ in range(2):
        assert await rpc("GetWatcherEvents", watcherId=watcher) == (
            "internal",
            "watcher error: events were lost: nobody asked for them",
        )


async def test_events_are_taken_from_the_kernel_without_being_asked_for(rpc, served, until, tmp_path):
    watcher = (await rpc("CreateWatcher", path="."))["watcherId"]
    (tmp_path / "f").mkdir()
    waiting = served.envd.filesystem._watchers[watcher]._events
    await until(lambda: len(waiting) == 1)


# --- watching, as a stream


async def test_a_stream_of_events(sandbox, until, tmp_path):
    seen = []
    handle = await sandbox.files.watch_dir(".", on_event=seen.append)
    (tmp_path / "f").write_text("x")
    await until(lambda: [event.type for event in seen][-1:] == [FilesystemEventType.WRITE])
    assert [(event.name, event.type) for event in seen] == [
        ("f", FilesystemEventType.CREATE),
        ("f", FilesystemEventType.WRITE),
    ]
    await handle.stop()


async def test_a_client_that_leaves_a_silent_stream(served, sandbox, until):
    handle = await sandbox.files.watch_dir(".", on_event=lambda event: None)
    assert (served.envd.filesystem.watches, served.envd.open_calls) == (1, 1)
    await handle.stop()
    await until(lambda: served.envd.filesystem.watches == 0 and served.envd.open_calls == 0)


async def test_nothing_stays_open_when_nothing_is_watched(served, sandbox, sync_sandbox, in_thread, until):
    def inotifies() -> int:
        links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_link(fd)]
        return len([link for link in links if "inotify" in link])

    before = inotifies()
    one = await in_thread(sync_sandbox.files.watch_dir, ".")
    two = await sandbox.files.watch_dir(".", on_event=lambda event: None)
    assert inotifies() == before + 2  # the agent's, which is in this process here, and ours
    await in_thread(one.stop)
    await two.stop()
    await until(lambda: inotifies() == before)


def is_link(fd: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return False
    return True


async def test_a_sandbox_that_dies_ends_the_stream_with_an_error(served, sandbox, until):
    ended = []
    await sandbox.files.watch_dir(".", on_event=lambda event: None, on_exit=ended.append)
    await served.kill()
    await until(lambda: ended)
    assert isinstance(ended[0], SandboxNotRunningException)
    assert served.envd.filesystem.watches == 0


async def test_a_watch_on_what_is_no_directory(sandbox, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentException):
        await sandbox.files.watch_dir("file", on_event=lambda event: None)
    with pytest.raises(FileNotFoundException):
        await sandbox.files.watch_dir("missing", on_event=lambda event: None)


async def test_a_client_that_does_not_read_ends_its_stream_alone(served, sandbox, until, tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "WAITING_BYTES", 501 * 5)
    ended, seen = [], []
    await sandbox.files.watch_dir(".", on_event=seen.append, on_exit=ended.append)
    for i in range(100):  # at once, in one answer of the agent: the reader has no turn in between
        (tmp_path / f"{i}").mkdir()
    await until(lambda: ended)
    assert "events were lost" in str(ended[0])
    assert served.envd.filesystem.watches == 0
