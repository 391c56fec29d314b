"""`me2b run`: a command's output and code as they are, and nothing left, however it ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

Listed = Callable[[], list[str]]


def states(me2b: Any) -> list[str]:
    return [row["state"] for row in me2b.json("ls", "--all")["ledger"]]


def test_output_and_code_are_the_commands_own(connected: Any, listed: Listed) -> None:
    done = connected("run", "--", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert states(connected) == ["cleaned"]
    assert listed() == []


def test_several_words_are_the_words_of_one_command(connected: Any) -> None:
    done = connected("run", "--", "printf", "%s|", "two words", "$HOME", "-x", "--json")
    assert (done.returncode, done.stdout) == (0, "two words|$HOME|-x|--json|")


def test_one_word_is_a_line_for_the_shell(connected: Any) -> None:
    assert connected("run", "--", "echo a b | wc -w").stdout.strip() == "2"


def test_variables_user_and_folder_reach_the_command(connected: Any) -> None:
    done = connected(
        "run", "-e", "GREETING=hello=you", "-e", "EMPTY=", "--user", "root", "--cwd", "/tmp", "--",
        'echo "$GREETING [$EMPTY] $HOME $(pwd)"',
    )  # fmt: skip
    assert done.stdout == "hello=you [] /root /tmp\n"


def test_a_command_that_runs_too_long_is_killed_and_told(connected: Any, listed: Listed) -> None:
    done = connected("run", "--timeout", "1", "--", "echo before; sleep 1000")
    assert (done.returncode, done.stdout) == (124, "before\n")
    assert "--timeout" in done.stderr
    assert states(connected) == ["cleaned"]
    assert listed() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_output_comes_live_and_a_signal_leaves_nothing(
    connected: Any, listed: Listed, number: signal.Signals, code: int
) -> None:
    with connected.start("run", "--", "echo here; sleep 1000") as process:
        assert process.stdout.readline() == "here\n"  # while the command still runs
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert "Traceback" not in process.stderr.read()
    assert states(connected) == ["cleaned"]
    assert listed() == []


def test_json_holds_the_whole_result(connected: Any) -> None:
    done = connected("run", "--json", "--", "echo out; echo err >&2; exit 3")
    result = json.loads(done.stdout)
    assert done.returncode == 3
    assert done.stderr == ""
    assert (result["stdout"], result["stderr"], result["exit_code"], result["timed_out"]) == (
        "out\n",
        "err\n",
        3,
        False,
    )
    assert result["command"] == "echo out; echo err >&2; exit 3"
    assert result["sandbox_id"]


def test_broken_utf8_does_not_break_the_output(connected: Any) -> None:
    done = connected("run", "--", r"printf 'a\xffb\n'")
    assert done.stdout == "a\ufffdb\n"


def test_the_local_backend_needs_neither_key_nor_server(me2b: Any, listed: Listed) -> None:
    done = me2b("run", "--backend", "local", "--", "echo hello")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    assert states(me2b) == ["cleaned"]


@pytest.mark.parametrize("pair", ["NAME", "=value", "1A=x"])
def test_a_variable_that_is_none_is_refused_before_anything_is_made(connected: Any, listed: Listed, pair: str) -> None:
    connected.refused("run", "-e", pair, "--", "true")
    assert connected.json("ls", "--all")["ledger"] == []


def test_a_template_that_does_not_exist_is_told(connected: Any, listed: Listed) -> None:
    assert "nothing-like-it" in connected.refused("run", "--template", "nothing-like-it", "--", "true")
    assert states(connected) == ["create_failed"]
    assert listed() == []


def test_a_key_that_is_refused_is_told(connected: Any, listed: Listed) -> None:
    connected.variables["E2B_API_KEY"] = "e2b_" + "1" * 40
    assert "E2B_API_KEY" in connected.refused("run", "--", "true")


def test_an_endpoint_that_does_not_answer_is_told(me2b: Any) -> None:
    me2b.variables["E2B_API_KEY"] = "e2b_" + "0" * 40
    assert "127.0.0.1:9" in me2b.refused("run", "--api-url", "http://127.0.0.1:9", "--", "true")
