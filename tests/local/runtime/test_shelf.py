"""What outlives a server: layers and the images they were, found again, and taken away when room is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from managed_e2b.local.runtime import idmap, storage
from managed_e2b.local.runtime import shelf as shelf_module
from managed_e2b.local.runtime.shelf import Entry, Shelf, boot_id
from managed_e2b.local.runtime.storage import Home

IDS = idmap.detect()
KEYS = ("one", "two", "three")


def claim(place: Path) -> Home:
    home = storage.claim(place, IDS)
    (home.path / "layers").mkdir()
    return home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = claim(tmp_path / "data")
    yield home
    os.close(home.lock)


def new_layer(home: Home, name: str) -> Path:
    path = home.path / "layers" / name
    (path / "root").mkdir(parents=True)
    (path / "root" / "file").write_text(name)
    return path


def keep(shelf: Shelf, home: Home, key: str, size: int = 100, digest: str | None = None) -> tuple[Path, str]:
    path = new_layer(home, key)
    layer = shelf.put(path, size, digest)
    shelf.add(key, Entry([layer], [], None, None if digest else boot_id(), {"key": key}))
    return path, layer


def test_what_is_put_there_is_found_again(home):
    shelf = Shelf(home, IDS, 1000)
    assert not shelf.there
    assert shelf.find("one") is None
    path, layer = keep(shelf, home, "one", digest="sha256:1")
    assert path.is_symlink()
    assert (path / "root" / "file").read_text() == "one"
    for other in (shelf, Shelf(home, IDS, 1000)):
        assert other.by_digest("sha256:1") == layer
        assert other.by_digest("sha256:2") is None
        found = other.find("one")
        assert found is not None
        assert (found.layers, found.note) == ([layer], {"key": "one"})
        assert layer in other.durable


def test_what_was_not_synced_is_not_found_after_a_boot(home, monkeypatch):
    shelf = Shelf(home, IDS, 1000)
    keep(shelf, home, "unsynced")
    keep(shelf, home, "synced", digest="sha256:1")
    monkeypatch.setattr("managed_e2b.local.runtime.shelf.boot_id", lambda: "another")
    assert shelf.find("unsynced") is None
    assert shelf.find("synced") is not None


def test_what_a_version_with_other_notes_kept_is_not_found(home, monkeypatch):
    shelf = Shelf(home, IDS, 1000)
    keep(shelf, home, "one")
    with monkeypatch.context() as other:
        other.setattr(shelf_module, "FORMAT", -1)
        assert shelf.find("one") is None
    assert shelf.find("one") is not None


def test_an_image_whose_base_is_gone_is_not_found(home):
    shelf = Shelf(home, IDS, 1000)
    _, layer = keep(shelf, home, "x")
    shelf.add("there", Entry([layer], ["layers"], ["layers"], None, {}))
    shelf.add("gone", Entry([layer], ["../layers-of-old/root"], None, None, {}))
    assert shelf.find("there") is not None
    assert shelf.find("gone") is None


@pytest.mark.parametrize("text", ["", "{", "null"])
def test_a_damaged_index_is_no_error(home, text):
    shelf = Shelf(home, IDS, 1000)
    keep(shelf, home, "one", digest="sha256:1")
    for file in shelf.index.iterdir():
        file.write_text(text)
    assert shelf.find("one") is None
    assert shelf.by_digest("sha256:1") is None
    assert len(shelf.make_room(set())) == 1  # nobody knows what it is for


def test_the_longest_unused_goes_first(home):
    shelf = Shelf(home, IDS, 250)
    layers = {key: keep(shelf, home, key)[1] for key in KEYS}
    for number, file in enumerate(sorted(shelf.index.glob("image-*"), key=lambda file: file.stat().st_mtime_ns)):
        os.utime(file, (number, number))
    shelf.find("one")  # used just now
    assert [path.name for path in shelf.make_room(set())] == [f"old-{layers['two']}"]
    assert [shelf.find(key) is not None for key in KEYS] == [True, False, True]
    assert Shelf(home, IDS, 250).make_room(set()) == []
    assert len(Shelf(home, IDS, 0).make_room({layers["one"]})) == 1  # what is in use stays


def test_a_layer_that_another_image_needs_stays(home):
    shelf = Shelf(home, IDS, 50)
    _, shared = keep(shelf, home, "one")
    shelf.add("two", Entry([shared], [], None, None, {}))
    os.utime(max(shelf.index.glob("image-*"), key=lambda file: file.stat().st_mtime_ns), (10**10, 10**10))
    assert len(shelf.make_room({shared})) == 0
    assert len(shelf.make_room(set())) == 1
    assert shelf.find("two") is None


def test_a_layer_of_no_image_goes_at_once(home):
    shelf = Shelf(home, IDS, 1000)
    layer = shelf.put(new_layer(home, "lost"), 10)
    assert [path.name for path in shelf.make_room(set())] == [f"old-{layer}"]


def test_while_there_is_another_server_nothing_goes(home, tmp_path):
    shelf = Shelf(home, IDS, 0)
    keep(shelf, home, "one")
    other = claim(tmp_path / "data")
    try:
        assert shelf.make_room(set()) == []
        assert Shelf(other, IDS, 0).find("one") is not None
    finally:
        (other.path / "layers").rmdir()
        other.release()
    assert len(shelf.make_room(set())) == 1
