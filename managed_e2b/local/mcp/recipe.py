"""The layer of template `mcp-gateway`: the program, and what MCP servers there are."""

from __future__ import annotations

import hashlib
import json
import typing
from pathlib import Path

from managed_e2b.local.mcp import gateway

_PROGRAM = "/opt/me2b/mcp-gateway/gateway.py"
_COMMAND = f'#!/bin/sh\nexec python3 -I {_PROGRAM} "$@"\n'


def servers() -> gateway.Servers:
    """The MCP servers that the SDK knows, and what each must be configured with."""
    from e2b.sandbox.mcp import McpServer  # most of a second, for the whole SDK

    found = typing.get_type_hints(McpServer)
    return {name: _required(config) if hasattr(config, "__required_keys__") else [] for name, config in found.items()}


def _required(config: type) -> list[str]:
    fields = typing.get_type_hints(config, include_extras=True)  # resolved: `__required_keys__` sees only their text
    return sorted(name for name, kind in fields.items() if typing.get_origin(kind) is not typing.NotRequired)


class GatewayRecipe:
    """`runtime.base.Recipe`."""

    def _files(self) -> dict[str, str]:
        return {
            f"root{_PROGRAM}": Path(gateway.__file__).read_text(encoding="utf-8"),
            f"root{gateway.SERVERS_FILE}": json.dumps(servers()),
            "usr/local/bin/mcp-gateway": _COMMAND,
        }

    def digest(self) -> str:
        return hashlib.sha256(repr(sorted(self._files().items())).encode()).hexdigest()

    def fill(self, layer: Path) -> None:
        for name, text in self._files().items():
            path = layer / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name.startswith("usr/") else 0o644)
