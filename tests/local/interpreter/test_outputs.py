"""From the kernel's messages to what clients read."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from managed_e2b.local.interpreter.inside import outputs

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def message(kind: str, **content):
    return {"header": {"msg_type": kind, "date": AT}, "content": content}


def test_streams_carry_their_time():
    told = outputs.from_message(message("stream", name="stderr", text="a\nb"))
    assert told == {"type": "stderr", "text": "a\nb", "timestamp": "2026-01-02T03:04:05+00:00"}


def test_the_cells_own_value_is_told_from_what_it_displays():
    value = outputs.from_message(message("execute_result", data={"text/plain": "1"}, metadata={}, execution_count=3))
    shown = outputs.from_message(message("display_data", data={"text/plain": "1"}, metadata={}))
    assert value == {"type": "result", "text": "1", "extra": {}, "is_main_result": True}
    assert shown == {"type": "result", "text": "1", "extra": {}, "is_main_result": False}


def test_every_kind_of_data_has_its_name_and_the_rest_is_extra():
    bundle = {
        "text/html": "h", "text/markdown": "m", "image/svg+xml": "s", "image/png": "p", "image/jpeg": "j",
        "application/pdf": "d", "text/latex": "l", "application/json": {"a": 1}, "application/javascript": "x",
        "e2b/data": {"c": [1]}, "e2b/chart": {"type": "bar"}, "application/x-own": "o",
    }  # fmt: skip
    told = outputs.result(bundle, main=False)
    assert told == {
        "type": "result", "html": "h", "markdown": "m", "svg": "s", "png": "p", "jpeg": "j", "pdf": "d", "latex": "l",
        "json": {"a": 1}, "javascript": "x", "data": {"c": [1]}, "chart": {"type": "bar"},
        "extra": {"application/x-own": "o"}, "is_main_result": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("repr_of", "shown"), [("'a'", "a"), ('"a\'"', "a'"), ("''", ""), ("'a", "'a"), ("[1]", "[1]")]
)
def test_a_strings_value_is_shown_without_quotes(repr_of, shown):
    assert outputs.result({"text/plain": repr_of}, main=True)["text"] == shown


def test_errors_and_counts():
    error = outputs.from_message(message("error", ename="E", evalue="v", traceback=["1", "2"]))
    assert error == {"type": "error", "name": "E", "value": "v", "traceback": "12"}
    assert outputs.from_message(message("execute_input", code="x", execution_count=7)) == outputs.count(7)


@pytest.mark.parametrize("kind", ["comm_open", "clear_output", "update_display_data"])
def test_what_clients_have_no_word_for_is_left_out(kind):
    assert outputs.from_message(message(kind, data={})) is None
