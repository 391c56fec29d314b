"""Whatever an endpoint writes into Retry-After, it is a bounded time or none at all."""

from __future__ import annotations

from email.utils import format_datetime, formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.retry_after import LONGEST, seconds

NOW = 1_800_000_000 * SECOND


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("3", 3.0),
        (" 3 ", 3.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("007", 7.0),
        ("86400", LONGEST),
        ("999999999999", LONGEST),
        (formatdate(1_800_000_007, usegmt=True), 7.0),
        (formatdate(1_800_000_007), 7.0),  # "-0000", as some servers write it
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0.0),
        ("Fri Jan 15 08:00:07 2027", 7.0),  # asctime
        ("Fri, 15 Jan 2027 09:00:07 +0100", 7.0),
        (formatdate(1_900_000_000, usegmt=True), LONGEST),
        (formatdate(1_700_000_000, usegmt=True), 0.0),
    ],
)
def test_a_time_is_understood(value: str, wanted: float) -> None:
    assert seconds(value, NOW) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        " ",
        "-1",
        "+3",
        "abc",
        "3s",
        "3,4",
        "0x10",
        "1e3",
        "nan",
        "inf",
        "٣",
        "1" * 13,
        "Mon, 99 Foo 9999",
        "é",
    ],
)
def test_anything_else_is_no_time(value: str | None) -> None:
    assert seconds(value, NOW) is None


@pytest.mark.parametrize("days", [-3, 3])
def test_a_date_is_counted_from_the_answers_own_date_whatever_the_clock_here_says(days: int) -> None:
    then, until = formatdate(1_800_000_000, usegmt=True), formatdate(1_800_000_007, usegmt=True)
    assert seconds(until, NOW + days * 86_400 * SECOND, then) == pytest.approx(7.0)
    assert seconds(until, NOW, "nonsense") == pytest.approx(7.0)


@given(value=st.one_of(st.text(max_size=80), st.datetimes().map(format_datetime)), date=st.text(max_size=20))
def test_nothing_raises_and_every_wait_is_bounded(value: str, date: str) -> None:
    wait = seconds(value, NOW, date)
    assert wait is None or 0.0 <= wait <= LONGEST
