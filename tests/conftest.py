"""What every room's tests may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from managed_e2b.local.background import LocalServerError, LocalServerProcess
from managed_e2b.local.runtime.doctor import examine

pytest_plugins = ["managed_e2b.testing.fixtures"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="every boundary and suspension, not a sample; loads in full (make prove)",
    )


@pytest.fixture(scope="session")
def server() -> Iterator[LocalServerProcess]:
    """A local server that all tests of a worker share. Skips where the host lacks what sandboxes need.

    A server that does not come up on a host that lacks nothing is a failure: a bug must not look like a poor host.
    """
    process = LocalServerProcess()
    try:
        process.start()
    except LocalServerError as error:
        missing = [f"{check.name}: {check.detail}; {check.fix}" for check in examine() if not check.ok]
        if not missing:
            raise
        pytest.skip(f"this host cannot run local sandboxes: {missing[0]} ({error})")
    try:
        yield process
    finally:
        process.stop()
