"""The pure rules behind the control plane: timeouts, lists and pages, deadlines, states, template names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_e2b.local.clock import Instant, rfc3339
from managed_e2b.local.counters import Counters
from managed_e2b.local.errors import ApiError
from managed_e2b.local.expiry import Deadlines
from managed_e2b.local.lifetime import MAX_LENGTH, Lifetime, timeout_for_connect, timeout_for_create
from managed_e2b.local.listing import Query, decode_token, encode_token, parse_metadata, parse_query, select
from managed_e2b.local.model import SHOWN, TRANSITIONS, State, new_sandbox_id
from managed_e2b.local.templates import split_reference

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> Instant:
    return Instant(1000 + seconds, EPOCH + timedelta(seconds=seconds))


def status_of(call: Callable[[], object]) -> int:
    """What the caller would be answered; any exception but ApiError is a bug and passes through."""
    try:
        call()
    except ApiError as error:
        return error.status
    return 200


class TestLifetime:
    def test_it_ends_when_its_time_is_over(self):
        life = Lifetime.begin(at(0), 60)
        assert not life.over(at(59.99))
        assert life.over(at(60))
        assert life.end.wall == EPOCH + timedelta(seconds=60)

    def test_reset_moves_the_end_either_way_and_negative_is_now(self):
        life = Lifetime.begin(at(0), 60)
        assert life.reset(at(10), 5).end == at(15)
        assert life.reset(at(10), 500).end == at(510)
        assert life.reset(at(10), -5).end == at(10)

    def test_extend_never_shortens_and_keeps_the_very_same_end(self):
        life = Lifetime.begin(at(0), 60)
        assert life.extend(at(10), 5) is life
        assert life.extend(at(10), 100).end == at(110)

    @given(st.integers(0, 3 * MAX_LENGTH), st.floats(0, MAX_LENGTH - 1))
    def test_nothing_lives_longer_than_the_longest_life(self, seconds, later):
        life = Lifetime.begin(at(0), 60)
        longest = at(0).monotonic + MAX_LENGTH
        assert life.reset(at(later), seconds).end.monotonic <= longest + 1e-6
        assert life.extend(at(later), seconds).end.monotonic <= longest + 1e-6

    def test_past_the_longest_life_it_cannot_be_reset(self):
        life = Lifetime.begin(at(0), 60)
        with pytest.raises(ApiError, match="Max instance length exceeded"):
            life.reset(at(MAX_LENGTH), 5)

    def test_what_may_be_asked(self):
        assert timeout_for_create(None, 15) == 15
        assert timeout_for_create(MAX_LENGTH, 15) == MAX_LENGTH
        assert timeout_for_connect(None) == 300
        assert timeout_for_connect(0) == 0


@dataclass
class Box:
    sandbox_id: str
    started_at: datetime
    shown_state: str | None = "running"
    metadata: dict[str, str] = field(default_factory=dict)
    template_names: frozenset[str] = frozenset({"base"})


boxes = st.lists(
    st.builds(
        Box,
        sandbox_id=st.text("ab01", min_size=1, max_size=4),
        started_at=st.integers(0, 5).map(lambda n: EPOCH + timedelta(microseconds=n)),
        shown_state=st.sampled_from(["running", "paused", None]),
    ),
    unique_by=lambda box: box.sandbox_id,
    max_size=12,
)


class TestListing:
    @given(boxes, st.integers(1, 4), st.booleans())
    def test_pages_hold_each_item_once_in_order(self, items, limit, ascending):
        whole = [box.sandbox_id for box in select(items, Query(limit=None, ascending=ascending)).items]
        shown = [box for box in items if box.shown_state is not None]
        by_hand = sorted(sorted(shown, key=lambda b: b.sandbox_id), key=lambda b: b.started_at, reverse=True)
        assert whole == [box.sandbox_id for box in (by_hand[::-1] if ascending else by_hand)]
        seen, cursor = [], None
        while True:
            page = select(items, Query(limit=limit, ascending=ascending, cursor=cursor))
            assert len(page.items) <= limit
            seen += [box.sandbox_id for box in page.items]
            if page.next_token is None:
                break
            cursor = decode_token(page.next_token, ascending=ascending)
        assert seen == whole

    @given(boxes.filter(bool), st.booleans())
    def test_a_token_is_good_for_its_own_order_only(self, items, ascending):
        token = encode_token(items[0], ascending=ascending)
        assert decode_token(token, ascending=ascending) == (items[0].started_at, items[0].sandbox_id)
        with pytest.raises(ApiError, match="Invalid next token"):
            decode_token(token, ascending=not ascending)

    @given(st.text())
    def test_no_token_breaks_the_parser(self, token):
        assert status_of(lambda: decode_token(token, ascending=False)) in (200, 400)

    @given(st.dictionaries(st.text(), st.text(), max_size=4))
    def test_metadata_comes_through_the_quoting_of_the_sdk(self, metadata):
        from urllib.parse import quote, unquote_plus, urlencode

        metadata = {key: value for key, value in metadata.items() if key or value}
        quoted = urlencode({quote(key): quote(value) for key, value in metadata.items()})
        sent = urlencode({"metadata": quoted}).removeprefix("metadata=")
        assert parse_metadata(unquote_plus(sent)) == metadata

    @given(
        st.dictionaries(
            st.sampled_from(["state", "order", "limit", "nextToken", "startedAfter", "metadata"]), st.text()
        )
    )
    def test_no_query_breaks_the_parser(self, params):
        assert status_of(lambda: parse_query(params)) in (200, 400)

    def test_metadata_must_match_in_all_pairs(self):
        items = [Box("a", EPOCH, metadata={"x": "1", "y": "2"}), Box("b", EPOCH, metadata={"x": "1"})]
        assert [box.sandbox_id for box in select(items, Query(metadata={"x": "1", "y": "2"})).items] == ["a"]
        assert [box.sandbox_id for box in select(items, Query(metadata={"x": "1"})).items] == ["a", "b"]


class TestDeadlines:
    @given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.one_of(st.none(), st.integers(0, 50))), max_size=400))
    def test_it_does_what_a_plain_dict_does(self, changes):
        deadlines, model = Deadlines(), {}
        for key, deadline in changes:
            if deadline is None:
                deadlines.discard(key)
                model.pop(key, None)
            else:
                deadlines.set(key, deadline)
                model[key] = deadline
            assert deadlines.next() == min(model.values(), default=None)
        for now in range(0, 60, 10):
            due = deadlines.pop_due(now)
            assert [model[key] for key in due] == sorted(model[key] for key in due)
            assert set(due) == {key for key, deadline in model.items() if deadline <= now}
            model = {key: deadline for key, deadline in model.items() if deadline > now}

    def test_deadlines_moved_for_ever_take_no_more_room(self):
        deadlines = Deadlines()
        for moment in range(10_000):
            deadlines.set("a", moment)
        assert len(deadlines._heap) < 100


class TestStates:
    def test_every_state_can_end_and_only_ending_is_hidden(self):
        assert set(TRANSITIONS) == set(SHOWN) == set(State)
        for state in set(State) - {State.ENDING}:
            assert State.ENDING in TRANSITIONS[state]
            assert SHOWN[state] is not None
        assert SHOWN[State.ENDING] is None


def test_ids_fit_a_host_name_and_differ():
    ids = {new_sandbox_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(i) == 21 and i[0] == "i" and i.isalnum() and i == i.lower() for i in ids)


def test_times_are_rfc_3339_in_utc():
    assert rfc3339(EPOCH) == "2026-01-01T00:00:00.000000Z"
    assert datetime.fromisoformat(rfc3339(EPOCH)) == EPOCH


@pytest.mark.parametrize(
    ("reference", "read"),
    [
        ("base", ("base", "default")),
        ("Base:V1.2", ("base", "v1.2")),
        ("ns/name:tag", ("ns/name", "tag")),
    ],
)
def test_template_references(reference, read):
    assert split_reference(reference) == read


@pytest.mark.parametrize("reference", ["", ":", "a:", "a b", "a/b/c", "../a", "ä", "a:b:c"])
def test_malformed_template_references(reference):
    with pytest.raises(ApiError):
        split_reference(reference)


def test_the_peak_counts_what_is_being_started():
    counters = Counters()
    counters.observe(starting=2, listed=3, ending=9)
    counters.observe(starting=0, listed=1, ending=0)
    assert (counters.live, counters.peak_live) == (1, 5)
