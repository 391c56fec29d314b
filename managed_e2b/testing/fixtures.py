"""The fixtures, as a pytest plugin that is used by name only: `pytest_plugins = ["managed_e2b.testing.fixtures"]`.

* `me2b_server`: a local server with chaos, one a session (a worker, under pytest-xdist). Skips where the host cannot
  run sandboxes, with the reason.
* `me2b_chaos`: its `Chaos`, reset before and after the test. The server is empty at the start: no sandbox runs there.
* `stepped_clock`: a `SteppedClock`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ..local.background import LocalServerError
from ..local.runtime.doctor import examine
from .chaos import Chaos
from .clock import SteppedClock
from .server import TestServer, local_server

pytest.register_assert_rewrite("managed_e2b.testing.ledger")


@pytest.fixture(scope="session")
def me2b_server() -> Iterator[TestServer]:
    """A local server with chaos for the whole session. A test that makes it fail asks for `me2b_chaos`."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(local_server(chaos=True))
        except LocalServerError as error:
            missing = [f"{check.name}: {check.detail}; {check.fix}" for check in examine() if not check.ok]
            if not missing:  # a bug must not look like a poor host
                raise
            pytest.skip(f"this host cannot run local sandboxes: {missing[0]} ({error})")
        yield server


@pytest.fixture
def me2b_chaos(me2b_server: TestServer) -> Iterator[Chaos]:
    """What makes `me2b_server` fail. At the start no rules, an empty journal and no sandboxes; at the end no rules."""
    me2b_server.clear()
    yield me2b_server.chaos
    if me2b_server.alive:
        me2b_server.chaos.reset()


@pytest.fixture
def stepped_clock() -> SteppedClock:
    """A clock that stands until the test steps it."""
    return SteppedClock()
