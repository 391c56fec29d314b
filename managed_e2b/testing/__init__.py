"""For tests of programs that use E2B sandboxes: a server that fails on purpose, a clock that is stepped, fixtures.

    from managed_e2b.testing import local_server

    with local_server(chaos=True) as server:
        server.chaos.on("create").nth(3).after().status(504)
        lifecycle = SandboxLifecycle("sandboxes.db", e2b_api_url=server.url, e2b_key=server.api_key)

`pytest_plugins = ["managed_e2b.testing.fixtures"]` in a `conftest.py` brings the fixtures `me2b_server`,
`me2b_chaos` and `stepped_clock`. `docs/testing.md` tells the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chaos import Chaos, ChaosError, ChaosScript, Journal, Request
    from .clock import SteppedClock
    from .ledger import LedgerConformance
    from .provider import FakeProvider, Fault
    from .server import TestServer, local_server

__all__ = [
    "Chaos",
    "ChaosError",
    "ChaosScript",
    "FakeProvider",
    "Fault",
    "Journal",
    "LedgerConformance",
    "Request",
    "SteppedClock",
    "TestServer",
    "local_server",
]

_HOME = {
    "Chaos": "chaos",
    "ChaosError": "chaos",
    "ChaosScript": "chaos",
    "FakeProvider": "provider",
    "Fault": "provider",
    "Journal": "chaos",
    "LedgerConformance": "ledger",
    "Request": "chaos",
    "SteppedClock": "clock",
    "TestServer": "server",
    "local_server": "server",
}


def __getattr__(name: str) -> Any:
    # on demand: a clock needs no server, and the conformance class needs pytest, which a program may not have
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
