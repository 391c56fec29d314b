"""Run a command on a private internet that has the few places which E2B's suites look for.

    python tools/stand_in_internet.py COMMAND [ARGUMENT ...]        (root only, on Linux with iproute2)

The command gets a network and a file system view of its own: beyond a virtual cable, another process answers https at
1.1.1.1, 8.8.8.8 and connectivitycheck.gstatic.com, each as the real one does to a request for its first page, and the
names. Its authority is trusted within that view, sandboxes included. Nothing leaves this machine. What it shows is
whether the rules of a sandbox hold at the suites' own addresses; that the real internet is reached it cannot show.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOST, ROUTER, NAMESERVER, ELSEWHERE = "203.0.113.1", "203.0.113.2", "203.0.113.53", "203.0.113.80"
NAMES = {"connectivitycheck.gstatic.com": ELSEWHERE}
STATUSES = {"1.1.1.1": 301, "8.8.8.8": 302, ELSEWHERE: 204}
"""What the real places answer to a request for their first page."""
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
INSIDE = "--inside"
BEYOND = "--beyond"


def main() -> int:
    if sys.argv[1:2] == [BEYOND]:
        return beyond(Path(sys.argv[2]))
    if sys.argv[1:2] == [INSIDE]:
        return inside(sys.argv[2:])
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if not possible():
        sys.exit("only root makes such a network, with `ip` (package iproute2)")
    own = ["unshare", "--net", "--mount", "--propagation", "private", sys.executable, __file__, INSIDE]
    return subprocess.run([*own, *sys.argv[1:]], check=False).returncode


def possible() -> bool:
    """Whether this process may make such a network."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def inside(command: list[str]) -> int:
    """In the private network: lay the cable, make the authority known, run the command."""
    with tempfile.TemporaryDirectory(prefix="me2b-internet-") as temporary:
        place = Path(temporary)
        certify(place)
        ip("link set lo up")
        with world(place):
            (place / "bundle.pem").write_bytes(BUNDLE.read_bytes() + b"\n" + (place / "authority.pem").read_bytes())
            (place / "resolv.conf").write_text(f"nameserver {NAMESERVER}\n")
            bind(place / "bundle.pem", BUNDLE)
            bind(place / "resolv.conf", Path("/etc/resolv.conf").resolve())
            return subprocess.run(command, check=False).returncode


def bind(source: Path, target: Path) -> None:
    subprocess.run(["mount", "--bind", source, target], check=True)


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@contextlib.contextmanager
def world(place: Path) -> Iterator[None]:
    """The other end of the cable, for as long as the block runs."""
    command = ["unshare", "--net", sys.executable, __file__, BEYOND, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()  # it is in its network
            ip("link add host0 type veth peer name world0")
            ip(f"link set world0 netns {process.pid}")
            ip(f"addr add {HOST}/24 dev host0")
            ip("link set host0 up")
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()  # it answers
            ip(f"route add default via {ROUTER}")
            yield
        finally:
            process.kill()


def beyond(place: Path) -> int:
    """The world's own process: it says a line, hears that its cable is there, serves, and says another."""
    print(flush=True)
    sys.stdin.readline()
    ip("link set lo up")
    ip("link set world0 up")
    for address in (ROUTER, NAMESERVER):
        ip(f"addr add {address}/24 dev world0")
    for address in STATUSES:
        ip(f"addr add {address}/32 dev world0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "site.pem")
    secured = http.server.ThreadingHTTPServer(("0.0.0.0", 443), Site)
    secured.socket = context.wrap_socket(secured.socket, server_side=True)
    for server in (secured, socketserver.ThreadingUDPServer((NAMESERVER, 53), Names)):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print(flush=True)
    sys.stdin.readline()
    return 0


class Site(http.server.BaseHTTPRequestHandler):
    """Answers with the status of the address that it was asked at."""

    def do_GET(self) -> None:
        self.send_response(STATUSES.get(self.connection.getsockname()[0], 404))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class Names(socketserver.BaseRequestHandler):
    """A DNS server for NAMES: IPv4 addresses only."""

    def handle(self) -> None:
        query, answer_from = self.request
        end = query.index(0, 12)
        name, kind = labels(query[12:end]), struct.unpack(">H", query[end + 1 : end + 3])[0]
        address = NAMES.get(name.lower())
        answers = b""
        if address is not None and kind == 1:
            answers = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton(address)
        flags = 0x8180 if address is not None else 0x8183  # an answer, or: there is no such name
        head = query[:2] + struct.pack(">HHHHH", flags, 1, 1 if answers else 0, 0, 0)
        answer_from.sendto(head + query[12 : end + 5] + answers, self.client_address)


def labels(data: bytes) -> str:
    """The name in a question of DNS, without compression."""
    parts, place = [], 0
    while place < len(data):
        length = data[place]
        parts.append(data[place + 1 : place + 1 + length].decode("ascii", "replace"))
        place += 1 + length
    return ".".join(parts)


def certify(place: Path) -> None:
    """Write a new authority's certificate, and one with its key that it signed for all places."""
    names = [x509.DNSName(name) for name in NAMES] + [x509.IPAddress(ip_address(one)) for one in STATUSES]
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority_name = x509.Name.from_rfc4514_string("CN=me2b stand-in internet")
    now = datetime.now(UTC)

    def begin(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(authority_name, subject, public, x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )

    authority = (
        begin(authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    site = (
        begin(x509.Name.from_rfc4514_string("CN=site"), key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (place / "authority.pem").write_bytes(authority.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (place / "site.pem").write_bytes(private + site.public_bytes(pem))


if __name__ == "__main__":
    sys.exit(main())
