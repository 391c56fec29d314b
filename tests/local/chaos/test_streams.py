from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from e2b.envd.process import process_pb as pb
from hypothesis import given
from hypothesis import strategies as st
from protobuf import Oneof

from managed_e2b.local.chaos.rules import CutStream
from managed_e2b.local.chaos.streams import LAST, Cutter, envelope

START: Any = {"event": {"start": {"pid": 7}}}
DATA: Any = {"event": {"data": {"stdout": "aGkK"}}}
KEEPALIVE: Any = {"event": {"keepalive": {}}}
END: Any = {"event": {"end": {"exited": True, "status": "exit status 0"}}}


def stream(*events: Any) -> bytes:
    return b"".join(envelope(0, json.dumps(event).encode()) for event in events) + envelope(LAST, b"{}")


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(st.lists(st.integers(0, 1000), max_size=30))
def test_a_stream_is_cut_before_its_end_event_however_it_arrives(cuts: list[int]) -> None:
    cutter = Cutter(CutStream(), "json")
    passed = b"".join(cutter.feed(piece) for piece in in_pieces(stream(START, DATA, KEEPALIVE, DATA, END), cuts))
    assert passed + envelope(LAST, b"{}") == stream(START, DATA, KEEPALIVE, DATA)
    assert cutter.over


@given(after=st.integers(1, 3), cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_a_stream_is_cut_after_so_many_events_and_keepalives_are_none(after: int, cuts: list[int]) -> None:
    cutter = Cutter(CutStream(after_events=after), "json")
    passed = b"".join(cutter.feed(piece) for piece in in_pieces(stream(START, KEEPALIVE, DATA, DATA, END), cuts))
    expected = [stream(START), stream(START, KEEPALIVE, DATA), stream(START, KEEPALIVE, DATA, DATA)][after - 1]
    assert passed + envelope(LAST, b"{}") == expected
    assert cutter.over


def test_nothing_goes_out_after_the_cut() -> None:
    cutter = Cutter(CutStream(after_events=1), "json")
    cutter.feed(stream(START))
    assert cutter.over
    assert cutter.feed(stream(DATA)) == b""


def test_a_stream_that_ends_by_an_error_is_over_before_its_last_word() -> None:
    cutter = Cutter(CutStream(), "json")
    error = envelope(LAST, b'{"error":{"code":"not_found","message":"no"}}')
    assert cutter.feed(envelope(0, json.dumps(START).encode()) + error) == envelope(0, json.dumps(START).encode())
    assert cutter.over


def test_the_events_of_a_binary_stream_are_seen_too() -> None:
    def event(value: pb.ProcessEvent) -> bytes:
        return envelope(0, pb.StartResponse(event=value).to_binary())

    start = event(pb.ProcessEvent(event=Oneof("start", pb.ProcessEvent.StartEvent(pid=7))))
    end = event(pb.ProcessEvent(event=Oneof("end", pb.ProcessEvent.EndEvent(exited=True))))
    cutter = Cutter(CutStream(), "proto")
    assert cutter.feed(start + end) == start
    assert cutter.over


@pytest.mark.parametrize(
    ("how", "said"),
    [("end", {}), ("unavailable", {"error": {"code": "unavailable"}}), ("truncated", None), ("reset", None)],
)
def test_the_last_words_of_a_cut_stream(how: Any, said: Any) -> None:
    words = Cutter(CutStream(how=how), "json").last_words()
    if said is None:
        assert words == b""
    else:
        assert words[0] == LAST
        told = json.loads(words[5:])
        told.get("error", {}).pop("message", None)
        assert told == said
