"""Layers that were made to do harm, unpacked as the spawner does it: in a fork."""

from __future__ import annotations

import errno
import io
import json
import mmap
import os
import socket
import tarfile
from pathlib import Path
from typing import Any

import pytest

from managed_e2b.local.runtime import children, unpack

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its root directory")

MB = 1 << 20
KILLED = "killed"
BOUNDS = unpack.Bounds(size=8 * MB, entries=100)


def entry(name: str = "file", kind: bytes = tarfile.REGTYPE, link: str = "", **pax: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.pax_headers = kind, link, {key.replace("__", "."): pax[key] for key in pax}
    return info


def sparse(name: str, size: int) -> tarfile.TarInfo:
    """A file of that size without a byte in the archive."""
    return entry(name, GNU__sparse__map="0,0", GNU__sparse__size=str(size), GNU__sparse__realsize=str(size))


def archive(*entries: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info in entries:
            tar.addfile(info)
    return out.getvalue()


def unpacked(data: bytes, place: Path) -> dict[str, Any]:
    """What the fork tells: the figures, or the failure; KILLED when it cannot."""
    file = place / "archive"
    file.write_bytes(data)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(file, "rb") as source:
        pid = children.fork(
            lambda: children.tell(theirs, unpack.unpack(source.fileno(), str(place / "layer"), BOUNDS)), theirs
        )
        theirs.close()
        told = ours.recv(65536)
        os.waitpid(pid, 0)
    return json.loads(told) if told else {"errno": KILLED}


@pytest.mark.parametrize(
    "entries",
    [
        [entry(mtime="inf")],
        [entry(mtime="nan")],
        [entry(mtime="1e30")],
        [entry(uid="99999999999")],
        [entry(uid="-5")],
        [entry(path="a\0b")],
        [entry(kind=tarfile.SYMTYPE, linkpath="a\0b")],
        [entry(GNU__sparse__map="a,b", GNU__sparse__size="5")],
        [entry("/".join("d" * 1990))],
        [sparse("less", -MB)],
    ],
    ids=lambda entries: str(entries[0].pax_headers or "deep")[:40],
)
def test_what_is_forged_is_damaged(tmp_path, entries):
    told = unpacked(archive(*entries), tmp_path)
    assert (told.get("errno"), told.get("step")) == (errno.EINVAL, "spawner"), told


def test_headers_of_headers_are_damaged(tmp_path):
    header = archive(entry(comment="x"))[:1024]
    assert unpacked(header * 3000, tmp_path)["errno"] == errno.EINVAL


def test_what_the_process_had_before_is_not_counted(tmp_path):
    with mmap.mmap(-1, 2 * unpack._MEMORY):
        assert unpacked(archive(entry()), tmp_path) == {"size": 0, "entries": 1, "left_out": 0}


def test_memory_that_ends_in_a_deep_call_is_the_archives_doing(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "_MEMORY", 0)
    held = [bytes(100_000) for _ in range(600)]
    kept = held.pop()  # so what is freed stays with the process: there are objects to be had, and no frames
    held.clear()
    told = unpacked(archive(entry("/".join("d" * 1990))), tmp_path)
    assert (told["errno"], len(kept)) == (errno.EINVAL, 100_000), told


def test_sizes_are_counted_whatever_the_archive_says_of_them(tmp_path):
    assert unpacked(archive(sparse("a", 9 * MB)), tmp_path)["errno"] == errno.EFBIG
    again = tmp_path / "again"
    again.mkdir()
    sneaky = [sparse(f"{number}", size) for number, size in enumerate([7 * MB, -7 * MB] * 4)]
    assert unpacked(archive(*sneaky), again)["errno"] == errno.EINVAL
    assert sum(path.stat().st_size for path in (again / "layer/root").iterdir()) <= BOUNDS.size


def test_a_header_that_takes_forever_to_read_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "_CPU_SECONDS", 1)
    monkeypatch.setattr(unpack, "_CPU_GRACE", 1)
    header = tarfile.TarInfo("digits")
    header.type, header.size = tarfile.XHDTYPE, 8 * 2**30 - 1
    told = unpacked(header.tobuf(tarfile.GNU_FORMAT) + b"0" * (4 * MB), tmp_path)
    assert told["errno"] in (KILLED, errno.EFBIG, errno.EINVAL)  # newer Pythons see at once that it is none


def test_nothing_is_imported_from_what_is_unpacked(tmp_path, monkeypatch):
    def late(layer: unpack._Layer) -> None:
        import antigravity  # noqa: F401 - whatever is not loaded yet

    monkeypatch.setattr(unpack, "_finish", late)
    assert "sys.meta_path is empty" in unpacked(archive(entry()), tmp_path)["message"]


def test_everything_stays_in_its_directory(tmp_path):
    entries = [
        entry("../../../../etc/up"),
        entry("/absolute"),
        entry("link", tarfile.SYMTYPE, "/etc"),
        entry("link/through"),
        entry("link/.wh.shadow"),
        entry(".wh..."),
        entry("device", tarfile.CHRTYPE),
    ]
    assert unpacked(archive(*entries), tmp_path) == {"size": 0, "entries": 7, "left_out": 1}
    names = sorted(str(path.relative_to(tmp_path / "layer/root")) for path in (tmp_path / "layer").rglob("*"))[1:]
    assert names == ["absolute", "etc", "etc/shadow", "etc/through", "etc/up", "link"]
    assert (tmp_path / "layer/root/etc/shadow").is_char_device()  # says that it is removed


def test_a_hard_link_does_not_lead_to_the_host(tmp_path):
    (tmp_path / "target").write_text("the host's")
    told = unpacked(archive(entry("hard", tarfile.LNKTYPE, str(tmp_path / "target"))), tmp_path)
    assert told["errno"] == errno.ENOENT


def test_the_overlays_own_attributes_are_not_taken_from_an_archive(tmp_path):
    pax = {"SCHILY.xattr.user.overlay.redirect": "/etc", "SCHILY.xattr.trusted.overlay.opaque": "y"}
    info = entry("file")
    info.pax_headers = pax
    unpacked(archive(info), tmp_path)
    assert os.listxattr(tmp_path / "layer/root/file") == []
