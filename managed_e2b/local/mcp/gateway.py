"""mcp-gateway: a stand-in that starts, serves and fails as E2B's gateway does, and runs no MCP server.

    GATEWAY_ACCESS_TOKEN=... mcp-gateway --config '{"exa": {"apiKey": "..."}}'     (as root)
    mcp-gateway pull exa github

It checks the configuration, serves the Model Context Protocol (streamable HTTP, answers as JSON) on port 50005 at
`/mcp` to who has the token, which /etc/mcp-gateway/.token keeps for root, and goes on in the background. What it cannot
do it says on stderr, with exit code 1.

For tests the server `me2bStandIn` is known too: `{"start": "hang"}` never answers, `{"start": "fail", "message": ...}`
fails, `{"start": "crash"}` dies of a signal; `{"start": "ok"}`, or nothing, starts.

A program of the sandbox: standard library only, and nothing of managed_e2b.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import secrets
import signal
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 50005
PATH = "/mcp"
TOKEN_VARIABLE = "GATEWAY_ACCESS_TOKEN"
TOKEN_FILE = "/etc/mcp-gateway/.token"
SERVERS_FILE = "/opt/me2b/mcp-gateway/servers.json"
STAND_IN = "me2bStandIn"
VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
TOOL = "gateway_info"
_MAX_BODY = 4 * 1024 * 1024

Servers = dict[str, list[str]]
"""What each known MCP server must be configured with."""


class Failed(Exception):
    """The gateway does not start. The message says why."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="mcp-gateway", description="A local stand-in for E2B's MCP gateway.")
    parser.add_argument("--config", help="the MCP servers to offer: JSON, name → its configuration")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("pull", help="prepare MCP servers").add_argument("servers", nargs="+")
    options = parser.parse_args()
    try:
        with open(SERVERS_FILE, encoding="utf-8") as file:
            known: Servers = json.load(file)
        if options.command == "pull":
            check(dict.fromkeys(options.servers), known)
        elif options.config is None:
            raise Failed("--config is missing")
        else:
            start(options.config, known)
    except Failed as error:
        print(f"mcp-gateway: {error}", file=sys.stderr)  # noqa: T201 - a program
        return 1
    return 0


def start(config: str, known: Servers) -> None:
    """Serve in the background. Raises Failed."""
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise Failed(f"{TOKEN_VARIABLE} is not set")
    if os.geteuid() != 0:
        raise Failed("must be run as root")
    servers = parse(config, known)
    _rehearse(servers.get(STAND_IN) or {})
    try:
        server = Gateway(token, sorted(servers))
    except OSError as error:
        raise Failed(f"cannot listen on port {PORT}: {error.strerror}") from error
    _keep(token)
    _into_background()
    server.serve_forever()


def parse(config: str, known: Servers) -> dict[str, Any]:
    """The configured servers. Raises Failed."""
    try:
        servers = json.loads(config)
    except ValueError as error:
        raise Failed(f"--config is not JSON: {error}") from None
    if not isinstance(servers, dict):
        raise Failed("--config is not a JSON object")
    check(servers, known)
    return servers


def check(servers: dict[str, Any], known: Servers) -> None:
    """Raises Failed for a server that does not exist, or lacks what it needs. None: it is not configured now."""
    for name, config in servers.items():
        if name == STAND_IN or name.startswith("github/"):  # a repository, named by the caller
            needed: list[str] = []
        elif name in known:
            needed = known[name]
        else:
            raise Failed(f"unknown MCP server {name!r}")
        if config is None:
            continue
        if not isinstance(config, dict):
            raise Failed(f"the configuration of MCP server {name!r} is not a JSON object")
        missing = [key for key in needed if key not in config]
        if missing:
            raise Failed(f"MCP server {name!r} needs {', '.join(missing)}")


def _rehearse(behaviour: dict[str, Any]) -> None:
    """What tests ask for. Raises Failed."""
    match behaviour.get("start", "ok"):
        case "ok":
            return
        case "hang":
            signal.pause()
        case "fail":
            raise Failed(str(behaviour.get("message", "failed on request")))
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case other:
            raise Failed(f"{STAND_IN}: start is ok, hang, fail or crash, not {other!r}")


def _keep(token: str) -> None:
    os.makedirs(os.path.dirname(TOKEN_FILE), exist_ok=True)
    descriptor = os.open(TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(token)


def _into_background() -> None:
    """Return in a process of a session of its own; the caller's sees us end well."""
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.environ.pop(TOKEN_VARIABLE, None)


class Gateway(ThreadingHTTPServer):
    """Listens once constructed."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, token: str, servers: list[str], address: tuple[str, int] = ("", PORT)) -> None:
        super().__init__(address, Handler)
        self.servers = servers
        self._authorization = f"Bearer {token}".encode()
        self._sessions: set[str] = set()
        self._lock = threading.Lock()

    def allows(self, authorization: str | None) -> bool:
        return hmac.compare_digest((authorization or "").encode("latin-1", "replace"), self._authorization)

    def open_session(self) -> str:
        session = secrets.token_hex(16)
        with self._lock:
            self._sessions.add(session)
        return session

    def has_session(self, session: str) -> bool:
        with self._lock:
            return session in self._sessions

    def close_session(self, session: str) -> None:
        with self._lock:
            self._sessions.discard(session)


class Handler(BaseHTTPRequestHandler):
    server: Gateway
    protocol_version = "HTTP/1.1"
    timeout = 600

    def do_POST(self) -> None:
        body = self._body()
        if body is None or not self._welcome():
            return
        try:
            message = json.loads(body)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, failure(None, -32700, "Parse error"))
            return
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            self._send(HTTPStatus.BAD_REQUEST, failure(None, -32600, "Invalid Request"))
            return
        session = self.headers.get("Mcp-Session-Id")
        if message.get("method") == "initialize":
            self._send(HTTPStatus.OK, answer(message, self.server.servers), session=self.server.open_session())
        elif session is not None and not self.server.has_session(session):
            self._send(HTTPStatus.NOT_FOUND, failure(message.get("id"), -32001, "Session not found"))
        elif "id" not in message or "method" not in message:  # a notification, or a response
            self._send(HTTPStatus.ACCEPTED, None)
        else:
            self._send(HTTPStatus.OK, answer(message, self.server.servers))

    def do_DELETE(self) -> None:
        if self._welcome():
            self.server.close_session(self.headers.get("Mcp-Session-Id", ""))
            self._send(HTTPStatus.OK, None)

    def do_GET(self) -> None:
        """Nothing comes from the server unasked, so there is no stream to listen to."""
        if self._welcome():
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, failure(None, -32000, "Method not allowed"))

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            self._send(HTTPStatus.LENGTH_REQUIRED, None)
            return None
        if int(length) > _MAX_BODY:
            self.close_connection = True
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, None)
            return None
        return self.rfile.read(int(length))

    def _welcome(self) -> bool:
        if self.path.partition("?")[0] != PATH:
            self._send(HTTPStatus.NOT_FOUND, None)
        elif not self.server.allows(self.headers.get("Authorization")):
            self._send(HTTPStatus.UNAUTHORIZED, failure(None, -32001, "Unauthorized"))
        else:
            return True
        return False

    def _send(self, status: HTTPStatus, value: Any, *, session: str | None = None) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if session is not None:
            self.send_header("Mcp-Session-Id", session)
        if value is not None:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it, and a line would hold what clients sent."""


def answer(message: dict[str, Any], servers: list[str]) -> dict[str, Any]:
    """The response to a request of the protocol."""
    number, parameters = message.get("id"), message.get("params")
    parameters = parameters if isinstance(parameters, dict) else {}
    match message.get("method"):
        case "initialize":
            asked = parameters.get("protocolVersion")
            return success(
                number,
                {
                    "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "mcp-gateway (local stand-in)", "version": "1.0.0"},
                },
            )
        case "ping":
            return success(number, {})
        case "tools/list":
            return success(number, {"tools": [_INFO]})
        case "tools/call" if parameters.get("name") == TOOL:
            text = json.dumps({"servers": servers, "standIn": True})
            return success(number, {"content": [{"type": "text", "text": text}], "isError": False})
        case "tools/call":
            return failure(number, -32602, f"Unknown tool: {parameters.get('name')}")
        case method:
            return failure(number, -32601, f"Method not found: {method}")


_INFO = {
    "name": TOOL,
    "description": "Which MCP servers this gateway was configured with. It is a local stand-in and runs none of them.",
    "inputSchema": {"type": "object", "properties": {}},
}


def success(number: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def failure(number: Any, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}


if __name__ == "__main__":
    sys.exit(main())
