"""Transfers that do not come to their end: clients that leave, sandboxes that die, files cut. And long ones."""

from __future__ import annotations

import asyncio
import gzip
import os
import resource

import httpx
import pytest

from managed_e2b.local.envd import transfer

OCTETS = {"Content-Type": "application/octet-stream"}
BIG = 64 * 1024 * 1024


async def connect(served):
    port = int(served.url.rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port)


def request_head(served, method: str, target: str, **headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in served.headers.items()), "", ""]).encode()


async def download(http, path: str, with_each_piece, **headers: str) -> None:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.stream("GET", f"/files?path={path}", headers=headers) as answer:
        async for _ in answer.aiter_raw():
            await with_each_piece()


@pytest.fixture
def big(tmp_path):
    with (tmp_path / "big").open("wb") as file:
        file.truncate(BIG)
    return tmp_path / "big"


async def test_a_client_that_leaves_a_download(served, until, nothing_open, big):
    reader, writer = await connect(served)
    writer.write(request_head(served, "GET", "/files?path=big"))
    assert b"200 OK" in await reader.readline()
    writer.close()
    await until(lambda: served.envd.open_calls == 0)
    await nothing_open()


async def test_a_client_that_leaves_an_upload(served, until, nothing_open, tmp_path):
    _, writer = await connect(served)
    head = request_head(
        served, "POST", "/files?path=f", Content_Type="application/octet-stream", Content_Length="999999"
    )
    writer.write(head + b"the beginning")
    await until(lambda: (tmp_path / "f").exists())
    assert served.envd.open_calls == 1
    writer.close()
    await until(lambda: served.envd.open_calls == 0)
    await nothing_open()
    assert (tmp_path / "f").stat().st_size <= len(b"the beginning")


async def test_a_sandbox_that_dies_during_an_upload(served, until, nothing_open, http, tmp_path):
    async def body():
        yield b"the beginning"
        await until(lambda: (tmp_path / "f").exists())
        await served.kill()
        yield b"the end"

    answer = await http.post("/files?path=f", content=body(), headers=OCTETS)
    assert (answer.status_code, answer.json()) == (502, {"code": 502, "message": "The sandbox was not found"})
    await nothing_open()


async def test_a_sandbox_that_dies_during_a_download(served, until, nothing_open, http, big):
    async def kill() -> None:
        if not served.gone:
            await served.kill()

    with pytest.raises(httpx.RemoteProtocolError):
        await download(http, "big", kill)
    await until(lambda: served.envd.open_calls == 0)
    await nothing_open()


async def test_a_compressed_download_is_cut_too(served, http, tmp_path):
    (tmp_path / "f").write_bytes(os.urandom(8_000_000))

    async def kill() -> None:
        if not served.gone:
            await served.kill()

    with pytest.raises(httpx.RemoteProtocolError):
        await download(http, "f", kill, Accept_Encoding="gzip")


async def test_a_file_that_is_cut_while_it_is_read(http, big):
    async def cut() -> None:
        os.truncate(big, 10)

    with pytest.raises(httpx.RemoteProtocolError):
        await download(http, "big", cut)


async def test_an_upload_that_stalls(served, nothing_open, monkeypatch):
    monkeypatch.setattr(transfer, "IDLE", 0.05)
    reader, writer = await connect(served)
    writer.write(
        request_head(served, "POST", "/files?path=f", Content_Type="application/octet-stream", Content_Length="9")
    )
    assert b"408" in await reader.readline()
    writer.close()
    await nothing_open()


async def test_a_refused_client_that_waits_for_a_continue_sends_nothing(served):
    reader, writer = await connect(served)
    writer.write(request_head(served, "POST", "/files", Expect="100-continue", Content_Length=str(BIG)))
    assert b"400" in await reader.readline()
    writer.close()


async def test_a_descriptor_in_use_is_closed_when_its_thread_is_done(until, tmp_path):
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    started, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(fd: int) -> None:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        os.write(fd, b"written")

    held = transfer.HeldFd(fd)
    work = asyncio.create_task(held.run(slow))
    await started.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    held.close()
    held.close()
    os.fstat(fd)
    go.set()
    await until(lambda: (tmp_path / "f").stat().st_size == 7)
    await until(lambda: not is_descriptor(fd))


def is_descriptor(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


async def stream_of(chunk: bytes, times: int):
    for _ in range(times):
        yield chunk


@pytest.mark.parametrize("form", ["octets", "multipart", "gzip bomb"])
async def test_memory_stays_flat(http, tmp_path, form):
    """200 MB through the server and this client; what either holds of it shows in the peak of the process."""
    chunk, times = os.urandom(1 << 20), 200
    size = len(chunk) * times
    if form == "octets":
        request = {"content": stream_of(chunk, times), "headers": OCTETS}
    elif form == "multipart":
        head = b'--B\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'

        async def body():
            yield head
            async for piece in stream_of(chunk, times):
                yield piece
            yield b"\r\n--B--\r\n"

        request = {"content": body(), "headers": {"Content-Type": "multipart/form-data; boundary=B"}}
    else:
        bomb = gzip.compress(bytes(size))
        request = {"content": bomb, "headers": {**OCTETS, "Content-Encoding": "gzip"}}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = await http.post("/files?path=f", **request)
    assert answer.status_code == 200
    assert (tmp_path / "f").stat().st_size == size
    received = 0
    async with http.stream("GET", "/files?path=f") as answer:
        async for piece in answer.aiter_raw():
            received += len(piece)
    assert received == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    (tmp_path / "f").unlink()
