"""Whatever is sent, the answer is the JSON `{code, message}` with a fitting status, and nothing is made of it."""

from __future__ import annotations

import json

import pytest

HUGE = 10**400

BAD_CREATES = [
    "",
    "{",
    "[]",
    "null",
    '"base"',
    "[" * 100_000,
    '{"templateID": "base"',
    '{"templateID": "base", "metadata": {"a": "\\ud800"}}',
    b"\xff\xfe",
    {"templateID": None},
    {"templateID": 7},
    {"templateID": "no such name"},
    {"templateID": "../base"},
    {"templateID": "base:"},
    {"templateID": "b" * 1000},
    {"templateID": "base", "timeout": 0},
    {"templateID": "base", "timeout": -1},
    {"templateID": "base", "timeout": "60"},
    {"templateID": "base", "timeout": 60.5},
    {"templateID": "base", "timeout": True},
    {"templateID": "base", "timeout": HUGE},
    {"templateID": "base", "timeout": 24 * 3600 + 1},
    {"templateID": "base", "metadata": {"a": 1}},
    {"templateID": "base", "metadata": ["a"]},
    {"templateID": "base", "metadata": {"a": None}},
    {"templateID": "base", "envVars": {"a": 1}},
    {"templateID": "base", "envVars": {"": "x"}},
    {"templateID": "base", "envVars": {"A=B": "x"}},
    {"templateID": "base", "envVars": {"A": "x\0y"}},
    {"templateID": "base", "autoPause": "yes"},
    {"templateID": "base", "autoPauseMemory": False},
    {"templateID": "base", "autoPause": True, "autoPauseMemory": False, "autoResume": {"enabled": True}},
    {"templateID": "base", "autoResume": True},
    {"templateID": "base", "network": []},
]


@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
async def test_bad_creates(world, path):
    for body in BAD_CREATES:
        content = body if isinstance(body, str | bytes) else json.dumps(body)
        answer = await world.api.post(path, content=content)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["code"] == 400
        assert answer.json()["message"]
    assert world.runtime.guests == []


async def test_the_texts_of_timeouts(world):
    for seconds, message in [
        (0, "Timeout must be greater than 0"),
        (90_000, "Timeout cannot be greater than 24 hours"),
    ]:
        answer = await world.api.post("/v2/sandboxes", json={"templateID": "base", "timeout": seconds})
        assert answer.json() == {"code": 400, "message": message}


async def test_null_counts_as_absent_and_unknown_fields_are_ignored(world):
    await world.create(timeout=None, metadata=None, autoPause=None, network=None, futureOption={"a": 1})


async def test_what_is_refused_does_not_show_what_was_sent(world):
    answer = await world.api.post("/v2/sandboxes", json={"templateID": "base", "envVars": {"KEY": ["hunter2"]}})
    assert answer.status_code == 400
    assert "hunter2" not in answer.text
    assert "envVars.KEY" in answer.json()["message"]


async def test_a_body_that_is_too_large(world):
    answer = await world.api.post("/v2/sandboxes", json={"templateID": "base", "metadata": {"a": "x" * 2_000_000}})
    assert (answer.status_code, answer.json()["code"]) == (413, 413)


@pytest.mark.parametrize(
    "option",
    [
        {"iam": {"tokens": {"aws": {"audience": "a", "tokenType": "JWT-SVID"}}}},
        {"network": {"rules": {"a.b": [{}]}}},
        {"network": {"egressProxy": {"address": "a:1", "password": "hunter2"}}},
    ],
)
async def test_options_that_would_be_broken_promises_are_refused(world, option):
    answer = await world.api.post("/v2/sandboxes", json={"templateID": "base", **option})
    assert (answer.status_code, answer.json()["code"]) == (501, 501)
    assert answer.headers["Should-Retry"] == "false"
    assert "hunter2" not in answer.text
    assert world.runtime.guests == []


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=-1",
        "limit=x",
        "limit=" + "9" * 5000,
        "limit=%C2%B2",
        "state=dead",
        "order=up",
        "startedAfter=yesterday",
        "startedAfter=2026-01-01T00:00:00",
        "nextToken=x",
        "nextToken=%ff%fe",
        "nextToken=bm90LWEtZGF0ZV9feA",
        "template=base:default",
        "metadata=%25zz",
        "metadata=a%3D%25",
        "metadata=%25ff",
    ],
)
async def test_bad_lists(world, query):
    answer = await world.api.get(f"/v2/sandboxes?{query}")
    assert (answer.status_code, answer.json()["code"]) == (400, 400)


@pytest.mark.parametrize("path", ["timeout", "refreshes", "connect", "resume", "pause"])
@pytest.mark.parametrize("body", ["{", "[]", '{"timeout": "x", "duration": "x", "memory": "x"}'])
async def test_bad_bodies_about_one_sandbox(world, path, body):
    sandbox = await world.create()
    answer = await world.api.post(f"/sandboxes/{sandbox['sandboxID']}/{path}", content=body)
    assert (answer.status_code, answer.json()["code"]) == (400, 400)


async def test_bad_numbers_about_one_sandbox(world):
    sandbox = await world.create()
    path = f"/sandboxes/{sandbox['sandboxID']}"
    for what, body in [
        ("timeout", {"timeout": HUGE}),
        ("timeout", {}),
        ("connect", {}),
        ("connect", {"timeout": -1}),
        ("connect", {"timeout": 10**6}),
        ("refreshes", {"duration": 3601}),
    ]:
        answer = await world.api.post(f"{path}/{what}", content=json.dumps(body))
        assert (answer.status_code, answer.json()["code"]) == (400, 400), (what, body)
    assert (await world.api.get(f"{path}/metrics?start=x")).status_code == 400
    # more than the longest life is cut, not refused
    assert (await world.api.post(f"{path}/timeout", json={"timeout": 2**31 - 1})).status_code == 204


@pytest.mark.parametrize("sandbox_id", ["inowhere", "UPPER", "%2e%2e", "a%20b", "%00", "x" * 5000, "%F0%9F%92%A9"])
async def test_unknown_ids(world, sandbox_id):
    for method, path, body in [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/timeout", {"timeout": 5}),
        ("POST", "/pause", None),
        ("POST", "/connect", {"timeout": 5}),
        ("GET", "/metrics", None),
    ]:
        answer = await world.api.request(method, f"/sandboxes/{sandbox_id}{path}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, 404), (method, path)
        assert len(answer.text) < 20_000


async def test_unknown_paths_and_methods(world):
    for method, path, status in [
        ("GET", "/nowhere", 404),
        ("GET", "/sandboxes/", 404),
        ("GET", "/v9/sandboxes", 404),
        ("PATCH", "/v2/sandboxes", 405),
        ("PUT", "/sandboxes/i1", 405),
        ("POST", "/health", 405),
    ]:
        answer = await world.api.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (status, status), path


async def test_what_is_not_built_says_so(world):
    for method, path in [
        ("POST", "/templates"),
        ("POST", "/templates/a/builds/b"),
    ]:
        answer = await world.api.request(method, path, json={})
        assert (answer.status_code, answer.json()["code"]) == (501, 501), path
        assert "not available on the local server" in answer.json()["message"]


@pytest.mark.parametrize("key", [None, "", "wrong", "e2b_" + "0" * 39, "\xff\xfe", "e2b_" + "0" * 40 + " x"])
async def test_without_the_right_key_nothing_is_told(world, key):
    await world.create()
    headers = {} if key is None else {b"X-API-KEY": key.encode("latin-1")}
    for method, path in [("GET", "/v2/sandboxes"), ("POST", "/v2/sandboxes"), ("GET", "/nowhere"), ("GET", "/teams")]:
        answer = await world.anonymous.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, 401)
    assert len(world.runtime.guests) == 1


async def test_a_bearer_token_is_as_good_as_the_key(world):
    headers = {"Authorization": world.api.headers["X-API-KEY"]}
    assert (await world.anonymous.get("/teams", headers=headers)).status_code == 401
    headers = {"Authorization": f"Bearer {world.api.headers['X-API-KEY']}"}
    assert (await world.anonymous.get("/teams", headers=headers)).json()[0]["isDefault"] is True


async def test_templates(world):
    assert (await world.api.get("/templates/aliases/base")).json() == {"templateID": "base", "public": False}
    assert (await world.api.get("/templates/aliases/nowhere")).status_code == 404
    assert (await world.api.get("/templates/aliases/no%20name")).status_code == 400
    assert ["base"] in [template["aliases"] for template in (await world.api.get("/templates")).json()]
