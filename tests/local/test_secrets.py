"""Secrets through E2B's SDK: names, versions, pages; and their values nowhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from e2b import AsyncSecret, Secret, SecretException
from e2b.exceptions import SecretNotFoundException

from managed_e2b.local.clock import SystemClock
from managed_e2b.local.errors import ApiError
from managed_e2b.local.runtime.base import Runtime
from managed_e2b.local.secretstore import MOST_SECRETS, SecretStore, check, normal_name
from managed_e2b.local.server import LocalServer

VALUE = "hunter2-" + "5f" * 20


class NoSandboxes:
    """A runtime for what needs no sandbox."""

    def __getattr__(self, name: str) -> Any:
        async def nothing(*_: Any, **__: Any) -> None:
            return None

        return (lambda *_: None) if name == "offer" else nothing


@pytest.fixture
async def server() -> AsyncIterator[LocalServer]:
    runtime: Runtime = NoSandboxes()  # type: ignore[assignment]
    async with LocalServer(runtime=runtime) as server:
        yield server


@pytest.fixture
def options(server: LocalServer) -> dict[str, Any]:
    return {"api_key": server.api_key, "api_url": server.url}


async def drain(options: dict[str, Any], **more: Any) -> list[list[str]]:
    pages, paginator = [], AsyncSecret.list(**more, **options)
    while paginator.has_next:
        pages.append([secret.name for secret in await paginator.next_items()])
    return pages


async def test_a_secret_lives_from_create_to_destroy(options):
    made = await AsyncSecret.create("API-Key", VALUE, metadata={"team": "a"}, **options)
    assert (made.name, made.version, made.metadata) == ("api-key", 1, {"team": "a"})
    assert made.secret_id.startswith("sec_")
    changed = await AsyncSecret.update("api-key", VALUE + "2", **options)
    assert (changed.version, changed.metadata) == (2, {"team": "a"})
    assert changed.updated_at > changed.created_at == made.created_at
    changed = await AsyncSecret.update(made.secret_id, VALUE, metadata={}, **options)
    assert (changed.version, changed.metadata) == (3, {})
    for selector in ("API-KEY", made.secret_id, made.secret_id.upper()):
        assert await AsyncSecret.get_info(selector, **options) == changed
    assert await AsyncSecret.exists("api-key", **options)
    assert await AsyncSecret.destroy(made.secret_id, **options)
    assert not await AsyncSecret.destroy("api-key", **options)
    with pytest.raises(SecretNotFoundException):
        await AsyncSecret.update("api-key", VALUE, **options)
    again = await AsyncSecret.create("api-key", VALUE, **options)
    assert (again.version, again.secret_id != made.secret_id) == (1, True)


async def test_the_same_with_the_synchronous_sdk(options):
    await asyncio.to_thread(_use_synchronously, options)


def _use_synchronously(options: dict[str, Any]) -> None:
    made = Secret.create("one", VALUE, **options)
    assert Secret.update("one", VALUE, **options).version == 2
    assert Secret.get_info(made.secret_id, **options).name == "one"
    assert [secret.name for secret in Secret.list(**options).next_items()] == ["one"]
    assert Secret.destroy("one", **options)
    assert not Secret.exists("one", **options)


async def test_pages(options):
    for number in range(7):
        await AsyncSecret.create(f"s{number}", VALUE, **options)
    newest_first = [f"s{number}" for number in reversed(range(7))]
    assert await drain(options, limit=3) == [newest_first[:3], newest_first[3:6], newest_first[6:]]
    assert await drain(options) == [newest_first]
    first = AsyncSecret.list(limit=3, **options)
    await first.next_items()
    await AsyncSecret.destroy("s4", **options)  # the last of that page
    assert await drain(options, limit=10, next_token=first.next_token) == [newest_first[3:]]


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "sec_a", "SEC_a", "ü", "x" * 129, "${a}"])
async def test_names_that_are_none(options, name):
    with pytest.raises(SecretException, match="Invalid secrets request: a name"):
        await AsyncSecret.create(name, VALUE, **options)


async def test_what_is_refused_shows_nothing_of_what_was_sent(server):
    headers = {"X-API-KEY": server.api_key}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False) as api:
        for body in (
            {"name": "a", "value": [VALUE]},
            {"name": [VALUE], "value": "x"},
            {"name": "a", "value": VALUE * 4000},
            {"name": "a", "value": "x", "metadata": {"k": VALUE * 100}},
            {"name": "a", "value": "x", "metadata": {VALUE * 10: "x"}},
            {"name": "a", "value": "x", "metadata": {f"{VALUE}{number}": "x" for number in range(33)}},
            {"name": "a", "value": "x", "metadata": {f"k{number}": "x" * 1024 for number in range(9)}},
            {"name": "a", "value": "x", "metadata": {"k": {"a": VALUE}}},
        ):
            answer = await api.post("/secrets", json=body)
            assert (answer.status_code, answer.json()["code"]) == (400, 400)
            assert "hunter2" not in answer.text
        for query in ("limit=0", "limit=101", "limit=-1", "limit=x", "nextToken=x", "nextToken=%F0%9F"):
            assert (await api.get(f"/secrets?{query}")).status_code == 400
        assert (await api.get("/secrets/sec_none")).status_code == 400
        assert (await api.get("/secrets/a%20b")).status_code == 400
        assert (await api.get("/secrets")).json() == []
        assert (await api.get("/secrets", headers={"X-API-KEY": "e2b_other"})).status_code == 401


async def test_a_name_is_taken_once(options):
    await AsyncSecret.create("taken", VALUE, **options)
    with pytest.raises(SecretException, match="already exists"):
        await AsyncSecret.create(" TAKEN ", VALUE, **options)


async def test_a_value_is_neither_answered_nor_logged(server, caplog):
    caplog.set_level(logging.DEBUG)
    value = "-".join(["kept", "nowhere", "0123456789"])
    async with httpx.AsyncClient(base_url=server.url, headers={"X-API-KEY": server.api_key}, trust_env=False) as api:
        answers = [
            await api.post("/secrets", json={"name": "a", "value": value}),
            await api.post("/secrets/a", json={"value": value}),
            await api.get("/secrets/a"),
            await api.get("/secrets"),
        ]
    assert all(answer.is_success and value not in answer.text for answer in answers)
    assert value not in caplog.text


def test_a_value_is_not_kept():
    store = SecretStore(SystemClock())
    store.create("a", VALUE, {})
    store.update("a", VALUE, None)
    assert VALUE not in repr([vars(store), *(vars(secret) for secret in store)])


def test_there_is_an_end_to_how_many():
    store = SecretStore(SystemClock())
    for number in range(MOST_SECRETS):
        store.create(f"s{number}", "x", {})
    with pytest.raises(ApiError, match="already"):
        store.create("more", "x", {})


def test_limits_are_in_bytes():
    assert normal_name(" A-b_9 ") == "a-b_9"
    check("ü" * 32768, {"ü" * 64: "ü" * 512})
    for value, metadata in (("ü" * 32769, {}), ("", {"ü" * 65: ""}), ("", {"a": "ü" * 513})):
        with pytest.raises(ApiError):
            check(value, metadata)
