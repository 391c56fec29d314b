"""What the file agent changes: removing, making, moving, opening for reading and writing, metadata."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from managed_e2b.local.runtime import agent_entries, agent_trees


@pytest.mark.parametrize("name", ["missing", "missing/below", "a.txt/below"])
def test_what_is_missing_is_removed_already(ask, tree, name):
    ask.whole("remove", path=f"{tree}/{name}")
    assert (tree / "a.txt").exists()


def test_trees_are_removed_and_links_are_not_followed(ask, tree, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "keep").write_text("")
    (tree / "b" / "out").symlink_to(outside)
    os.mkfifo(tree / "b" / "fifo")
    (tree / "b" / "inner").chmod(0o555)
    if os.getuid():
        (tree / "b" / "inner").chmod(0o755)
    ask.whole("remove", path=f"{tree}/b")
    ask.whole("remove", path=f"{tree}/link")
    assert sorted(p.name for p in tree.iterdir()) == ["a", "a.txt", "c"]
    assert (outside / "keep").exists()


def test_a_link_is_removed_and_not_what_it_leads_to(ask, tree):
    ask.whole("remove", path=f"{tree}/link")
    assert (tree / "b" / "file").exists()
    assert not (tree / "link").is_symlink()


def test_the_root_stays(ask, fails):
    for path in ("/", "//", "/.", "/tmp/.."):
        with fails(errno.EBUSY):
            ask("remove", path=path)


def make_deep(top: Path, levels: int) -> None:
    """A chain of directories, deeper than any path can be long."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(os.open("f", os.O_CREAT, dir_fd=below))
        os.close(fd)
        fd = below
    os.close(fd)


def test_a_tree_deeper_than_paths_descriptors_and_the_stack(ask, tmp_path):
    make_deep(tmp_path, 3000)
    entries, _ = ask.whole("list", path=str(tmp_path), depth=5000)
    assert len(entries) > 1000
    ask.whole("remove", path=f"{tmp_path}/d")
    assert list(tmp_path.iterdir()) == []


def test_dropping_a_removal_lets_go_of_its_directories(ask, tmp_path, monkeypatch):
    make_deep(tmp_path, 50)
    monkeypatch.setattr(agent_trees, "SLICE", 0)
    job = ask("remove", path=f"{tmp_path}/d")["job"]
    assert job is not None
    ask("drop", job=job)  # the fixture counts what is open


def test_directories_are_made_with_their_parents(ask, me, tmp_path):
    before = os.umask(0o077)
    try:
        entry = ask("make_dir", path=f"{tmp_path}/x/y/z", **me)
    finally:
        assert os.umask(before) == 0o077
    assert (entry["name"], entry["type"], entry["permissions"]) == ("z", "directory", "drwxr-xr-x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o755


def test_only_new_directories_are_given_to_the_user(ask, tmp_path, monkeypatch):
    given: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "fchown", lambda fd, uid, gid: given.append((os.fstat(fd).st_ino, uid, gid)))
    ask("make_dir", path=f"{tmp_path}/x/y", uid=1000, gid=1001)
    assert given == [((tmp_path / "x").stat().st_ino, 1000, 1001), ((tmp_path / "x/y").stat().st_ino, 1000, 1001)]


@pytest.mark.parametrize(
    ("name", "error"), [("b", FileExistsError), ("link", FileExistsError), ("a.txt", NotADirectoryError)]
)
def test_directories_that_are_there_already(ask, me, tree, name, error):
    with pytest.raises(error):
        ask("make_dir", path=f"{tree}/{name}", **me)


def test_moving_makes_parents_and_replaces(ask, me, tree):
    _, entry = ask.whole("move", source=f"{tree}/a.txt", destination=f"{tree}/new/place", **me)
    assert entry["path"] == f"{tree}/new/place"
    (tree / "other").write_text("other")
    ask.whole("move", source=f"{tree}/other", destination=f"{tree}/new/place", **me)
    assert (tree / "new/place").read_text() == "other"
    ask.whole("move", source=f"{tree}/link", destination=f"{tree}/new/link", **me)
    assert os.readlink(tree / "new/link") == "b"


def test_a_missing_source_leaves_nothing_behind(ask, me, tree):
    with pytest.raises(FileNotFoundError):
        ask("move", source=f"{tree}/missing", destination=f"{tree}/new/place", **me)
    assert not (tree / "new").exists()


def test_no_directory_is_moved_over_a_full_one(ask, me, tree, fails):
    with fails(errno.ENOTEMPTY, errno.EEXIST):
        ask("move", source=f"{tree}/c", destination=f"{tree}/b", **me)


@pytest.fixture
def elsewhere(tmp_path):
    """A directory on another filesystem."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this host has no second writable filesystem at /dev/shm")
    path = shm / f"me2b-test-{os.getpid()}-{tmp_path.name}"
    path.mkdir()
    yield path
    for entry in sorted(path.rglob("*"), reverse=True):
        entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    path.rmdir()


def test_moving_to_another_filesystem(ask, me, tree, elsewhere, monkeypatch):
    monkeypatch.setattr(agent_trees, "COPY_STEP", 1000)
    (tree / "b" / "file").write_bytes(os.urandom(5000))
    content = (tree / "b" / "file").read_bytes()
    (tree / "b" / "file").chmod(0o700)
    (tree / "b" / "out").symlink_to("/nowhere")
    os.mkfifo(tree / "b" / "fifo", 0o600)
    os.utime(tree / "b", ns=(5, 1_000_000_000_000_000_007))
    _, entry = ask.whole("move", source=f"{tree}/b", destination=f"{elsewhere}/new/b", **me)
    moved = elsewhere / "new" / "b"
    assert (entry["path"], entry["mtime_ns"]) == (str(moved), 1_000_000_000_000_000_007)
    assert (moved / "file").read_bytes() == content
    assert stat.S_IMODE((moved / "file").stat().st_mode) == 0o700
    assert os.readlink(moved / "out") == "/nowhere"
    assert (moved / "fifo").is_fifo()
    assert (moved / "inner/deep").is_dir()
    assert not (tree / "b").exists()
    assert [p.name for p in (elsewhere / "new").iterdir()] == ["b"]


def test_a_move_that_fails_half_way_changes_nothing(ask, me, tree, elsewhere):
    with socket.socket(socket.AF_UNIX) as listener:
        directory = os.open(tree / "b", os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{directory}/z-socket")
        os.close(directory)
        with pytest.raises(OSError, match="socket") as refused:
            ask.whole("move", source=f"{tree}/b", destination=f"{elsewhere}/b", **me)
    assert refused.value.errno == errno.EXDEV
    assert (tree / "b/file").exists()
    assert list(elsewhere.iterdir()) == []


def test_reading(ask, tree, fails):
    (tree / "a.txt").write_text("content")
    value = ask("open_read", path=f"{tree}/a.txt")
    assert value["size"] == 7
    assert os.read(ask.fds[0], 100) == b"content"
    with fails(errno.EBADF):
        os.write(ask.fds[0], b"x")


@pytest.mark.parametrize("op", ["open_read", "open_write"])
def test_only_regular_files_are_opened(ask, me, tree, op, fails):
    os.mkfifo(tree / "fifo")
    (tree / "to-fifo").symlink_to("fifo")
    for path, code in (
        (f"{tree}/fifo", errno.EINVAL),
        (f"{tree}/to-fifo", errno.EINVAL),
        ("/dev/null", errno.EINVAL),
        ("/dev/tty", errno.EINVAL),
        (f"{tree}/b", errno.EISDIR),
        (f"{tree}/link", errno.EISDIR),
    ):
        with fails(code):
            ask(op, path=path, metadata={}, **me)


def test_a_pipe_put_in_place_of_a_file_is_not_waited_for(ask, tree, monkeypatch, fails):
    (tree / "a.txt").unlink()
    os.mkfifo(tree / "a.txt")
    real, first = agent_entries.refuse_special, [True]

    def look_away_once(status):
        if not (first and first.pop()):
            real(status)

    monkeypatch.setattr(agent_entries, "refuse_special", look_away_once)
    with fails(errno.EINVAL):
        ask("open_read", path=f"{tree}/a.txt")


def test_writing_makes_parents_and_empties(ask, me, tree):
    before = os.umask(0o077)
    try:
        ask("open_write", path=f"{tree}/x/y/new", metadata={}, **me)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tree / "x/y/new").stat().st_mode) == 0o644
    assert stat.S_IMODE((tree / "x/y").stat().st_mode) == 0o755
    (tree / "old").write_text("old content")
    (tree / "old").chmod(0o600)
    ask("open_write", path=f"{tree}/old", metadata={}, **me)
    os.write(ask.fds[1], b"new")
    assert (tree / "old").read_text() == "new"
    assert stat.S_IMODE((tree / "old").stat().st_mode) == 0o600


def test_a_written_file_belongs_to_the_user_also_if_it_was_there(ask, tree, monkeypatch):
    given: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "fchown", lambda fd, uid, gid: given.append((os.fstat(fd).st_ino, uid, gid)))
    ask("open_write", path=f"{tree}/a.txt", uid=1000, gid=1001, metadata={})
    assert given == [((tree / "a.txt").stat().st_ino, 1000, 1001)]


def test_writing_through_links(ask, me, tree):
    (tree / "to-file").symlink_to("a.txt")
    (tree / "dangling").symlink_to("b/made")
    ask("open_write", path=f"{tree}/to-file", metadata={}, **me)
    ask("open_write", path=f"{tree}/dangling", metadata={}, **me)
    assert (tree / "to-file").is_symlink()
    assert (tree / "b/made").is_file()


def test_metadata_is_replaced_as_a_whole(ask, me, tree, xattrs):
    path = f"{tree}/a.txt"
    os.setxattr(path, "user.other", b"kept")
    assert ask("open_write", path=path, metadata={"a": "1", "b": "2"}, **me) == {"metadata": {"a": "1", "b": "2"}}
    assert ask("open_write", path=path, metadata={"b": "3"}, **me) == {"metadata": {"b": "3"}}
    assert ask("stat", path=path)["metadata"] == {"b": "3"}
    assert ask("open_write", path=path, metadata={}, **me) == {"metadata": {}}
    assert os.listxattr(path) == ["user.other"]


def test_metadata_that_is_no_text_is_left_out(ask, tree, xattrs):
    os.setxattr(tree / "a.txt", "user.e2b.binary", b"\xff")
    os.setxattr(tree / "a.txt", b"user.e2b.\xff", b"x")
    os.setxattr(tree / "a.txt", "user.e2b.text", "ü".encode())
    assert ask("stat", path=f"{tree}/a.txt")["metadata"] == {"text": "ü"}


def test_metadata_without_xattrs_is_refused_before_anything_is_touched(ask, me, tree, monkeypatch, fails):
    def unsupported(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    for name in ("listxattr", "getxattr", "setxattr"):
        monkeypatch.setattr(os, name, unsupported)
    (tree / "a.txt").write_text("as it was")
    with fails(errno.EOPNOTSUPP):
        ask("open_write", path=f"{tree}/a.txt", metadata={"a": "1"}, **me)
    assert (tree / "a.txt").read_text() == "as it was"
    assert ask("open_write", path=f"{tree}/a.txt", metadata={}, **me) == {"metadata": {}}
