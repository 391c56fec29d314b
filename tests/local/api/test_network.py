"""The network options of create and of `PUT /sandboxes/{id}/network`, as the API takes, refuses and shows them."""

from __future__ import annotations

import pytest

ALL = "0.0.0.0/0"


async def test_what_was_asked_is_shown_and_replaced(world):
    sandbox = await world.create(
        allow_internet_access=True,
        network={"denyOut": [ALL], "dnsServers": ["1.1.1.1"], "maskRequestHost": "a-${PORT}.example:${PORT}"},
    )
    path = f"/sandboxes/{sandbox['sandboxID']}"
    asked = {"denyOut": [ALL], "dnsServers": ["1.1.1.1"], "maskRequestHost": "a-${PORT}.example:${PORT}"}
    assert (await world.api.get(path)).json()["network"] == asked
    answer = await world.api.put(f"{path}/network", json={"denyOut": ["8.8.8.8"], "allow_internet_access": False})
    assert (answer.status_code, answer.content) == (204, b"")
    shown = (await world.api.get(path)).json()
    assert shown["network"] == {"denyOut": ["8.8.8.8"], "maskRequestHost": "a-${PORT}.example:${PORT}"}
    assert shown["allowInternetAccess"] is False
    assert (await world.api.put(f"{path}/network", json={})).status_code == 204
    assert (await world.api.get(path)).json()["network"] == {"maskRequestHost": "a-${PORT}.example:${PORT}"}


async def test_a_paused_sandbox_can_be_changed(world):
    sandbox = await world.create()
    path = f"/sandboxes/{sandbox['sandboxID']}"
    await world.api.post(f"{path}/pause")
    assert (await world.api.put(f"{path}/network", json={"denyOut": [ALL]})).status_code == 204
    assert (await world.api.get(path)).json()["network"] == {"denyOut": [ALL]}


async def test_nothing_that_is_not_there(world):
    answer = await world.api.put("/sandboxes/i00000000000000000000/network", json={})
    assert (answer.status_code, answer.json()["code"]) == (404, 404)
    assert (await world.anonymous.put("/sandboxes/i0/network", json={})).status_code == 401


@pytest.mark.parametrize(
    "network",
    [
        {"denyOut": ["example.com"]},
        {"denyOut": "8.8.8.8"},
        {"denyOut": [8]},
        {"allowOut": ["example.com"]},
        {"allowOut": ["a b"], "denyOut": [ALL]},
        {"dnsServers": ["127.0.0.1"]},
    ],
)
async def test_bad_rules(world, network):
    sandbox = await world.create()
    answers = [
        await world.api.post("/v2/sandboxes", json={"templateID": "base", "network": network}),
        await world.api.put(f"/sandboxes/{sandbox['sandboxID']}/network", json=network),
    ]
    assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(400, 400)] * 2
    assert len(world.runtime.guests) == 1


@pytest.mark.parametrize(
    "network",
    [
        {"maskRequestHost": "a\r\nX-Evil: 1"},
        {"maskRequestHost": "ä.example"},
        {"maskRequestHost": ""},
        {"maskRequestHost": "a b"},
        {"httpsPorts": [0]},
        {"httpsPorts": [65536]},
        {"httpsPorts": ["3000"]},
    ],
)
async def test_bad_options_of_ports(world, network):
    answer = await world.api.post("/v2/sandboxes", json={"templateID": "base", "network": network})
    assert (answer.status_code, answer.json()["code"]) == (400, 400)


@pytest.mark.parametrize(
    "network",
    [{"rules": {"a.b": [{}]}}, {"egressProxy": {"address": "a:1", "password": "hunter2"}}],
)
async def test_a_change_that_cannot_be_done_is_refused(world, network):
    sandbox = await world.create(network={"denyOut": ["8.8.8.8"]})
    path = f"/sandboxes/{sandbox['sandboxID']}"
    answer = await world.api.put(f"{path}/network", json=network)
    assert (answer.status_code, answer.json()["code"]) == (501, 501)
    assert next(iter(network)) in answer.json()["message"]
    assert "hunter2" not in answer.text
    assert (await world.api.get(path)).json()["network"] == {"denyOut": ["8.8.8.8"]}


async def test_a_way_out_that_is_asked_for_where_there_is_none(world):
    """What is denied needs none: nothing leaves at all."""
    await world.create(network={"denyOut": [ALL]}, allow_internet_access=True)
    for network in ({"allowOut": ["8.8.8.8"]}, {"allowOut": ["example.com"], "denyOut": [ALL]}):
        answer = await world.api.post("/v2/sandboxes", json={"templateID": "base", "network": network})
        assert (answer.status_code, answer.json()["code"]) == (501, 501)
        assert "network.allowOut" in answer.json()["message"]
    assert len(world.runtime.alive) == 1
