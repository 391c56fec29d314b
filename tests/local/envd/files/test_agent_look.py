"""What the file agent tells: paths, users, entries, lists."""

from __future__ import annotations

import errno
import json
import os
import stat

import pytest

from managed_e2b.local.runtime import agent_entries, agent_trees


def names(entries):
    return [entry["name"] for entry in entries]


@pytest.mark.parametrize("path", ["", "relative", "/a\0b", "/lone\ud800", None, 7])
@pytest.mark.parametrize("op", ["stat", "list", "remove", "open_read", "make_dir"])
def test_what_is_no_path_is_refused(ask, me, op, path, fails):
    with fails(errno.EINVAL):
        ask(op, path=path, depth=1, **me)


@pytest.mark.parametrize("op", ["stat", "list", "open_read", "make_dir", "open_write"])
def test_a_parent_that_is_a_file(ask, me, tmp_path, op):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        ask(op, path=f"{tmp_path}/file/below", depth=1, metadata={}, **me)


@pytest.mark.parametrize("op", ["list", "open_read", "make_dir", "open_write"])
def test_a_loop_of_links(ask, me, tmp_path, op, fails):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with fails(errno.ELOOP, errno.ENOTDIR):
        ask(op, path=f"{tmp_path}/a", depth=1, metadata={}, **me)


@pytest.fixture
def accounts(monkeypatch, tmp_path):
    passwd, group = tmp_path / "passwd", tmp_path / "group"
    monkeypatch.setattr(agent_entries, "PASSWD", os.fsencode(passwd))
    monkeypatch.setattr(agent_entries, "GROUP", os.fsencode(group))
    passwd.write_text("root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\nbare:x:5:6:::\n")
    group.write_text("root:x:0:\nuser:x:1000:\nsudo:x:27:other,user\n")
    return passwd, group


def test_users_are_those_of_the_sandbox(ask, accounts):
    assert ask("user", name="user") == {
        "name": "user",
        "uid": 1000,
        "gid": 1000,
        "groups": [27, 1000],
        "home": "/home/user",
        "shell": "/bin/bash",
    }
    bare = ask("user", name="bare")
    assert (bare["home"], bare["shell"], bare["groups"]) == ("/", "/bin/sh", [6])


@pytest.mark.parametrize("name", ["nobody", "", "1000", "user:x", "../user"])
def test_unknown_users(ask, accounts, name):
    with pytest.raises(FileNotFoundError):
        ask("user", name=name)


def test_a_user_added_later_is_seen(ask, accounts):
    passwd, _ = accounts
    with pytest.raises(FileNotFoundError):
        ask("user", name="late")
    with passwd.open("a") as file:
        file.write("late:x:7:7::/:/bin/sh\n")
    assert ask("user", name="late")["uid"] == 7


def test_account_files_may_be_anything(ask, accounts):
    passwd, group = accounts
    passwd.write_bytes(
        b"\xff\xfe::::\nuser:x:abc:1::/:/bin/sh\nuser:x:99999999999:1::/:/b\nuser:x:4294967295:1::/:/b\nuser:x:3\n::\n\nuser:x:9:9::/h:/s\n"
    )
    group.unlink()
    assert ask("user", name="user")["uid"] == 9
    passwd.unlink()
    os.mkfifo(passwd)
    with pytest.raises(FileNotFoundError):
        ask("user", name="user")


def test_a_file(ask, tmp_path):
    path = tmp_path / "f.txt"
    path.write_text("four")
    path.chmod(0o640)
    os.utime(path, ns=(1, 1_700_000_000_123_456_789))
    entry = ask("stat", path=str(path))
    assert (entry["name"], entry["path"], entry["type"], entry["size"]) == ("f.txt", str(path), "file", 4)
    assert (entry["mode"], entry["permissions"]) == (0o640, "-rw-r-----")
    assert (entry["mtime_ns"], entry["target"]) == (1_700_000_000_123_456_789, None)


def test_links_are_told_by_what_they_lead_to(ask, tmp_path):
    real = tmp_path.resolve()
    (tmp_path / "dir").mkdir(mode=0o750)
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("dir")
    entry = ask("stat", path=f"{tmp_path}/one")
    assert (entry["type"], entry["mode"], entry["target"]) == ("directory", 0o750, f"{real}/dir")
    assert entry["permissions"] == "Lrwxrwxrwx"


def test_links_that_lead_nowhere(ask, tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("dangling", "loop"):
        entry = ask("stat", path=f"{tmp_path}/{name}")
        assert (entry["type"], entry["mode"], entry["target"]) == ("", 0, f"{tmp_path}/{name}")


def test_a_chain_of_links_longer_than_the_stack(ask, tmp_path, fails):
    (tmp_path / "0").write_text("")
    for i in range(1500):
        (tmp_path / f"{i + 1}").symlink_to(f"{i}")
    assert ask("stat", path=f"{tmp_path}/1500")["type"] == ""
    with fails(errno.ELOOP):
        ask("open_read", path=f"{tmp_path}/1500")


def test_what_is_neither_file_nor_directory(ask, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert (ask("stat", path=f"{tmp_path}/fifo")["type"], ask("stat", path="/dev/null")["type"]) == ("", "")


def test_names_that_are_not_utf8(ask, me, tmp_path):
    raw = os.fsencode(tmp_path) + b"/caf\xe9"
    with open(raw, "w"):
        path = os.fsdecode(raw)
    (entry,), _ = ask.whole("list", path=str(tmp_path), depth=1)
    assert (entry["name"], entry["path"]) == ("caf\udce9", path)
    assert ask("stat", path=path)["name"] == "caf\udce9"
    ask.whole("move", source=path, destination=f"{tmp_path}/plain", **me)
    assert os.listdir(tmp_path) == ["plain"]


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (stat.S_IFREG | 0o644, "-rw-r--r--"),
        (stat.S_IFDIR | 0o755, "drwxr-xr-x"),
        (stat.S_IFDIR | 0o1777, "dtrwxrwxrwx"),
        (stat.S_IFREG | 0o4755, "urwxr-xr-x"),
        (stat.S_IFREG | 0o2755, "grwxr-xr-x"),
        (stat.S_IFLNK | 0o777, "Lrwxrwxrwx"),
        (stat.S_IFIFO | 0o600, "prw-------"),
        (stat.S_IFSOCK | 0o600, "Srw-------"),
        (stat.S_IFBLK | 0o660, "Drw-rw----"),
        (stat.S_IFCHR | 0o666, "Dcrw-rw-rw-"),
        (stat.S_IFREG, "----------"),
    ],
)
def test_permissions_in_gos_notation(mode, text):
    assert agent_entries.permissions_text(mode) == text


def test_parents_come_before_children_in_order_of_names(ask, tree):
    def listed(depth):
        return [e["path"].removeprefix(f"{tree}/") for e in ask.whole("list", path=str(tree), depth=depth)[0]]

    assert listed(1) == ["a", "a.txt", "b", "c", "link"]
    assert listed(2) == ["a", "a.txt", "b", "b/file", "b/inner", "c", "link"]
    assert listed(9) == ["a", "a.txt", "b", "b/file", "b/inner", "b/inner/deep", "c", "link"]


def test_a_link_to_a_directory_can_be_listed_and_keeps_its_name(ask, tree):
    entries, _ = ask.whole("list", path=f"{tree}/link", depth=1)
    assert [e["path"] for e in entries] == [f"{tree}/link/file", f"{tree}/link/inner"]


@pytest.mark.parametrize(("name", "error"), [("missing", FileNotFoundError), ("a.txt", NotADirectoryError)])
def test_what_cannot_be_listed(ask, tree, name, error):
    with pytest.raises(error):
        ask("list", path=f"{tree}/{name}", depth=1)


def test_a_huge_directory_comes_in_slices(ask, tmp_path):
    for i in range(10_000):
        os.close(os.open(tmp_path / f"{i:05}", os.O_CREAT))
    answer = ask("list", path=str(tmp_path), depth=1)
    entries = answer["items"]
    while answer["job"] is not None:
        assert len(answer["items"]) <= agent_trees.ITEMS
        answer = ask("job", job=answer["job"])
        entries += answer["items"]
    assert names(entries) == [f"{i:05}" for i in range(10_000)]


def test_answers_stay_small_whatever_the_names(ask, tmp_path, monkeypatch):
    """A frame between agent and server has a limit; each byte that is not UTF-8 takes six in JSON."""
    for i in range(300):
        os.close(os.open(os.fsencode(tmp_path) + b"/" + bytes([200 + i % 50]) * 200 + b"%d" % i, os.O_CREAT))
    monkeypatch.setattr(agent_trees, "ANSWER", 50_000)
    answer = ask("list", path=str(tmp_path), depth=1)
    entries = answer["items"]
    while answer["job"] is not None:
        assert len(json.dumps(answer)) <= answer["weight"] + 1000 < 60_000
        answer = ask("job", job=answer["job"])
        entries += answer["items"]
    assert len(entries) == 300


def test_entries_that_go_away_while_listed_are_left_out(ask, tmp_path):
    for i in range(600):
        (tmp_path / f"{i:03}").mkdir()
    answer = ask("list", path=str(tmp_path), depth=2)
    seen = len(answer["items"])
    for i in range(seen, 599):
        (tmp_path / f"{i:03}").rmdir()
    rest = ask("job", job=answer["job"])
    while rest["job"] is not None:
        answer["items"] += rest["items"]
        rest = ask("job", job=rest["job"])
    assert names(answer["items"] + rest["items"]) == [*(f"{i:03}" for i in range(seen)), "599"]


def test_work_that_nobody_comes_back_for_is_forgotten(ask, tmp_path, monkeypatch, fails):
    monkeypatch.setattr(agent_trees, "ITEMS", 1)
    for i in range(3):
        (tmp_path / f"{i}").mkdir()
    first = ask("list", path=str(tmp_path), depth=1)["job"]
    others = [ask("list", path=str(tmp_path), depth=1)["job"] for _ in range(agent_trees.JOBS)]
    with fails(errno.ESTALE):
        ask("job", job=first)
    for job in others:
        ask("drop", job=job)
        ask("drop", job=job)
    with pytest.raises(OSError, match="dropped"):
        ask("job", job=others[0])
