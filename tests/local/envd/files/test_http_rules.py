"""The HTTP rules of /files."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from managed_e2b.local.envd import http_rules as rules
from managed_e2b.local.envd.signatures import sign, signature_matches


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        ("", "identity"),
        ("gzip", "gzip"),
        ("GZIP;q=0.5", "gzip"),
        ("gzip, identity;q=0.5", "gzip"),
        ("gzip;q=nonsense", "gzip"),
        ("gzip;q=0", "identity"),
        ("identity, gzip;q=0.5", "identity"),
        ("gzip, deflate", "identity"),  # what httpx and browsers send by themselves
        ("deflate, gzip, br, zstd", "identity"),
        ("br", "identity"),
        ("*", "identity"),
        ("gzip, *;q=0", "gzip"),
        ("br, gzip, identity;q=0", "gzip"),
        ("*, identity;q=0", "gzip"),
        (",,;", "identity"),
    ],
)
def test_the_encoding_of_a_download(accept, encoding):
    assert rules.response_encoding(accept, partial=False) == encoding


@pytest.mark.parametrize("accept", ["identity;q=0", "*;q=0", "br, *;q=0", "gzip;q=0, *;q=0"])
def test_no_encoding_left(accept):
    with pytest.raises(rules.NotAcceptable):
        rules.response_encoding(accept, partial=False)


def test_parts_are_never_compressed():
    assert rules.response_encoding("gzip", partial=True) == "identity"
    with pytest.raises(rules.NotAcceptable):
        rules.response_encoding("gzip, identity;q=0", partial=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=2-4", (2, 5)),
        ("bytes=5-", (5, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=0-99", (0, 10)),
        ("bytes=9-9", (9, 10)),
        ("", None),
        ("bytes=-", None),
        ("bytes=4-2", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=a-b", None),
        ("bytes=0x1-2", None),
    ],
)
def test_ranges(value, expected):
    assert rules.byte_range(value, 10) == expected


@pytest.mark.parametrize(
    ("value", "size"), [("bytes=10-", 10), ("bytes=11-12", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=-1", 0)]
)
def test_ranges_behind_the_end(value, size):
    with pytest.raises(rules.RangeNotSatisfiable):
        rules.byte_range(value, size)


@settings(deadline=None, database=None)
@given(st.text(max_size=30), st.integers(0, 20))
def test_a_range_is_never_outside_of_the_file(value, size):
    try:
        found = rules.byte_range("bytes=" + value, size)
    except rules.RangeNotSatisfiable:
        return
    assert found is None or 0 <= found[0] < found[1] <= size


@settings(deadline=None, database=None)
@given(st.binary(max_size=40))
def test_any_name_makes_a_header_and_can_be_read_back(name):
    value = rules.inline(name)
    value.encode("ascii")
    assert "\r" not in value
    assert "\n" not in value
    if match := re.fullmatch(r"inline; filename\*=utf-8''(.*)", value):
        back = unquote_to_bytes(match[1])
    elif match := re.fullmatch(r'inline; filename="(.*)"', value):
        back = re.sub(r"\\(.)", r"\1", match[1]).encode()
    else:
        back = value.removeprefix("inline; filename=").encode()
    assert back == name


def test_dates():
    assert rules.not_modified_since(rules.http_date(1_700_000_000), 1_700_000_000)
    assert not rules.not_modified_since(rules.http_date(1_700_000_000), 1_700_000_001)
    assert not rules.not_modified_since("yesterday", 0)
    assert not rules.not_modified_since("", 0)


def test_metadata_headers():
    headers = [
        (b"X-Metadata-Author", b"mish"),
        (b"x-metadata-author", b"second"),
        (b"x-metadata-", b"no key"),
        (b"x-meta", b"other"),
        (b"x-metadata-b", b""),
    ]
    assert rules.metadata_of(headers) == {"author": "mish", "b": ""}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (b"a" * 247, b"", "exceeds 246 bytes"),
        (b"key", b"a\tb", "non-printable-ASCII byte 0x09 at offset 1"),
        (b"key", "ü".encode(), "non-printable-ASCII byte 0xc3 at offset 0"),
        (b"k\xff", b"", "metadata key contains"),
        (b"key", b"v" * 4096, "total metadata size 4108 exceeds 4096 bytes"),
    ],
)
def test_metadata_that_no_file_could_carry(name, value, message):
    with pytest.raises(rules.InvalidMetadata, match=message):
        rules.metadata_of([(b"x-metadata-" + name, value)])


def test_the_most_metadata_there_can_be():
    assert len(rules.metadata_of([(b"x-metadata-" + b"a" * 246, b"")])) == 1
    assert rules.metadata_of([(b"x-metadata-k", b"v" * 4086)])["k"] == "v" * 4086


def test_signatures_are_those_of_the_sdk():
    from e2b.sandbox.signature import get_signature

    for operation in ("read", "write"):
        for user in (None, "root"):
            theirs = get_signature("/a b/ü", operation, user, "token", 100)
            expiration = theirs["expiration"]
            assert signature_matches("token", "/a b/ü", operation, user, expiration, theirs["signature"])
            assert signature_matches("token", "/a b/ü", operation, user, str(expiration), theirs["signature"])
            assert not signature_matches("other", "/a b/ü", operation, user, expiration, theirs["signature"])
            assert not signature_matches("token", "/a b/ü", operation, user, expiration + 1, theirs["signature"])
            assert not signature_matches("token", "/a b/ü", operation, user, None, theirs["signature"])


def test_each_signature_is_for_one_thing():
    made = sign("token", "/a", "read", "user", None)
    assert signature_matches("token", "/a", "read", "user", None, made)
    assert not signature_matches("token", "/a", "write", "user", None, made)
    assert not signature_matches("token", "/b", "read", "user", None, made)
    assert not signature_matches("token", "/a", "read", "root", None, made)
    assert not signature_matches("token", "/a", "read", None, None, made)
    assert not signature_matches("token", "/\udcff", "read", "user", None, "\udcff")
