"""https:// to the server's own names: through its proxy, with its own authority, and to nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import stat
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from managed_e2b.local import connections, keys, tls
from managed_e2b.local.server import LocalServer

DOMAIN = "e2b.app"


@pytest.fixture
async def secured(serve, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    return await serve(clock=None, tls_domain=DOMAIN)


@pytest.fixture
async def browser(secured):
    """A client that has what `me2b env` prints."""
    trusted = ssl.create_default_context(cafile=secured.server.state().environment()["SSL_CERT_FILE"])
    async with httpx.AsyncClient(proxy=secured.server.url, verify=trusted, trust_env=False) as client:
        yield client


@contextlib.asynccontextmanager
async def connected(world, request: str):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.server.url.rpartition(":")[2]))
    writer.write(request.encode())
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(world, target: str) -> tuple[int, bytes]:
    async with connected(world, f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n") as (r, _):
        head, _, body = (await r.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), body


async def test_the_control_plane_and_envd_by_their_names_alone(secured, browser):
    made = await browser.post(
        f"https://api.{DOMAIN}/v2/sandboxes", json={"templateID": "base"}, headers={"X-API-KEY": secured.server.api_key}
    )
    assert made.status_code == 201
    sandbox = made.json()
    assert sandbox["domain"] == DOMAIN
    for url, headers in (
        (f"https://49983-{sandbox['sandboxID']}.{DOMAIN}/x", {}),
        (f"https://sandbox.{DOMAIN}/x", secured.envd_headers(sandbox)),
    ):
        assert (await browser.get(url, headers=headers)).json()["envd"] == sandbox["sandboxID"]
    refused = await browser.get(f"https://api.{DOMAIN}/v2/sandboxes")
    assert refused.status_code == 401


async def test_plain_http_through_a_tunnel(secured):
    sandbox = await secured.create()
    host = f"49983-{sandbox['sandboxID']}.{DOMAIN}"
    async with connected(secured, f"CONNECT {host}:80 HTTP/1.1\r\nHost: {host}:80\r\n\r\n") as (reader, writer):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(f"GET /in HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert b'"path": "/in"' in await reader.read()


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:22",
        "127.0.0.1:443",
        "localhost:443",
        "[::1]:443",
        "169.254.169.254:80",
        "e2b.app.example.com:443",
        "example.com:443",
        "a.b.e2b.app:443",
        ".e2b.app:443",
        f"api.{DOMAIN}:22",
        f"api.{DOMAIN}",
        "/etc",
    ],
)
async def test_nothing_else_is_let_through(secured, target):
    status, body = await answer(secured, target)
    assert status == 403
    assert b'"code":403' in body


async def test_without_tls_there_is_no_tunnel(world):
    assert (await answer(world, f"api.{DOMAIN}:443"))[0] == 405


async def test_no_tunnel_leads_through_a_tunnel(secured, browser):
    request = browser.build_request("CONNECT", f"https://api.{DOMAIN}/")
    request.extensions["target"] = f"api.{DOMAIN}:443".encode()
    assert (await browser.send(request)).status_code == 405


async def test_a_client_that_speaks_no_tls_is_cut(secured):
    host = f"api.{DOMAIN}:443"
    async with connected(secured, f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n") as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
    assert (await secured.anonymous.get("/health")).status_code == 204


async def test_a_client_that_trusts_nobody_hangs_up(secured, until):
    strangers = httpx.AsyncClient(proxy=secured.server.url, trust_env=False)
    async with strangers:
        with pytest.raises(httpx.ConnectError):
            await strangers.get(f"https://api.{DOMAIN}/health")
    assert (await secured.anonymous.get("/health")).status_code == 204


async def test_a_head_that_never_ends_is_cut(world, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0.05)
    for begin in ("", "GET / HTTP/1.1\r\nHost: local"):
        async with connected(world, begin) as (reader, _), asyncio.timeout(10):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""


async def test_a_head_in_pieces_and_a_second_request_are_served(world, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 30.0)
    async with connected(world, "GET /health HTTP/1.1\r\nHo") as (reader, writer):
        for rest in ("st: localhost\r\n\r\n", "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            writer.write(rest.encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")


def test_programs_that_know_only_the_variables(tmp_path, monkeypatch):
    """urllib, in this process, by nothing but the environment."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = tls.prepare(keys.tls_directory(), DOMAIN)
    state = keys.ServerState("http://127.0.0.1:1", "k", 1, DOMAIN, str(found.authority_file), str(found.bundle_file))
    variables = state.environment()
    assert variables["HTTPS_PROXY"] == "http://127.0.0.1:1"
    assert variables["NODE_EXTRA_CA_CERTS"].endswith("ca.pem")
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        assert variables[name] == str(found.bundle_file)
    assert keys.ServerState("http://127.0.0.1:1", "k", 1).environment().keys() == {
        "E2B_API_URL",
        "E2B_SANDBOX_URL",
        "E2B_VOLUME_API_URL",
        "E2B_API_KEY",
        "NO_PROXY",
    }


async def test_the_sdk_with_no_url_at_all(secured, monkeypatch):
    """What the SDK does once the deprecated URL variables are gone: its own names, by proxy and authority alone."""
    variables = secured.server.state().environment()
    program = (
        "from e2b import Sandbox\n"
        "sandbox = Sandbox.create('base', timeout=60)\n"
        "print(sandbox.is_running(), sandbox.get_host(3000).endswith('.e2b.app'), sandbox.kill())\n"
    )
    environment = {name: variables[name] for name in ("E2B_API_KEY", "HTTPS_PROXY", "SSL_CERT_FILE")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=environment, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert out.decode().split() == ["True", "True", "True"]


# --- the authority


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    return tmp_path


def handshake(server: tls.Tls, trusted: ssl.SSLContext, name: str) -> str | None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        trusted.wrap_bio(to_client, to_server, server_hostname=name),
        server.context.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides[0].version()


def test_the_authority_stays_and_its_key_is_ours_alone(home):
    first = tls.prepare(home)
    before = first.authority_file.read_bytes()
    assert tls.prepare(home).authority_file.read_bytes() == before
    key = first.authority_file.with_name("ca-key.pem")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert [path for path in key.parent.iterdir() if b"PRIVATE" in path.read_bytes()] == [key]
    key.write_text("torn")
    assert tls.prepare(home).authority_file.read_bytes() != before


def test_it_vouches_for_its_domain_and_no_other(home):
    ours = tls.prepare(home, "boxes.example.org")
    trusted = ssl.create_default_context(cafile=str(ours.bundle_file))
    trusted.verify_flags |= ssl.VERIFY_X509_STRICT
    assert handshake(ours, trusted, "8000-iabc.boxes.example.org") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(ours, trusted, "example.org")
    # whoever stole its key could sign for any name: no client would believe it
    forged = tls._context(
        "example.org",
        x509.load_pem_x509_certificate(ours.authority_file.read_bytes()),
        serialization.load_pem_private_key(ours.authority_file.with_name("ca-key.pem").read_bytes(), None),
        datetime.now(UTC),
    )
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree"):
        handshake(tls.Tls("example.org", forged, ours.authority_file, ours.bundle_file), trusted, "example.org")


def test_the_bundle_keeps_what_was_trusted_and_does_not_grow(home, tmp_path):
    mine = tmp_path / "mine.pem"
    mine.write_text("# the user's own\n")
    first = tls.prepare(home / "tls", DOMAIN, {"SSL_CERT_FILE": str(mine)})
    assert first.bundle_file.read_text().startswith("# the user's own\n")
    assert first.authority_file.read_text() in first.bundle_file.read_text()
    # the shell of `me2b env` starts another server
    again = tls.prepare(home / "tls", "other.example", {"SSL_CERT_FILE": str(first.bundle_file)})
    assert first.authority_file.read_text() not in again.bundle_file.read_text()


@pytest.mark.parametrize(
    "domain", ["", "localhost", "a..b", "*.e2b.app", "-a.b", "../x.y", "a b.c", "1.2.3.4", "x" * 250]
)
def test_what_is_no_domain(home, domain):
    with pytest.raises(ValueError, match="is not a domain"):
        tls.prepare(home, domain)
    assert list(home.iterdir()) == []


async def test_a_domain_that_is_none_leaves_no_listener(home):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match="is not a domain"):
        await LocalServer(port, tls_domain="nonsense").start()
    with pytest.raises(urllib.error.URLError):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{port}", timeout=5)
