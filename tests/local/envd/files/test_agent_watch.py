"""Watching directories, as the file agent does it."""

from __future__ import annotations

import errno
import os
import select
import shutil

import pytest

from managed_e2b.local.runtime import agent_watch


@pytest.fixture
def watch(ask, tmp_path):
    """Watch the directory of the test; `watch()` gives what happened since, as (name, kind)."""

    class Watch:
        def __init__(self) -> None:
            ask("watch_open")
            self.readable = ask.fds
            self.number = 0

        def start(self, *, recursive: bool = False, entries: bool = False, network: bool = False, path=tmp_path) -> int:
            self.number = ask("watch_add", path=str(path), recursive=recursive, entries=entries, network=network)
            return self.number

        def drain(self) -> dict:
            whole = ask("watch_drain")
            while whole["more"]:
                more = ask("watch_drain")
                whole = {**more, "events": whole["events"] + more["events"]}
            return whole

        def __call__(self) -> list[tuple[str, str]]:
            whole = self.drain()
            assert whole["ended"] == []
            return [(name, kind) for number, name, kind, _ in whole["events"] if number == self.number]

        def told(self) -> bool:
            return bool(select.select(self.readable, [], [], 0)[0])

    return Watch()


def test_what_a_new_file_tells(ask, me, watch, tmp_path):
    watch.start()
    ask("open_write", path=f"{tmp_path}/f", metadata={}, **me)
    os.write(ask.fds[-1], b"content")
    assert watch() == [("f", "create"), ("f", "chmod"), ("f", "write")]
    assert watch() == []


def test_what_changes_tell(watch, tmp_path):
    for name in ("written", "cut", "mode", "from", "gone", "over"):
        (tmp_path / name).write_text("x")
    watch.start()
    with (tmp_path / "written").open("a") as file:
        file.write("more")
    os.truncate(tmp_path / "cut", 0)
    (tmp_path / "mode").chmod(0o600)
    (tmp_path / "from").rename(tmp_path / "over")
    (tmp_path / "gone").unlink()
    (tmp_path / "link").symlink_to("nowhere")
    assert watch() == [
        ("written", "write"),
        ("cut", "write"),
        ("mode", "chmod"),
        ("from", "rename"),
        ("over", "create"),
        ("gone", "remove"),
        ("link", "create"),
    ]


def test_what_happened_before_is_not_told(watch, tmp_path):
    first = watch.start()
    (tmp_path / "before").touch()
    second = watch.start()
    (tmp_path / "after").touch()
    told = {(number, name) for number, name, kind, _ in watch.drain()["events"] if kind == "create"}
    assert told == {(first, "before"), (first, "after"), (second, "after")}


def test_two_watches_of_one_directory_are_apart(ask, watch, tmp_path):
    first, second = watch.start(), watch.start(recursive=True)
    ask("watch_remove", watch=first)
    ask("watch_remove", watch=first)
    (tmp_path / "f").touch()
    assert {number for number, *_ in watch.drain()["events"]} == {second}


def test_only_a_recursive_watch_looks_below(watch, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    flat, deep = watch.start(), watch.start(recursive=True)
    (tmp_path / "a/b/f").touch()
    assert [(number, name) for number, name, kind, _ in watch.drain()["events"] if kind == "create"] == [
        (deep, "a/b/f")
    ]
    (tmp_path / "a").chmod(0o700)
    told = [(number, name, kind) for number, name, kind, _ in watch.drain()["events"]]
    assert sorted(told) == [(flat, "a", "chmod"), (deep, "a", "chmod")]


def test_a_directory_made_a_moment_ago_is_watched(ask, me, watch, tmp_path):
    watch.start(recursive=True)
    ask("make_dir", path=f"{tmp_path}/a/b", **me)
    ask("open_write", path=f"{tmp_path}/a/b/c/f", metadata={}, **me)
    os.write(ask.fds[-1], b"content")
    kinds: dict[str, list[str]] = {}
    for name, kind in watch():
        kinds.setdefault(name, []).append(kind)
    assert list(kinds) == ["a", "a/b", "a/b/c", "a/b/c/f"]
    assert kinds["a/b/c/f"] == ["create", "chmod", "write"]


def test_what_others_put_into_a_new_directory_is_told_once(watch, tmp_path):
    watch.start(recursive=True)
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/early").touch()
    created = [name for name, kind in watch() if kind == "create"]
    assert created == ["a", "a/b", "a/b/early"]
    (tmp_path / "a/b/early").unlink()
    (tmp_path / "a/b/early").touch()
    assert [event for event in watch() if event[1] in ("create", "remove")] == [
        ("a/b/early", "remove"),
        ("a/b/early", "create"),
    ]


def test_a_file_made_between_watching_and_looking_is_told_once(watch, tmp_path, monkeypatch):
    watch.start(recursive=True)
    real = os.scandir

    def late(path):
        if os.fsencode(path).endswith(b"/new") and not (tmp_path / "new/late").exists():
            (tmp_path / "new/late").touch()
        return real(path)

    monkeypatch.setattr(os, "scandir", late)
    (tmp_path / "new").mkdir()
    assert [event for event in watch() + watch() if event[1] == "create"] == [("new", "create"), ("new/late", "create")]


def test_directories_are_followed_when_they_are_renamed(watch, tmp_path):
    (tmp_path / "old/below").mkdir(parents=True)
    watch.start(recursive=True)
    (tmp_path / "old").rename(tmp_path / "new")
    (tmp_path / "new/below/f").touch()
    created = [event for event in watch() if event[1] in ("create", "rename")]
    assert created == [("old", "rename"), ("new", "create"), ("new/below/f", "create")]


def test_directories_that_left_are_not_told_of_any_more(watch, tmp_path, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (tmp_path / "leaves/below").mkdir(parents=True)
    watch.start(recursive=True)
    (tmp_path / "leaves").rename(outside / "left")
    assert watch() == [("leaves", "rename")]
    (outside / "left/below/f").touch()
    assert watch() == []
    (outside / "left").rename(tmp_path / "back")
    assert [e for e in watch() if e[1] == "create"] == [("back", "create")]
    (tmp_path / "back/below/g").touch()
    assert ("back/below/g", "create") in watch()


def test_the_watched_directory_itself(watch, tmp_path):
    target = tmp_path / "watched"
    target.mkdir()
    watch.start(path=target)
    target.chmod(0o700)
    target.rmdir()
    assert watch() == [(".", "chmod"), (".", "remove")]
    target.mkdir()
    watch.start(path=target)
    target.rename(tmp_path / "moved")
    (tmp_path / "moved/f").touch()
    assert watch() == [(".", "rename")]


def test_entries_come_along_where_there_is_one(watch, tmp_path):
    (tmp_path / "gone").touch()
    watch.start(entries=True)
    (tmp_path / "f").write_text("four")
    (tmp_path / "gone").unlink()
    told = {(name, kind): entry for _, name, kind, entry in watch.drain()["events"]}
    assert told["f", "write"]["path"] == f"{tmp_path}/f"
    assert told["f", "write"]["size"] == 4
    assert told["gone", "remove"] is None


def test_names_that_are_not_utf8(watch, tmp_path):
    watch.start()
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff", os.O_CREAT))
    assert watch() == [("\udcff", "create")]


@pytest.mark.parametrize(
    ("name", "code"), [("missing", errno.ENOENT), ("file", errno.ENOTDIR), ("file/x", errno.ENOTDIR)]
)
def test_what_cannot_be_watched(watch, tmp_path, fails, name, code):
    (tmp_path / "file").touch()
    with fails(code):
        watch.start(path=tmp_path / name)


def test_network_filesystems_are_refused_unless_allowed(watch, monkeypatch, fails):
    monkeypatch.setattr(agent_watch, "filesystem_type", lambda path: 0x6969)
    with fails(errno.EXDEV):
        watch.start()
    watch.start(network=True)


def test_the_type_of_a_filesystem():
    assert agent_watch.filesystem_type(b"/proc") == 0x9FA0


def test_the_descriptors_tell_when_there_is_something(ask, me, watch, tmp_path):
    watch.start(recursive=True)
    assert not watch.told()
    (tmp_path / "f").touch()
    assert watch.told()
    watch()
    assert not watch.told()
    ask("make_dir", path=f"{tmp_path}/d", **me)  # the agent has read the kernel's side of it already
    assert watch.told()
    assert ("d", "create") in watch()
    assert not watch.told()


def test_events_that_nobody_takes_end_the_watch(watch, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_watch, "BUFFER", 10)
    number = watch.start()
    for i in range(20):
        (tmp_path / f"{i}").touch()
    assert watch.drain() == {"events": [], "ended": [[number, "events were lost: nobody took them"]], "more": False}
    (tmp_path / "later").touch()
    assert watch.drain() == {"events": [], "ended": [], "more": False}


def test_an_overflow_in_the_kernel_ends_the_watch(watch, tmp_path, monkeypatch):
    number = watch.start()
    monkeypatch.setattr(agent_watch.Watches, "_read", lambda self: iter([(-1, agent_watch.IN_Q_OVERFLOW, 0, b"")]))
    (told,) = watch.drain()["ended"]
    assert told == [number, "events were lost: more came than the kernel holds"]


def test_a_directory_that_cannot_be_watched_ends_the_watch(ask, watch, tmp_path, monkeypatch, fails):
    number = watch.start(recursive=True)

    def no_more(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(agent_watch, "_checked", no_more)
    (tmp_path / "one-too-many").mkdir()
    (told,) = watch.drain()["ended"]
    assert told == [number, "a new directory cannot be watched: No space left on device"]
    with fails(errno.ENOSPC):
        watch.start()


def test_many_events_come_in_batches(ask, watch, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_watch, "BATCH", 7)
    watch.start()
    for i in range(30):
        os.mkdir(tmp_path / f"{i}")
    assert ask("watch_drain")["more"]
    assert watch()[-1] == ("29", "create")


def test_a_tree_that_vanishes_while_it_is_watched(watch, tmp_path):
    (tmp_path / "a/b/c").mkdir(parents=True)
    watch.start(recursive=True)
    shutil.rmtree(tmp_path / "a")
    assert [event for event in watch() if event[1] == "remove"] == [
        ("a/b/c", "remove"),
        ("a/b", "remove"),
        ("a", "remove"),
    ]
    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").touch()
    assert ("a/f", "create") in watch()
