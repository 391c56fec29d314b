"""The shipped ledger passes its own conformance class on every database, and has a clock of its own where it can."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from managed_e2b.ledger import Ledger, open_engine
from managed_e2b.rules.leases import SECOND
from managed_e2b.testing import LedgerConformance, SteppedClock


class TestLedger(LedgerConformance):
    @pytest.fixture
    def open_ledger(self, url: str, stepped_clock: SteppedClock) -> Callable[[], Ledger]:
        return lambda: Ledger(open_engine(url), stepped_clock)


def test_the_databases_own_clock_is_used_where_it_has_one(url: str) -> None:
    book = Ledger(open_engine(url))
    first = book.now()
    assert 0 <= book.now() - first < 60 * SECOND
    book.close()
