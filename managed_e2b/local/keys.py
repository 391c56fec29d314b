"""The server's API key, and the file that tells its user's programs where the server is and which key it takes.

The file is JSON with what `ServerState` has, readable for its user alone.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

KEY_VARIABLE = "E2B_API_KEY"
_BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # each replaces the system's authorities


@dataclass(frozen=True)
class ServerState:
    """A server that runs, or did when it was last heard of."""

    url: str
    api_key: str = field(repr=False)
    pid: int
    domain: str = ""
    """The domain that it speaks TLS for, if any. The files are its authority then, alone and beside the system's."""
    authority_file: str = ""
    bundle_file: str = ""

    def environment(self) -> dict[str, str]:
        """What points any E2B SDK at the server."""
        variables = {
            "E2B_API_URL": self.url,
            "E2B_SANDBOX_URL": self.url,
            "E2B_VOLUME_API_URL": self.url,
            "E2B_API_KEY": self.api_key,
            "NO_PROXY": "127.0.0.1,localhost",
        }
        if self.domain:
            variables |= {
                "E2B_DOMAIN": self.domain,
                "HTTPS_PROXY": self.url,
                "https_proxy": self.url,  # some programs know the one, some the other
                "NODE_USE_ENV_PROXY": "1",
                **dict.fromkeys(_BUNDLE_VARIABLES, self.bundle_file),
                "NODE_EXTRA_CA_CERTS": self.authority_file,
            }
        return variables


def new_api_key() -> str:
    """A key of the form that every E2B SDK accepts: `e2b_` and 40 hex digits."""
    return "e2b_" + secrets.token_hex(20)


def choose_api_key(environ: Mapping[str, str]) -> str:
    """The key in E2B_API_KEY, else a new one."""
    return environ.get(KEY_VARIABLE) or new_api_key()


def state_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the state is kept: `$XDG_STATE_HOME/me2b/local.json`, by default below `~/.local/state`."""
    base = environ.get("XDG_STATE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "me2b" / "local.json"


def tls_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the authorities for https are kept, a directory for each domain."""
    return state_file(environ).parent / "tls"


def write_state(path: Path, state: ServerState) -> None:
    """Replace the file in one step. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{state.pid}")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(state), file)
    fresh.replace(path)


def read_state(path: Path) -> ServerState | None:
    """The state in the file; None when there is no file, or none of ours. Raises OSError when it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        tls = {name: str(value.get(name, "")) for name in ("domain", "authority_file", "bundle_file")}
        return ServerState(str(value["url"]), str(value["api_key"]), int(value["pid"]), **tls)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remove_state(path: Path, pid: int) -> None:
    """Remove the file if it is still that of the server with this pid."""
    state = read_state(path)
    if state is not None and state.pid == pid:
        path.unlink(missing_ok=True)
