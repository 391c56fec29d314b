"""Lists that lie, over HTTP, page by page."""

from __future__ import annotations

import pytest

from .conftest import World, rule


async def pages(world: World, most: int = 10, **params: str) -> list[list[str]]:
    """What a client that follows the tokens sees, `most` pages at the most."""
    found: list[list[str]] = []
    token = None
    while len(found) < most:
        answer = await world.list(**params, **({} if token is None else {"nextToken": token}))
        found.append([item["sandboxID"] for item in answer.json()])
        token = answer.headers.get("x-next-token")
        if token is None:
            break
    return found


async def three(world: World) -> list[str]:
    """Three sandboxes, in the order of lists: the newest first."""
    return [await world.created(n=str(n)) for n in range(3)][::-1]


async def test_an_empty_list(world: World) -> None:
    await three(world)
    await world.play(rule("list").first(1).empty())
    assert await pages(world) == [[]]
    assert len((await pages(world))[0]) == 3


async def test_a_list_as_of_some_calls_ago_with_its_filters_and_its_pages(world: World) -> None:
    assert await world.listed() == []
    old = await three(world)
    assert await world.listed() == old
    await world.api.delete(f"/sandboxes/{old[0]}")
    young = await world.created(n="9")
    await world.play(rule("list").stale(1))
    assert await world.listed() == old, "the dead one is still there, the new one not yet"
    assert await world.listed() == [young, *old[1:]], "and the call before was one that saw them"
    await world.play(rule("list").stale(2))
    assert await world.listed(metadata="n=1") == [old[1]]
    await world.play(rule("list").stale(20))
    assert await world.listed() == [], "the oldest that is known"


async def test_stale_pages_go_on_where_the_one_before_ended(world: World) -> None:
    old = await three(world)
    for _ in range(2):
        await world.list()
    await world.play(rule("list").stale(2))
    assert await pages(world, limit="2") == [old[:2], old[2:]]


async def test_a_stale_list_shows_states_as_they_were(world: World) -> None:
    sandbox_id = await world.created()
    await world.list()
    await world.api.post(f"/sandboxes/{sandbox_id}/pause")
    await world.play(rule("list").stale(1))
    assert [item["state"] for item in (await world.list()).json()] == ["running"]


async def test_a_lossy_list_drops_items_by_the_seed(world: World) -> None:
    for _ in range(12):
        await world.created()
    everything = await world.listed()

    async def lossy(seed: int) -> list[list[str]]:
        await world.play(rule("list").lossy(0.5), seed=seed)
        return [await world.listed() for _ in range(3)]

    first = await lossy(1)
    assert await lossy(1) == first
    assert await lossy(2) != first
    assert all(set(page) < set(everything) for page in first)
    await world.play(rule("list").lossy(1))
    assert await world.listed() == []


async def test_a_truncated_list_says_that_it_is_whole(world: World) -> None:
    old = await three(world)
    await world.play(rule("list").truncated(1))
    assert await pages(world, limit="2") == [old[:1]]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_repeating_list_is_its_first_page_for_ever(world: World, order: str) -> None:
    old = await three(world)
    if order == "asc":
        old.reverse()
    await world.play(rule("list").repeating())
    assert await pages(world, most=5, limit="2", order=order) == [old[:2]] * 5


async def test_a_list_that_is_repeated_with_nothing_in_it_ends(world: World) -> None:
    await world.play(rule("list").repeating())
    assert await pages(world) == [[]]


async def test_lies_of_the_old_api_and_queries_that_make_no_sense(world: World) -> None:
    await three(world)
    await world.play(rule("list").truncated(1))
    assert len((await world.api.get("/sandboxes")).json()) == 1
    answer = await world.api.get("/v2/sandboxes", params={"limit": "x"})
    assert answer.status_code == 400
