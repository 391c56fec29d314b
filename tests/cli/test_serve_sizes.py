"""`me2b serve --sandbox-...`: what sandboxes get."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import pytest

from managed_e2b.local.background import LocalServerProcess


def post(url: str, key: str, body: dict[str, Any]) -> Any:
    headers = {"X-API-KEY": key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v2/sandboxes", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def get(url: str, key: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"X-API-KEY": key}), timeout=30) as response:
        return json.load(response)


def test_answers_show_what_the_server_gives(me2b: Any, server: LocalServerProcess) -> None:
    """`server` skips the test on a host that cannot run it."""
    options = ("--sandbox-cpus", "0.5", "--sandbox-memory", "200", "--sandbox-pids", "100", "--sandbox-disk", "50")
    with me2b.start("serve", "--port", "0", "--data-dir", str(me2b.folder / "data"), "--json", *options) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            key = me2b.json("env")["E2B_API_KEY"]
            made = post(url, key, {"templateID": "base"})
            info = get(f"{url}/sandboxes/{made['sandboxID']}", key)
            (listed,) = get(f"{url}/v2/sandboxes", key)
            (template,) = (item for item in get(f"{url}/templates", key) if item["templateID"] == "base")
        finally:
            process.terminate()
    cpus, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    assert info["memoryMB"] in (200, memory), "the limit, or what the host has when it enforces none"
    assert info["cpuCount"] in (1, cpus)
    for other in (listed, template):
        assert [other[name] for name in SIZE] == [info[name] for name in SIZE]


SIZE = ("cpuCount", "memoryMB", "diskSizeMB")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--sandbox-memory", "1", "at least 16 MB of memory"),
        ("--sandbox-cpus", "0", "at least 0.01 of a CPU"),
        ("--sandbox-cpus", "nan", "at least 0.01 of a CPU"),
        ("--sandbox-pids", "-5", "at least 16 processes"),
        ("--sandbox-disk", "0", "at least 1 MB of disk"),
    ],
)
def test_what_is_too_little_is_refused(me2b: Any, option: str, value: str, said: str) -> None:
    refused = me2b("serve", "--port", "0", option, value)
    assert refused.returncode == 2
    assert said in refused.stderr
