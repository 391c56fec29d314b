"""`/files` over real HTTP: what goes in comes out, and every refusal says why."""

from __future__ import annotations

import errno
import gzip
import io
import os
import time
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from managed_e2b.local.envd import multipart, transfer
from managed_e2b.local.envd.signatures import sign

OCTETS = {"Content-Type": "application/octet-stream"}
CONTENTS = {"empty": b"", "text": b"text", "binary": b"\0\xff\xfe\r\n--boundary", "large": bytes(range(256)) * 12_000}


def refusal(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()
    assert body["code"] == answer.status_code
    return answer.status_code, body["message"]


# --- through the SDK


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("options", [{}, {"use_octet_stream": True}, {"gzip": True}])
async def test_what_is_written_is_read(sandbox, sync_sandbox, tmp_path, in_thread, content, options):
    info = await sandbox.files.write("a/b c/ü.bin", content, **options)
    assert (info.name, info.path) == ("ü.bin", f"{tmp_path}/a/b c/ü.bin")
    assert (tmp_path / "a/b c/ü.bin").read_bytes() == content
    assert await sandbox.files.read("a/b c/ü.bin", format="bytes") == content
    await in_thread(sync_sandbox.files.write, "~/sync", io.BytesIO(content), **options)
    assert await in_thread(sync_sandbox.files.read, "sync", format="bytes", gzip=True) == content


async def test_many_files_in_one_upload(sandbox, tmp_path):
    files = [{"path": f"many/{i % 7}/{i}.txt", "data": f"content {i}"} for i in range(300)]
    written = await sandbox.files.write_files(files, metadata=None)
    assert [info.path for info in written] == [f"{tmp_path}/{file['path']}" for file in files]
    assert all((tmp_path / file["path"]).read_text() == file["data"] for file in files)


async def test_metadata_comes_back(sandbox, xattrs):
    info = await sandbox.files.write("f", "x", metadata={"Author": "mish", "empty": ""})
    assert info.metadata == {"author": "mish", "empty": ""}
    assert (await sandbox.files.get_info("f")).metadata == info.metadata
    assert (await sandbox.files.write("f", "x", use_octet_stream=True)).metadata is None


# --- uploads


async def test_the_filename_may_have_directories(http, tmp_path):
    parts = [
        ("other", ("ignored", b"x")),
        ("file", ("sub/dir/one", b"1")),
        ("file", (f"{tmp_path}/two", b"2")),
        ("file", ('~/three; "3"', b"3")),
    ]
    answer = await http.post("/files", files=parts)
    assert answer.json() == [
        {"name": "one", "path": f"{tmp_path}/sub/dir/one", "type": "file"},
        {"name": "two", "path": f"{tmp_path}/two", "type": "file"},
        {"name": "three; %223%22", "path": f"{tmp_path}/three; %223%22", "type": "file"},  # as httpx spells it
    ]
    assert not (tmp_path / "ignored").exists()


async def test_the_path_of_the_query_wins(http, tmp_path):
    await http.post("/files", params={"path": "wanted"}, files={"file": ("other", b"x")})
    assert [p.name for p in tmp_path.iterdir()] == ["wanted"]


async def test_an_existing_file_keeps_its_mode(http, tmp_path):
    (tmp_path / "run").write_text("a longer content")
    (tmp_path / "run").chmod(0o755)
    await http.post("/files", params={"path": "run"}, content=b"short", headers=OCTETS)
    assert ((tmp_path / "run").read_text(), (tmp_path / "run").stat().st_mode & 0o777) == ("short", 0o755)


async def test_names_that_are_not_utf8(http, tmp_path):
    where = f"/files?path={quote(str(tmp_path))}/%FF%FE"
    answer = await http.post(where, content=b"x", headers=OCTETS)
    assert answer.json()[0]["name"] == "��"
    assert os.listdir(os.fsencode(tmp_path)) == [b"\xff\xfe"]
    answer = await http.get(where)
    assert (answer.content, answer.headers["content-disposition"]) == (b"x", "inline; filename*=utf-8''%FF%FE")


async def test_gzip_of_several_members(http, tmp_path):
    body = gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two")
    await http.post("/files?path=f", content=body, headers={**OCTETS, "Content-Encoding": "gzip"})
    assert (tmp_path / "f").read_bytes() == b"one two"


def multipart_body(
    *, end: bytes = b"\r\n--B--\r\n", disposition: bytes = b'form-data; name="file"; filename="f"'
) -> bytes:
    return b"--B\r\nContent-Disposition: " + disposition + b"\r\n\r\ncontent" + end


MULTIPART = {"Content-Type": "multipart/form-data; boundary=B"}
GZIPPED = {**OCTETS, "Content-Encoding": "gzip"}


@pytest.mark.parametrize(
    ("query", "headers", "body", "message"),
    [
        ("", OCTETS, b"x", "path query parameter is required for raw body upload"),
        ("?path=f", {"Content-Type": "text/plain"}, b"x", "unsupported content type: text/plain, expected"),
        ("?path=f", {}, b"x", "unsupported content type: , expected"),
        ("?path=f", {**OCTETS, "Content-Encoding": "br"}, b"x", "unsupported Content-Encoding: br, supported: [gzip]"),
        ("?path=f", GZIPPED, b"no gzip", "error decompressing request body: "),
        ("?path=f", GZIPPED, b"", "error decompressing request body: unexpected end"),
        (
            "?path=f",
            GZIPPED,
            gzip.compress(b"content" * 999, mtime=0)[:-9],
            "error decompressing request body: unexpected end",
        ),
        ("?path=~root/f", OCTETS, b"x", "error resolving path: "),
        ("?path=%00", OCTETS, b"x", "error resolving path: "),
        ("?path=.", OCTETS, b"x", "path is a directory: "),
        ("?path=", OCTETS, b"x", "path is a directory: "),
        ("?path=file/below", OCTETS, b"x", "error ensuring directories: path is a file"),
        ("?path=" + "a" * 300, OCTETS, b"x", "File name too long"),
        ("?path=/dev/null", OCTETS, b"x", "not a regular file"),
        ("?path=f&signature_expiration=soon", OCTETS, b"x", "invalid signature_expiration 'soon'"),
        ("?path=f", {**OCTETS, "X-Metadata-a": "\u00e9"}, b"x", "invalid metadata: "),
        ("", {"Content-Type": "multipart/form-data"}, b"x", "error parsing multipart form: no boundary"),
        ("", {"Content-Type": f"multipart/form-data; boundary={'B' * 300}"}, b"x", "error reading form: "),
        ("", MULTIPART, b"not multipart at all", "error reading form: "),
        ("", MULTIPART, b"", "error reading form: unexpected end of the body"),
        ("", MULTIPART, multipart_body(end=b""), "error reading form: unexpected end of the body"),
        ("", MULTIPART, multipart_body(disposition=b'form-data; name="file"'), "filename not found"),
        ("", MULTIPART, multipart_body(disposition=b'form-data; name="file"; filename="."'), "path is a directory: "),
        (
            "",
            MULTIPART,
            multipart_body(end=b"\r\n") + multipart_body(),
            "you cannot upload multiple files to the same path",
        ),
    ],
)
async def test_uploads_that_are_refused(nothing_open, http, tmp_path, query, headers, body, message):
    (tmp_path / "file").write_text("as it was")
    encoded = {name: value.encode() for name, value in headers.items()}
    status, text = refusal(await http.post(f"/files{query}", content=body, headers=encoded))
    assert (status, message in text) == (400, True), text
    assert (tmp_path / "file").read_text() == "as it was"
    await nothing_open()


async def test_the_headers_of_a_part_are_bounded(http, monkeypatch):
    monkeypatch.setattr(multipart, "HEADERS_LIMIT", 100)
    body = multipart_body(disposition=b'form-data; name="file"; filename="' + b"f" * 200 + b'"')
    status, text = refusal(await http.post("/files", content=body, headers=MULTIPART))
    assert (status, "headers of a part" in text) == (400, True)


async def test_a_full_disk(nothing_open, http, tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(transfer, "_write_all", full)
    content = os.urandom(20_000_000)  # much more than what is buffered on the way: the answer comes while it is sent
    for request in ({"content": content, "headers": OCTETS}, {"files": {"file": ("f", content)}}):
        status, text = refusal(await http.post("/files?path=f", **request))
        assert (status, text) == (507, f"'{tmp_path}/f': not enough disk space available")
    await nothing_open()


async def test_a_filesystem_without_room_for_metadata(http, tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "getxattr", unsupported)
    answer = await http.post("/files?path=f", content=b"x", headers={**OCTETS, "X-Metadata-A": "1"})
    assert refusal(answer) == (
        400,
        f"'{tmp_path}/f': its filesystem has no extended attributes, it cannot store metadata",
    )
    assert not (tmp_path / "f").exists()


# --- downloads


async def test_the_headers_of_a_download(http, tmp_path):
    (tmp_path / "page.html").write_text("<p>")
    os.utime(tmp_path / "page.html", (1_700_000_000, 1_700_000_000))
    answer = await http.get("/files?path=page.html")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-disposition"] == "inline; filename=page.html"
    assert answer.headers["content-length"] == "3"
    assert answer.headers["last-modified"] == "Tue, 14 Nov 2023 22:13:20 GMT"
    assert answer.headers["vary"] == "Accept-Encoding"
    assert answer.headers["content-security-policy"] == "sandbox allow-scripts"
    assert "content-encoding" not in answer.headers


async def test_gzip_when_it_is_asked_for(http, tmp_path):
    (tmp_path / "f").write_bytes(b"content " * 500_000)
    async with http.stream("GET", "/files?path=f", headers={"Accept-Encoding": "gzip"}) as answer:
        raw = b"".join([chunk async for chunk in answer.aiter_raw()])
    assert (answer.headers["content-encoding"], "content-length" in answer.headers) == ("gzip", False)
    assert gzip.decompress(raw) == b"content " * 500_000


async def test_parts_of_a_file(http, tmp_path):
    content = os.urandom(2_500_000)
    (tmp_path / "f").write_bytes(content)
    for value, start, end in (
        ("bytes=0-0", 0, 1),
        ("bytes=1000000-", 1_000_000, 2_500_000),
        ("bytes=-5", 2_499_995, 2_500_000),
    ):
        answer = await http.get("/files?path=f", headers={"Range": value, "Accept-Encoding": "gzip"})
        assert (answer.status_code, answer.content) == (206, content[start:end])
        assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/2500000"
    answer = await http.get("/files?path=f", headers={"Range": "bytes=2500000-"})
    assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */2500000")
    answer = await http.get(
        "/files?path=f", headers={"Range": "bytes=0-0", "If-Range": "Tue, 14 Nov 2000 22:13:20 GMT"}
    )
    assert (answer.status_code, answer.content) == (200, content)


async def test_a_file_that_did_not_change(http, tmp_path):
    (tmp_path / "f").write_text("x")
    date = (await http.get("/files?path=f")).headers["last-modified"]
    answer = await http.get("/files?path=f", headers={"If-Modified-Since": date})
    assert (answer.status_code, answer.content) == (304, b"")


@pytest.fixture
def symbols() -> bytes:
    """A file of megabytes, on most hosts, whose size is 0."""
    return Path("/proc/kallsyms").read_bytes()


async def test_files_that_do_not_tell_their_size(http, symbols):
    answer = await http.get("/files?path=/proc/self/status")
    assert b"VmRSS" in answer.content
    assert (await http.get("/files?path=/proc/kallsyms")).content == symbols


@pytest.mark.parametrize("size", [0, 1, transfer.CHUNK - 1, transfer.CHUNK, transfer.CHUNK + 1])
async def test_sizes_around_a_chunk(http, tmp_path, size):
    content = bytes(range(256)) * (size // 256 + 1)
    (tmp_path / "f").write_bytes(content[:size])
    answer = await http.get("/files?path=f")
    assert (answer.content, answer.headers["content-length"]) == (content[:size], str(size))


async def test_a_file_that_cannot_be_read(http, tmp_path, monkeypatch):
    def broken(fd, size, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "f").write_text("x")
    monkeypatch.setattr(os, "pread", broken)
    assert refusal(await http.get("/files?path=f")) == (500, f"error reading file '{tmp_path}/f': Input/output error")


@pytest.mark.parametrize(
    ("query", "headers", "status", "message"),
    [
        ("path=missing", {}, 404, "path '{home}/missing' does not exist"),
        ("path=file/below", {}, 404, "path '{home}/file/below' does not exist"),
        ("path=.", {}, 400, "path '{home}' is a directory"),
        ("", {}, 400, "path '{home}' is a directory"),
        ("path=/dev/zero", {}, 400, "path '/dev/zero': not a regular file"),
        ("path=loop", {}, 400, "path '{home}/loop': Too many levels of symbolic links"),
        ("path=file&username=who", {}, 401, "error looking up user 'who': unknown user who"),
        ("path=file&username=", {}, 401, "error looking up user '': unknown user "),
        (
            "path=file",
            {"Accept-Encoding": "identity;q=0"},
            406,
            "no acceptable encoding: identity and gzip are to be had",
        ),
    ],
)
async def test_downloads_that_are_refused(nothing_open, http, tmp_path, query, headers, status, message):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    answer = await http.get(f"/files?{query}", headers=headers)
    assert refusal(answer) == (status, message.format(home=tmp_path))
    await nothing_open()


async def test_other_methods(http):
    for method in ("PUT", "DELETE", "HEAD", "PATCH"):
        assert (await http.request(method, "/files?path=f")).status_code == 405


# --- who may


async def test_the_token_or_a_signature(served, http, tmp_path):
    (tmp_path / "f").write_text("content")
    token = http.headers.pop("X-Access-Token")
    soon, before = int(time.time()) + 100, int(time.time()) - 100
    for query, message in (
        ("path=f", "missing signature query parameter"),
        ("path=f&signature=v1_x", "invalid signature"),
        ("path=g&signature=" + quote(sign(token, "f", "read", "", None), safe=""), "invalid signature"),
        ("path=f&signature=" + quote(sign(token, "f", "write", "", None), safe=""), "invalid signature"),
        ("path=f&username=root&signature=" + quote(sign(token, "f", "read", "", None), safe=""), "invalid signature"),
        ("path=f&signature=" + quote(sign(token, "f", "read", "", soon), safe=""), "invalid signature"),
        (
            f"path=f&signature_expiration={before}&signature=" + quote(sign(token, "f", "read", "", before), safe=""),
            "signature is already expired",
        ),
    ):
        assert refusal(await http.get(f"/files?{query}")) == (401, message)
    for expiration in (None, soon):
        signature = sign(token, "f", "read", "user", expiration)
        params = {"path": "f", "username": "user", "signature": signature}
        answer = await http.get("/files", params=params | ({"signature_expiration": expiration} if expiration else {}))
        assert answer.text == "content"
    params = {"path": "new", "signature": sign(token, "new", "write", "", None)}
    assert refusal(await http.get("/files", params=params)) == (401, "invalid signature")
    assert (await http.post("/files", params=params, files={"file": ("x", b"1")})).status_code == 200
    answer = await http.get("/files?path=f", headers={"X-Access-Token": "wrong"})
    assert refusal(answer) == (401, "access token present in header but does not match")


async def test_without_a_token_everybody_may(served, http, tmp_path):
    (tmp_path / "f").write_text("content")
    served.envd._ctx.access_token = None
    http.headers.pop("X-Access-Token")
    assert (await http.get("/files?path=f")).text == "content"
