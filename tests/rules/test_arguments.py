"""Each argument of a handle's methods is judged by a function that names it and tells no value that may be secret."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from managed_e2b import ValidationError
from managed_e2b.rules import arguments

REFUSED: list[tuple[Callable[[str, str, Any], Any], Any, str]] = [
    (arguments.text, 5, "not int"),
    (arguments.text, None, "not NoneType"),
    (arguments.text, b"ls", "not bytes"),
    (arguments.text, ["ls"], "not list"),
    (arguments.text, "", "a non-empty str"),
    (arguments.text, "a\0b", "without NUL"),
    (arguments.text, "\ud800", "surrogate"),
    (arguments.optional_text, "", "or None"),
    (arguments.optional_text, 5, "not int"),
    (arguments.optional_text, "a\0b", "without NUL"),
    (arguments.seconds, "5", "seconds above 0"),
    (arguments.seconds, 0, "seconds above 0"),
    (arguments.seconds, -1, "seconds above 0"),
    (arguments.seconds, math.nan, "seconds above 0"),
    (arguments.seconds, math.inf, "at most 9999999"),
    (arguments.seconds, 10**400, "at most 9999999"),
    (arguments.seconds, True, "seconds above 0"),
    (arguments.flag, "yes", "True or False"),
    (arguments.flag, 1, "True or False"),
    (arguments.callback, "print", "something to call"),
    (arguments.variables, {"X": 5}, "'X': int is not a str"),
    (arguments.variables, {5: "x"}, "5 is not a name"),
    (arguments.variables, {"": "x"}, "'' is not a name"),
    (arguments.variables, {"A=B": "x"}, "'A=B' is not a name"),
    (arguments.variables, {"A\0": "x"}, "NUL"),
    (arguments.variables, {"A": "\ud800"}, "surrogate"),
    (arguments.variables, ["A=1"], "a mapping of str to str, not list"),
    (arguments.variables, "A=1", "a mapping of str to str, not str"),
    (arguments.standard_input, 5, "str or bytes, not int"),
    (arguments.standard_input, "\ud800", "surrogate"),
    (arguments.words, "--fast", "a list of str, not str"),
    (arguments.words, {"a"}, "a list of str, not set"),
    (arguments.words, [5], "int is not a str"),
    (arguments.words, ["a\0"], "NUL"),
    (arguments.contents, ["a"], "a mapping of names to contents, not list"),
    (arguments.contents, {"a": 5}, r"\['a'\].*str, bytes or pathlib.Path, not int"),
    (arguments.contents, {"a": None}, "not NoneType"),
    (arguments.contents, {5: "a"}, "5 is not a path"),
    (arguments.contents, {"../a": "a"}, "without '..'"),
    (arguments.contents, {"a": "\ud800"}, "surrogate"),
    (arguments.contents, {"a": Path("a\0b")}, "not a path on this machine"),
    (arguments.paths, "a.txt", "give a list of paths"),
    (arguments.paths, 5, "give a list of paths"),
    (arguments.paths, [5], "5 is not a path"),
    (arguments.paths, ["a\0b"], "NUL"),
    (arguments.path, ".", "a path below /task"),
    (arguments.path, Path("a"), "not a path in a sandbox"),
]


def _id(item: Any) -> str:
    return str(item.__name__) if callable(item) else ""


@pytest.mark.parametrize(("judge", "value", "told"), REFUSED, ids=_id)
def test_what_cannot_be_sent_is_refused_by_name(judge: Callable[..., Any], value: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=rf"^method\(argument.*{told}"):
        judge("method", "argument", value)


@pytest.mark.parametrize(
    ("judge", "value", "found"),
    [
        (arguments.text, "echo 'ü' 🙂\n", "echo 'ü' 🙂\n"),
        (arguments.optional_text, None, None),
        (arguments.seconds, None, None),
        (arguments.seconds, 0.001, 0.001),
        (arguments.seconds, 9_999_999, 9_999_999),
        (arguments.flag, False, False),
        (arguments.callback, None, None),
        (arguments.callback, print, print),
        (arguments.variables, None, {}),
        (arguments.variables, {"A": "", "with.dot": "ü"}, {"A": "", "with.dot": "ü"}),
        (arguments.standard_input, None, None),
        (arguments.standard_input, "", b""),
        (arguments.standard_input, bytearray(b"\0\xff"), b"\0\xff"),
        (arguments.words, ("", "a b", "--x"), ["", "a b", "--x"]),
        (arguments.contents, {"a": "ü", "/etc/b": b"\0"}, {"/task/a": ("a", b"\xc3\xbc"), "/etc/b": ("/etc/b", b"\0")}),
        (arguments.contents, {"a": Path("x")}, {"/task/a": ("a", Path("x"))}),
        (arguments.paths, iter(["a", "/b"]), {"a": "/task/a", "/b": "/b"}),
    ],
    ids=_id,
)
def test_what_can_be_sent_passes(judge: Callable[..., Any], value: Any, found: Any) -> None:
    assert judge("method", "argument", value) == found


@given(
    st.text(min_size=8, alphabet=st.characters(exclude_categories=["Cs"])).filter(lambda value: "method" not in value),
    st.sampled_from(["\0", "\ud800"]),
)
def test_no_value_that_may_be_secret_is_told(secret: str, wrong: str) -> None:
    for judge, value in (
        (arguments.variables, {"A": secret + wrong}),
        (arguments.variables, {"A": secret, "B": 5}),
        (arguments.words, [secret + wrong]),
        (arguments.contents, {"a": secret + "\ud800"}),
        (arguments.standard_input, secret + "\ud800"),
    ):
        with pytest.raises(ValidationError) as caught:
            judge("method", "argument", value)
        assert secret not in str(caught.value)
