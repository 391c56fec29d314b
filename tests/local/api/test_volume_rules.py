"""What may be a volume's name and where it may be mounted, and how its entries are told: decided from values alone."""

from __future__ import annotations

import posixpath
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_e2b.local.api.volume_content import moment, view
from managed_e2b.local.volumes.rules import MAX_NAME, is_name, mount_problems, path_problem

ENTRY = {
    "name": "f",
    "path": "/f",
    "type": "file",
    "size": 1,
    "mode": 0o644,
    "uid": 0,
    "gid": 0,
    "atime_ns": 0,
    "mtime_ns": 1_500_000,
    "ctime_ns": -1,
    "target": None,
}


@given(st.text(max_size=20))
def test_a_name_can_stand_in_a_path_and_a_command(name):
    assert not is_name(name) or (name.isascii() and name.replace("-", "_").replace("_", "a").isalnum())


def test_the_longest_name():
    assert is_name("x" * MAX_NAME)
    assert not is_name("x" * (MAX_NAME + 1))
    assert not is_name("name\n")


@given(st.text(alphabet="/.au\0", max_size=12))
def test_a_path_that_is_let_through_is_one_below_the_root(path):
    if path_problem(path) is None:
        assert posixpath.normpath(path) == path
        assert path.startswith("/")
        assert path.count("/") >= 1
        assert not {"", ".", ".."} & set(path.split("/")[1:])


@pytest.mark.parametrize("path", ["/data", "/home/user/data", "/mnt/a/b", "/usrlocal", "/root/x", "/..a", "/ü"])
def test_paths_that_are_let_through(path):
    assert path_problem(path) is None


def test_two_mounts_must_lie_beside_each_other():
    assert mount_problems(["/a", "/ab", "/b/a"]) == []
    assert mount_problems(["/a/b", "/a"]) == ["volume mount #1: path '/a' and '/a/b' lie within each other"]
    assert mount_problems(["/a", "/a", "b"]) == [
        "volume mount #1: path '/a' is already used",
        "volume mount #2: path must be absolute",
    ]


def test_times_that_no_date_can_tell_become_the_nearest():
    assert moment(10**30) == datetime.max.replace(tzinfo=UTC)
    assert moment(-(10**30)) == datetime.min.replace(tzinfo=UTC)
    assert view(ENTRY)["mtime"] == "1970-01-01T00:00:00.001500Z"
    assert view(ENTRY)["ctime"] == "1969-12-31T23:59:59.999999Z"


def test_names_that_are_no_text_can_be_told():
    shown = view({**ENTRY, "name": "a\udcff", "path": "/a\udcff", "target": "\udcff"})
    assert (shown["name"], shown["path"], shown["target"]) == ("a\ufffd", "/a\ufffd", "\ufffd")
    assert "target" not in view(ENTRY)
