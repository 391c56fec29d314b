"""A private internet for tests: the server under test in a network namespace of its own, and a world beyond it.

The "host" of the server is a thread of this process in a new network namespace, with the address HOST. The world is
another process in another namespace, that has the addresses WORLD and answers there; the two share a virtual cable.
Nothing leaves this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
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
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from managed_e2b.local import tls
from managed_e2b.local.runtime import linux

HOST = "203.0.113.1"
SITE, OTHER, NAMESERVER = "203.0.113.10", "203.0.113.20", "203.0.113.53"
METADATA, PRIVATE = "169.254.169.254", "10.0.0.5"
WORLD = (SITE, OTHER, NAMESERVER, METADATA, PRIVATE, "8.8.8.8", "1.1.1.1")

T = TypeVar("T")


def lacking() -> str | None:
    """What this host lacks for such a world, if anything."""
    if os.geteuid() != 0:
        return "only root makes network namespaces with cables between them"
    if shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        return "there is no `ip` (package iproute2)"
    return None


def on_a_host_of_its_own(work: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine on an event loop whose network is the private one, all that it starts included."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            linux.unshare(linux.CLONE_NEWNET)
            with _world():
                result.append(asyncio.run(asyncio.wait_for(work(), 60)))
        except BaseException as error:  # noqa: BLE001 - it is raised where the test can see it
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


@contextlib.contextmanager
def _world() -> Iterator[None]:
    ip("link set lo up")
    with subprocess.Popen(
        ["unshare", "--net", sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as beyond:
        assert beyond.stdin is not None
        assert beyond.stdout is not None
        try:
            assert beyond.stdout.readline() == b"here\n"
            ip("link add host0 type veth peer name world0")
            ip(f"link set world0 netns {beyond.pid}")
            ip(f"addr add {HOST}/24 dev host0")
            ip("link set host0 up")
            beyond.stdin.write(b"go\n")
            beyond.stdin.flush()
            assert beyond.stdout.readline() == b"ready\n"
            ip(f"route add default via {SITE}")
            yield
        finally:
            beyond.kill()


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


# --- the world's own process


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = {"at": self.connection.getsockname()[0], "host": self.headers["Host"], "path": self.path}
        body = json.dumps(found).encode()
        if self.path.startswith("/large"):
            body = bytes(int(self.path.rpartition("/")[2]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Names(socketserver.BaseRequestHandler):
    """A DNS server that has one answer: the address SITE."""

    def handle(self) -> None:
        query, sock = self.request
        sock.sendto(_answer(query), self.client_address)


class _NamesByTcp(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while length := int.from_bytes(self.rfile.read(2), "big"):
            answer = _answer(self.rfile.read(length))
            self.wfile.write(len(answer).to_bytes(2, "big") + answer)


def _answer(query: bytes) -> bytes:
    question = query[12 : query.index(0, 12) + 5]
    answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton(SITE)
    return query[:2] + b"\x81\x80" + struct.pack(">HHHH", 1, 1, 0, 0) + question + answer


def _tell(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    _tell("here")
    sys.stdin.readline()
    for address in WORLD:
        ip(f"addr add {address}/24 dev world0")
    ip("link set world0 up")
    ip("link set lo up")
    servers: list[socketserver.BaseServer] = [
        http.server.ThreadingHTTPServer(("0.0.0.0", port), _Answer) for port in (80, 8080)
    ]
    secured = http.server.ThreadingHTTPServer(("0.0.0.0", 443), _Answer)
    with tempfile.TemporaryDirectory() as place:
        context: ssl.SSLContext = tls.prepare(Path(place), "example.com").context
    secured.socket = context.wrap_socket(secured.socket, server_side=True)
    servers += [secured, socketserver.ThreadingUDPServer((NAMESERVER, 53), _Names)]
    servers += [socketserver.ThreadingTCPServer((NAMESERVER, 53), _NamesByTcp)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    _tell("ready")
    sys.stdin.readline()


if __name__ == "__main__":
    main()
