"""A request that the HTTP client gave up before it was sent is made again; one that may have been sent never is."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from managed_e2b.drivers import run
from managed_e2b.drivers.unsent import TRIES, sent

pyqwest = pytest.importorskip("pyqwest", reason="this SDK has an older HTTP client")

UNSENT = "error sending request for url (https://127.0.0.1/): client error (Canceled): ALPN upgraded to HTTP/2"


class Calls:
    """Fails so often, as the SDK wraps it, and then gives its arguments back."""

    def __init__(self, failures: int, told: str, kind: type[Exception]) -> None:
        self.count, self._failures, self._told, self._kind = 0, failures, told, kind

    def sync(self, value: str) -> str:
        self.count += 1
        if self.count <= self._failures:
            raise RuntimeError("Request failed") from self._kind(self._told)
        return value

    async def aio(self, value: str) -> str:
        return self.sync(value)


@pytest.mark.parametrize("face", ["sync", "aio"])
async def test_it_is_made_again_until_it_is_sent(face: str) -> None:
    calls = Calls(3, UNSENT, pyqwest.WriteError)
    assert await sent(getattr(calls, face), value="done") == "done"
    assert calls.count == 4


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ("client error (SendRequest): connection closed before message completed", pyqwest.WriteError),
        (UNSENT, httpx.ReadError),
        (UNSENT, ValueError),
    ],
    ids=str,
)
def test_what_may_have_been_sent_is_not(told: str, kind: Any) -> None:
    calls = Calls(1, told, kind)
    with pytest.raises(RuntimeError):
        run(sent(calls.sync, "x"))
    assert calls.count == 1


def test_a_client_that_never_sends_is_given_up() -> None:
    calls = Calls(10**6, UNSENT, pyqwest.WriteError)
    with pytest.raises(RuntimeError):
        run(sent(calls.sync, "x"))
    assert calls.count == TRIES
