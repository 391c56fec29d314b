"""`me2b serve` and `me2b env`: a server that other programs find."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from managed_e2b.local.background import LocalServerProcess


@pytest.fixture
def served(me2b: Any, server: LocalServerProcess) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`me2b serve` that listens, and its URL. (`server` skips the test on a host that cannot run it.)"""
    with me2b.start("serve", "--port", "0", "--data-dir", str(me2b.folder / "data"), "--json") as process:
        try:
            ready = json.loads(process.stdout.readline())
            assert ready["pid"] == process.pid
            yield process, ready["url"]
        finally:
            process.kill()


def status(url: str, key: str | None) -> int:
    request = urllib.request.Request(f"{url}/v2/sandboxes", headers={"X-API-KEY": key} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_env_leads_to_the_server_that_runs(me2b: Any, served: tuple[subprocess.Popen[str], str]) -> None:
    _process, url = served
    variables = me2b.json("env")
    assert variables["E2B_API_URL"] == variables["E2B_SANDBOX_URL"] == url
    assert status(url, variables["E2B_API_KEY"]) == 200
    assert status(url, None) == 401


def test_env_is_for_a_shell_and_adds_to_what_the_shell_exempts_from_its_proxy(
    me2b: Any, served: tuple[subprocess.Popen[str], str]
) -> None:
    script = tmp_script(me2b)
    done = subprocess.run(
        ["sh", "-c", f'eval "$(cat {script})"; echo "$E2B_API_URL $NO_PROXY"'],
        env={"PATH": os.defpath, "NO_PROXY": "intranet"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [served[1], "127.0.0.1,localhost,intranet"]


def tmp_script(me2b: Any) -> Path:
    script: Path = me2b.folder / "env.sh"
    script.write_text(me2b("env").stdout)
    return script


def test_the_key_is_readable_for_its_user_alone(me2b: Any, served: tuple[subprocess.Popen[str], str]) -> None:
    (state,) = (me2b.folder / "state").rglob("*.json")
    assert state.stat().st_mode & 0o077 == 0
    key = json.loads(state.read_text())["api_key"]
    assert key not in Path(f"/proc/{served[0].pid}/cmdline").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_in_order(
    me2b: Any, served: tuple[subprocess.Popen[str], str], number: signal.Signals
) -> None:
    process, _url = served
    process.send_signal(number)
    assert process.wait(timeout=30) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert "me2b serve" in me2b.refused("env")


def test_a_server_that_was_killed_is_not_offered(me2b: Any, served: tuple[subprocess.Popen[str], str]) -> None:
    served[0].kill()
    served[0].wait(timeout=30)
    assert "me2b serve" in me2b.refused("env")


def test_without_a_server_env_says_how_to_start_one(me2b: Any) -> None:
    assert "me2b serve" in me2b.refused("env")


def test_a_port_that_is_taken_is_told_in_one_line(me2b: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in me2b.refused("serve", "--port", port)
