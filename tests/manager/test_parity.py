"""The two faces have the same names, signatures and documented contract."""

from __future__ import annotations

import inspect

import pytest

from managed_e2b import AsyncSandboxHandle, AsyncSandboxLifecycle, SandboxHandle, SandboxLifecycle

PAIRS = [(SandboxLifecycle, AsyncSandboxLifecycle), (SandboxHandle, AsyncSandboxHandle)]


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("sync", "asynchronous"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_have_the_same_public_names(sync: type, asynchronous: type) -> None:
    assert public(sync) == public(asynchronous)


@pytest.mark.parametrize(
    ("sync", "asynchronous", "name"),
    [(sync, twin, name) for sync, twin in PAIRS for name in [*sorted(public(sync)), "__init__"]],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_each_has_the_same_signature_and_is_documented(sync: type, asynchronous: type, name: str) -> None:
    one, other = inspect.getattr_static(sync, name), inspect.getattr_static(asynchronous, name)
    assert isinstance(one, property) == isinstance(other, property)
    if isinstance(one, property):
        assert isinstance(other, property)
        one, other = one.fget, other.fget
    else:
        mine, theirs = inspect.signature(one), inspect.signature(other)
        assert mine.parameters == theirs.parameters
        if inspect.iscoroutinefunction(other):
            assert mine.return_annotation == theirs.return_annotation
    assert (one.__doc__ and other.__doc__) or name == "__init__"
