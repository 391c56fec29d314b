from __future__ import annotations

import pytest

from managed_e2b import (
    AuthenticationError,
    BackendError,
    BackendUnavailableError,
    RateLimitedError,
    TemplateNotFoundError,
)
from managed_e2b.rules.failures import Verdict, backoff, create_verdict


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RateLimitedError("429"), Verdict.SLOW_DOWN),
        (AuthenticationError("401", status=401), Verdict.REFUSED),
        (TemplateNotFoundError("404", status=404), Verdict.REFUSED),
        (BackendError("400", status=400), Verdict.REFUSED),
        (BackendUnavailableError("refused"), Verdict.NOT_SENT),
        (BackendError("409 conflict", status=409), Verdict.UNKNOWN),
        (BackendError("502", status=502), Verdict.UNKNOWN),
        (BackendError("504", status=504), Verdict.UNKNOWN),
        (BackendError("reset"), Verdict.UNKNOWN),
    ],
    ids=lambda value: str(value),
)
def test_what_is_not_a_plain_refusal_is_unknown(error: BackendError, verdict: Verdict) -> None:
    assert create_verdict(error) is verdict


def test_backoff_grows_and_is_bounded() -> None:
    waits = [backoff(n) for n in range(100)]
    assert waits == sorted(waits)
    assert waits[0] < waits[3]
    assert waits[-1] == 2.0
