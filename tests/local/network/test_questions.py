"""What a DNS message asks."""

from __future__ import annotations

import struct

import pytest

from managed_e2b.local.network.questions import name_asked


def message(
    labels: list[bytes], *, flags: int = 0x0100, counts: tuple[int, int, int, int] = (1, 0, 0, 0), kind: int = 1
) -> bytes:
    name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return struct.pack(">HHHHHH", 7, flags, *counts) + name + struct.pack(">HH", kind, 1)


@pytest.mark.parametrize(
    ("labels", "name"),
    [([b"www", b"Example", b"com"], "www.example.com"), ([], "."), ([b"x" * 63, b"y"], "x" * 63 + ".y")],
)
def test_a_plain_question(labels, name):
    assert name_asked(message(labels)) == name
    assert name_asked(message(labels, counts=(1, 0, 0, 1)) + b"\0\0\x29") == name  # EDNS comes after it


@pytest.mark.parametrize(
    "data",
    [
        b"",
        message([b"a"])[:11],
        message([b"a", b"b"])[:-5],
        message([b"a", b"b"])[:-1],
        message([b"a"], flags=0x8100),  # an answer
        message([b"a"], flags=0x2800),  # UPDATE
        message([b"a"], flags=0x2000),  # NOTIFY
        message([b"a"], counts=(2, 0, 0, 0)),
        message([b"a"], counts=(0, 0, 0, 0)),
        message([b"a"], counts=(1, 1, 0, 0)),
        message([b"a"], counts=(1, 0, 1, 0), kind=251),
        message([b"a"], kind=252),
        message([b"x.example", b"com"]),  # would read as x.example.com
        struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0) + b"\xc0\x0c\0\1\0\1",  # compressed, a loop
    ],
)
def test_what_is_no_plain_question(data):
    assert name_asked(data) is None
