"""What is looked at from outside of a sandbox, in directories that its processes change meanwhile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from managed_e2b.local.runtime import look


def used(*paths: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in paths)


def test_size_counts_files_and_directories_once(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (below / "file").write_bytes(b"x" * 100_000)
    os.link(below / "file", tmp_path / "again")
    (tmp_path / "link").symlink_to("/")
    assert look._tree_size(str(tmp_path)) == used(tmp_path / "a", below, below / "file", tmp_path / "link")


def test_a_directory_swapped_for_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, sandbox = tmp_path / "host", tmp_path / "sandbox"
    host.mkdir()
    (host / "large").write_bytes(b"x" * 1_000_000)
    (sandbox / "inner").mkdir(parents=True)
    before = used(sandbox / "inner")
    measure, swapped = look._measure, []

    def measure_and_swap(directory: int, seen: set[int]) -> tuple[int, list[str]]:
        found = measure(directory, seen)
        if not swapped:
            swapped.append(True)
            shutil.rmtree(sandbox / "inner")
            (sandbox / "inner").symlink_to(host)
        return found

    monkeypatch.setattr(look, "_measure", measure_and_swap)
    assert look._tree_size(str(sandbox)) == before
    assert swapped


def test_what_is_too_deep_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_MAX_DEPTH", 2)
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"x" * 100_000)
    assert look._tree_size(str(tmp_path)) == used(tmp_path / "a", tmp_path / "a" / "b")
