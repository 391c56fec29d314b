"""The interpreter in real sandboxes, through E2B's own client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox

from managed_e2b.local.background import LocalServerProcess
from managed_e2b.local.interpreter import packages
from managed_e2b.local.runtime.base import ImageUnavailable

Make = Callable[..., Sandbox]


@pytest.fixture(scope="module")
def options(server: LocalServerProcess) -> dict[str, Any]:
    try:
        packages.distributions()
    except ImageUnavailable as error:
        pytest.skip(str(error))
    return {"api_key": server.api_key, "api_url": server.url, "sandbox_url": server.url}


@pytest.fixture(scope="module")
def make(options: dict[str, Any]) -> Iterator[Make]:
    made: list[Sandbox] = []

    def make(**more: Any) -> Sandbox:
        made.append(Sandbox.create(**more, **options))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.kill()


@pytest.fixture(scope="module")
def box(make: Make) -> Sandbox:
    """One for all tests that leave it usable, as the state of its default context is theirs to care for."""
    return make(envs={"GIVEN": "theirs"})


def test_a_value_and_what_is_written(box: Sandbox) -> None:
    told: dict[str, list[Any]] = {name: [] for name in ("out", "err", "results")}
    run = box.run_code(
        "import sys\nprint('o')\nprint('e', file=sys.stderr)\n{'a': [1]}",
        on_stdout=lambda line: told["out"].append(line.line),
        on_stderr=lambda line: told["err"].append(line.line),
        on_result=told["results"].append,
    )
    assert (run.text, run.logs.stdout, run.logs.stderr) == ("{'a': [1]}", ["o\n"], ["e\n"])
    assert (told["out"], told["err"], len(told["results"])) == (["o\n"], ["e\n"], 1)
    assert run.results[0].json == {"a": [1]}
    assert box.run_code("'text'").text == "text"


def test_an_error_comes_with_its_traceback(box: Sandbox) -> None:
    error = box.run_code("def f():\n    1/0\nf()").error
    assert error is not None
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "1/0" in error.traceback
    assert "\x1b" not in error.traceback


def test_state_and_count(box: Sandbox) -> None:
    first = box.run_code("n = 1")
    second = box.run_code("n += 1; n")
    assert second.text == "2"
    assert second.execution_count == (first.execution_count or 0) + 1


def test_shell_lines_and_indented_code(box: Sandbox) -> None:
    assert "".join(box.run_code("!pwd").logs.stdout).strip() == "/home/user"
    assert box.run_code("\n    n = 5\n    n\n").text == "5"


def test_variables_of_the_sandbox_and_of_one_execution(box: Sandbox) -> None:
    look = "import os; [os.environ.get(n) for n in ('GIVEN', 'NEW', 'E2B_SANDBOX')]"
    nasty = "a'\"\\\n$(id)"
    assert box.run_code(look, envs={"GIVEN": "mine", "NEW": nasty}).results[0].json == ["mine", nasty, "true"]
    assert box.run_code(look).results[0].json == ["theirs", None, "true"]


def test_contexts_are_apart(box: Sandbox) -> None:
    context = box.create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert context.id in [each.id for each in box.list_code_contexts()]
    assert box.run_code("import os; x = 1; os.getcwd()", context=context).text == "/tmp"
    error = box.run_code("x").error
    assert error is not None
    assert error.name == "NameError"
    box.restart_code_context(context)
    again = box.run_code("x", context=context).error
    assert again is not None
    assert again.name == "NameError"
    box.remove_code_context(context)
    with pytest.raises(NotFoundException):
        box.run_code("1", context=context)


def test_what_there_is_not(box: Sandbox) -> None:
    with pytest.raises(SandboxException, match="There is no kernel for 'cobol'"):
        box.run_code("1", language="cobol")
    with pytest.raises(SandboxException, match="no directory '/nowhere'"):
        box.create_code_context(cwd="/nowhere")


def test_rich_results(box: Sandbox) -> None:
    shown = box.run_code(
        "from IPython.display import *\n"
        "display(HTML('<b>'), Markdown('*'), Latex('$x$'), JSON({'a': 1}), Javascript('1'))\n"
        "display({'application/x-own': 'o'}, raw=True)"
    )
    formats = [list(result.formats()) for result in shown.results]
    assert formats[:5] == [["text", name] for name in ("html", "markdown", "latex", "json", "javascript")]
    assert shown.results[5].extra == {"application/x-own": "o"}


def test_a_table(box: Sandbox) -> None:
    pytest.importorskip("pandas", reason="the extra code-interpreter is not installed")
    run = box.run_code(
        "import pandas as pd\n"
        "pd.DataFrame({'n': [1.5, float('nan')], 't': [pd.Timestamp('2026-01-02'), pd.NaT], 'o': [{1: (2,)}, b'x']})"
    )
    assert run.error is None
    assert run.results[0].data == {"n": [1.5, None], "t": ["2026-01-02T00:00:00", None], "o": [{"1": [2]}, "b'x'"]}
    assert "<table" in (run.results[0].html or "")


def test_a_plot_is_a_picture_and_a_chart(box: Sandbox) -> None:
    pytest.importorskip("e2b_charts", reason="the extra code-interpreter is not installed")
    run = box.run_code("import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2]); plt.title('T'); plt.show()")
    result = run.results[0]
    assert result.png is not None
    assert result.chart is not None
    assert (result.chart.title, [bar.value for bar in result.chart.elements]) == ("T", [1, 2])


def test_a_saved_picture_is_shown(box: Sandbox) -> None:
    pytest.importorskip("PIL", reason="the extra code-interpreter is not installed")
    run = box.run_code("from PIL import Image\ni = Image.new('RGB', (2, 2)); i.save('/tmp/i.png'); i.show()")
    assert run.error is None
    assert [result.png is not None for result in run.results] == [True, True]


def test_a_client_that_gives_up_interrupts_and_the_state_stays(box: Sandbox) -> None:
    box.run_code("kept = 7")
    with pytest.raises(TimeoutException):
        box.run_code("import time; time.sleep(300)", timeout=1)
    assert box.run_code("kept", timeout=30).text == "7"


def test_a_kernel_that_is_killed_is_told_and_replaced(box: Sandbox) -> None:
    error = box.run_code("import os; os.kill(os.getpid(), 9)").error
    assert error is not None
    assert error.name == "ContextRestarting"
    assert box.run_code("1 + 1").text == "2"


def test_bash(box: Sandbox) -> None:
    pytest.importorskip("bash_kernel", reason="the extra code-interpreter is not installed")
    run = box.run_code("echo $NEW; pwd", language="bash", envs={"NEW": "a'b"})
    assert "".join(run.logs.stdout) == "a'b\n/home/user\n"


def test_javascript(box: Sandbox) -> None:
    if box.commands.run("command -v node || true").stdout == "":
        pytest.skip("this host has no node")
    assert "javascript" in [context.language for context in box.list_code_contexts()]
    run = box.run_code(
        "import { sep } from 'path'\nconsole.log(sep, process.env.NEW)", language="js", envs={"NEW": "x"}
    )
    assert run.logs.stdout == ["/ x\n"]
    assert box.run_code("await Promise.resolve(1 + 1)", language="js").text == "2"
    error = box.run_code("throw new TypeError('no')", language="js").error
    assert error is not None
    assert (error.name, error.value) == ("TypeError", "no")
    box.run_code("let kept = 3", language="js")
    with pytest.raises(TimeoutException):
        box.run_code("await new Promise(() => {})", language="js", timeout=1)
    assert box.run_code("kept", language="js", timeout=30).text == "3"


def test_its_python_is_what_commands_find(box: Sandbox) -> None:
    place = box.commands.run("python3 -c 'import sys, IPython; print(sys.prefix)'").stdout.strip()
    assert box.run_code("import sys; sys.prefix").text == place


def test_nothing_of_the_host_is_told(box: Sandbox) -> None:
    host = str(Path(packages.__file__).resolve().parents[3])
    found = box.commands.run(f"grep -rlF {host} /opt/me2b || true", timeout=120).stdout
    assert found == ""


def test_the_service_comes_back_when_it_is_killed(make: Make) -> None:
    box = make()
    assert box.run_code("1").text == "1"
    kill = "pid=$(pgrep -f '[m]e2b_code_interpreter$') && kill -9 $pid && while kill -0 $pid; do sleep 0.01; done"
    box.commands.run(kill, user="root")
    assert box.run_code("1 + 1").text == "2"


def test_a_pause_keeps_the_state(make: Make) -> None:
    box = make()
    box.run_code("x = 41")
    box.pause()
    box.connect()
    assert box.run_code("x + 1").text == "42"


def test_what_boots_anew_has_the_service_and_no_state(make: Make) -> None:
    box = make()
    box.run_code("x = 1; open('/home/user/kept', 'w').write('files')")
    (copy,) = box.fork(timeout=60)
    assert isinstance(copy, Sandbox)
    box.pause(mode="filesystem")
    box.connect()
    for each in (copy, box):
        assert each.run_code("open('/home/user/kept').read()").text == "files"
        error = each.run_code("x").error
        assert error is not None
        assert error.name == "NameError"
    copy.kill()


def test_a_sandbox_killed_under_it(make: Make) -> None:
    box = make()
    started = threading.Event()

    def kill() -> None:
        started.wait()
        box.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(TimeoutException, match="sandbox was killed while the request was in progress"):
        box.run_code("print(1)\nimport time; time.sleep(300)", on_stdout=lambda _: started.set())
    killer.join()


def test_ports_that_are_not_public(make: Make) -> None:
    box = make(network={"allow_public_traffic": False})
    assert box.run_code("1").text == "1"
    assert box.create_code_context().cwd == "/home/user"


async def test_the_async_client(options: dict[str, Any]) -> None:
    box = await AsyncSandbox.create(**options)
    try:
        lines: list[str] = []
        run = await box.run_code("print(1)\n2", on_stdout=lambda line: lines.append(line.line))
        assert (run.text, lines) == ("2", ["1\n"])
    finally:
        await box.kill()
