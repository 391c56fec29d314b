"""Registries that send the server where it should not go, or never come to an end."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from managed_e2b.local.builds import reference, registry, transport
from managed_e2b.local.builds.registry import PullError, Registries
from managed_e2b.local.builds.transport import Distance

from . import images
from .images import Image, Member, layer

DATA = layer([Member("x", b"1")])
CONFIG, MANIFEST = Image([DATA]).parts()
OUTSIDE = "127.0.0.2"
"""Stands for an address that is not this host's."""


class Web:
    """A server at an address: path → what it answers with, a body or a URL to go to; and the paths it was asked for."""

    def __init__(self, address: str) -> None:
        self.bodies: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.asked: list[str] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                moved, body = web.moved.get(self.path), web.bodies.get(self.path, b"")
                self.send_response(302 if moved else 200 if self.path in web.bodies else 404)
                if moved:
                    self.send_header("Location", moved)
                self.send_header("Content-Type", images.MANIFEST)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer((address, 0), Handler)
        self.host = f"{address}:{self.server.server_port}"


@contextlib.contextmanager
def web(address: str) -> Iterator[Web]:
    made = Web(address)
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join()
        made.server.server_close()


@pytest.fixture
def outside(monkeypatch) -> Iterator[Web]:
    """A registry that is not on this host, with one image."""
    real = transport.distance
    monkeypatch.setattr(transport, "distance", lambda at: Distance.PUBLIC if at == OUTSIDE else real(at))
    with web(OUTSIDE) as made:
        made.bodies["/v2/a/manifests/latest"] = json.dumps(MANIFEST).encode()
        for data in (CONFIG, DATA):
            made.bodies[f"/v2/a/blobs/{images.digest(data)}"] = data
        yield made


@pytest.fixture
def service() -> Iterator[Web]:
    """Something of this host's own."""
    with web("127.0.0.1") as made:
        made.bodies["/secret"] = json.dumps(MANIFEST).encode()
        made.bodies["/layer"] = DATA
        yield made


BLOB = f"/v2/a/blobs/{images.digest(DATA)}"


async def pull(host: str, place: Path) -> None:
    registries = Registries({"registry.test": f"http://{host}"}, lambda: place)
    found = await registries.describe(reference.parse("registry.test/a"), None)
    descriptor = await registries.fetch(found, found.archives[0])
    try:
        assert os.read(descriptor, len(DATA) + 1) == DATA
    finally:
        os.close(descriptor)


async def test_a_registry_may_keep_its_layers_elsewhere(outside, tmp_path):
    outside.moved[BLOB] = f"http://{outside.host}/elsewhere"
    outside.bodies["/elsewhere"] = DATA
    await pull(outside.host, tmp_path)
    assert outside.asked[-1] == "/elsewhere"


@pytest.mark.parametrize(("path", "target"), [("/v2/a/manifests/latest", "/secret"), (BLOB, "/layer")])
async def test_a_registry_from_outside_does_not_lead_to_this_host(outside, service, tmp_path, path, target):
    outside.moved[path] = f"http://{service.host}{target}"
    with pytest.raises(PullError, match=r"sends who asks for .* to this host"):
        await pull(outside.host, tmp_path)
    assert service.asked == []


async def test_a_registry_of_this_host_may_lead_to_this_host(service, tmp_path):
    with web("127.0.0.1") as near:
        near.bodies["/v2/a/manifests/latest"] = json.dumps(MANIFEST).encode()
        near.bodies[f"/v2/a/blobs/{images.digest(CONFIG)}"] = CONFIG
        near.moved[BLOB] = f"http://{service.host}/layer"
        await pull(near.host, tmp_path)
    assert service.asked == ["/layer"]


async def test_no_description_is_read_without_end(outside, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "MAX_DESCRIPTION", 100_000)
    outside.bodies["/v2/a/manifests/latest"] = b" " * 100_001
    with pytest.raises(PullError, match="too large"):
        await pull(outside.host, tmp_path)
    outside.bodies["/v2/a/manifests/latest"] = b"[" * 100_000  # so deep that it cannot be read
    with pytest.raises(PullError, match="not understood"):
        await pull(outside.host, tmp_path)
    endless = {**MANIFEST, "layers": [{"digest": images.digest(DATA), "size": float("inf")}]}
    outside.bodies["/v2/a/manifests/latest"] = json.dumps(endless).encode()
    with pytest.raises(PullError, match="not understood"):
        await pull(outside.host, tmp_path)


async def test_the_layers_of_an_image_are_bounded_together(outside, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "MAX_ARCHIVES", 2 * len(DATA) - 1)
    outside.bodies["/v2/a/manifests/latest"] = json.dumps({**MANIFEST, "layers": MANIFEST["layers"] * 2}).encode()
    with pytest.raises(PullError, match="too large for an image"):
        await pull(outside.host, tmp_path)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", Distance.HOST),
        ("0.0.0.0", Distance.HOST),
        ("169.254.169.254", Distance.HOST),
        ("100.100.100.200", Distance.HOST),
        ("::1", Distance.HOST),
        ("fe80::1%lo", Distance.HOST),
        ("::ffff:127.0.0.1", Distance.HOST),
        ("fd00:ec2::254", Distance.HOST),
        ("10.1.2.3", Distance.LAN),
        ("192.168.77.5", Distance.LAN),
        ("fd12::1", Distance.LAN),
        ("8.8.8.8", Distance.PUBLIC),
        ("::ffff:8.8.8.8", Distance.PUBLIC),
        ("2606:4700::1111", Distance.PUBLIC),
    ],
)
def test_how_near_an_address_is(address, expected):
    assert transport.distance(address) == expected
