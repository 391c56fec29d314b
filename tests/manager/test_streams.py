"""A command's stream that ends before the command: the true result all the same, or an error that says so."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from managed_e2b import (
    BackendError,
    CommandLostError,
    RateLimitedError,
    SandboxGoneError,
    SandboxUnreachableError,
)
from managed_e2b.drivers import streams
from managed_e2b.testing import Chaos, TestServer

from .conftest import Face, settle, until
from .proxy import Proxy

CUTS = ["reset", "close", "end", "truncated", "unavailable"]
ONCE = "echo run >> /tmp/runs; "
"""The beginning of a command that counts how often it was run."""


@pytest.fixture(params=["sync", "async"])
async def face(request: pytest.FixtureRequest, me2b_server: TestServer, tmp_path: Path) -> AsyncIterator[Face]:
    face = Face(request.param, me2b_server, tmp_path / "sandboxes.db")
    yield face
    await face.close()


@pytest.fixture
async def handle(face: Face, me2b_chaos: Chaos) -> AsyncIterator[Any]:
    async with face.entered(face.open().acquire()) as handle:
        yield handle


@pytest.fixture
def proxy(me2b_server: TestServer) -> Iterator[Proxy]:
    with Proxy(me2b_server.url) as proxy:
        yield proxy


def beside(handle: Any) -> Any:
    """A sync object of the SDK for the same sandbox, to do something there while the test's own call waits."""
    return handle._engine.driver.sdk.blocking(handle.sandbox)


def later(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


async def runs(handle: Any) -> int:
    return (await settle(handle.run("cat /tmp/runs 2>/dev/null"))).stdout.count("run")


def processes(handle: Any, pattern: str) -> str:
    found = beside(handle).commands.run(f"pgrep -af '{pattern}' | grep -v pgrep || true", user="root")
    return str(found.stdout)


@pytest.mark.parametrize("how", CUTS)
async def test_a_stream_cut_after_the_exit_gives_the_true_result(handle: Any, me2b_chaos: Chaos, how: Any) -> None:
    rule = me2b_chaos.on("process.start").first().cut(how)
    result = await settle(handle.run(ONCE + "echo out; echo err >&2; exit 3"))
    assert me2b_chaos.hits(rule) == 1
    assert (result.stdout, result.stderr, result.exit_code, result.timed_out) == ("out\n", "err\n", 3, False)
    assert result.output_lost
    assert await runs(handle) == 1


@pytest.mark.parametrize("how", CUTS)
async def test_a_stream_cut_while_the_command_runs_is_taken_up_again(handle: Any, me2b_chaos: Chaos, how: Any) -> None:
    me2b_chaos.on("process.start").first().cut(how, after_events=2)
    me2b_chaos.on("process.connect").first(2).cut(how, after_events=1)

    def let_it_go_on() -> None:
        me2b_chaos.wait_for("process.connect", count=3)
        beside(handle).files.write("/tmp/go", "")

    helper = later(let_it_go_on)
    told: list[str] = []
    wait = "until [ -e /tmp/go ]; do sleep 0.05; done; "
    result = await settle(handle.run(f"{ONCE}echo first; {wait}echo last; exit 5", on_stdout=told.append))
    helper.join(20)
    assert (result.stdout, result.exit_code, result.output_lost) == ("first\nlast\n", 5, True)
    assert "".join(told) == result.stdout
    assert await runs(handle) == 1


async def test_a_stream_that_is_not_cut_has_lost_nothing(handle: Any) -> None:
    assert not (await settle(handle.run("echo x"))).output_lost


async def test_the_timeout_holds_through_a_cut(handle: Any, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("process.start").first().cut("reset", after_events=2)
    result = await settle(handle.run("echo first; sleep 3001 & sleep 3001", timeout=2))
    assert (result.stdout, result.exit_code, result.timed_out) == ("first\n", -1, True)
    assert processes(handle, "sleep 3001") == ""


async def test_an_exit_that_nobody_keeps_any_more_is_no_exit_code(handle: Any, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("process.start").first().cut("reset")
    me2b_chaos.on("process.connect").status(404, message="process with pid 7 not found")
    with pytest.raises(CommandLostError, match="how it ended is not known") as caught:
        await settle(handle.run(ONCE + "echo out; echo err >&2"))
    assert (caught.value.stdout_bytes, caught.value.stderr_bytes) == (b"out\n", b"err\n")
    assert caught.value.pid is not None
    assert await runs(handle) == 1


async def test_a_start_whose_answer_was_lost_is_found_by_its_mark(handle: Any, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("process.start").first().after().drop()

    def let_it_go_on() -> None:
        me2b_chaos.wait_for("process.connect")
        beside(handle).files.write("/tmp/go", "")

    helper = later(let_it_go_on)
    result = await settle(handle.run(ONCE + "until [ -e /tmp/go ]; do sleep 0.05; done; echo last; exit 5"))
    helper.join(20)
    assert (result.stdout, result.exit_code, result.output_lost) == ("last\n", 5, True)
    assert await runs(handle) == 1


async def test_a_start_that_did_not_arrive_is_not_run_again(handle: Any, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("process.start").first().before().drop()
    with pytest.raises(CommandLostError, match="not run again") as caught:
        await settle(handle.run(ONCE))
    assert caught.value.pid is None
    assert await runs(handle) == 0


async def test_a_refused_start_is_the_refusal(handle: Any, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("process.start").first().status(429)
    with pytest.raises(RateLimitedError):
        await settle(handle.run("true"))
    with pytest.raises(BackendError, match="does not exist"):
        await settle(handle.run("true", cwd="/nowhere"))


async def test_an_agent_that_never_answers_ends_its_call_only(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as handle, face.entered(lifecycle.acquire()) as other:
        handle.sandbox.connection_config.request_timeout = 1.0
        me2b_chaos.on("process.start", "files.write", "files.read").where(sandbox_id=handle.sandbox_id).hang()
        for call in (
            lambda: handle.run("true", timeout=None),
            lambda: handle.stage_in({"x": "y"}),
            lambda: handle.stage_out(["x"]),
        ):
            with pytest.raises(SandboxUnreachableError) as caught:
                await settle(call())
            assert caught.value.running is True
            assert (await settle(other.run("echo fine"))).stdout == "fine\n"
        me2b_chaos.calm()
        assert (await settle(handle.run("echo again"))).stdout == "again\n"


async def test_a_create_that_is_never_answered_ends_at_its_deadline(face: Face, me2b_chaos: Chaos) -> None:
    lifecycle = face.open()
    async with face.entered(lifecycle.acquire()) as other:
        lifecycle._engine.driver.sdk._once["request_timeout"] = 1.0
        hang = me2b_chaos.on("create").first().after().hang()
        async with face.entered(lifecycle.acquire()) as handle:  # what it made is found, and used
            assert me2b_chaos.hits(hang) == 1
            assert (await settle(handle.run("echo fine"))).stdout == "fine\n"
            assert (await settle(other.run("echo fine"))).stdout == "fine\n"
    assert me2b_chaos.journal().count("create") == 2


async def test_a_stream_gone_silent_is_taken_up_again(
    face: Face, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SILENCE", 1.0)
    lifecycle = face.open(e2b_api_url=proxy.url)
    async with face.entered(lifecycle.acquire()) as handle:
        started = threading.Event()

        def freeze() -> None:
            started.wait(20)
            assert proxy.freeze()

        helper = later(freeze)
        line = "echo first; sleep 2; exit 5"
        result = await settle(handle.run(line, on_stdout=lambda _: started.set()))
        helper.join(20)
        assert (result.stdout, result.exit_code, result.output_lost) == ("first\n", 5, True)


async def test_a_command_of_a_sandbox_that_died_is_not_lost_but_its_sandbox_is(handle: Any, me2b_chaos: Chaos) -> None:
    started = threading.Event()

    def kill() -> None:
        started.wait(20)
        beside(handle).kill()

    helper = later(kill)
    with pytest.raises(SandboxGoneError):
        await settle(handle.run("echo first; sleep 3002", on_stdout=lambda _: started.set()))
    helper.join(20)


# -- given up -----------------------------------------------------------------------------------------------

FAMILY = "sleep 4001 & (setsid sleep 4001 &) ; echo started; sleep 4001"


@pytest.mark.parametrize("face", ["async"], indirect=True)
@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_cancelled_command_is_killed_with_its_children(handle: Any, times: int) -> None:
    started = asyncio.Event()
    task = asyncio.create_task(handle.run(FAMILY, on_stdout=lambda _: started.set()))
    await started.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: processes(handle, "sleep 4001") == "", "nothing of it runs")
    assert (await handle.run("echo still here")).stdout == "still here\n"


@pytest.mark.parametrize("face", ["async"], indirect=True)
async def test_a_command_past_the_callers_own_timeout_is_killed(handle: Any) -> None:
    started = asyncio.Event()
    limit = asyncio.timeout(None)

    async def caller() -> None:
        async with limit:
            await handle.run(FAMILY, on_stdout=lambda _: started.set())

    task = asyncio.create_task(caller())
    await started.wait()
    limit.reschedule(0)
    with pytest.raises(TimeoutError):
        await task
    await asyncio.to_thread(until, lambda: processes(handle, "sleep 4001") == "", "nothing of it runs")


@pytest.mark.parametrize("face", ["async"], indirect=True)
async def test_a_command_cancelled_while_it_starts_is_killed(handle: Any, me2b_chaos: Chaos) -> None:
    me2b_chaos.on("process.start").first().before().delay(0.4)
    task = asyncio.create_task(handle.run(FAMILY))
    await asyncio.to_thread(me2b_chaos.wait_for, "process.start")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(handle._engine.driver.join, 30)
    assert processes(handle, "sleep 4001") == ""


@pytest.mark.parametrize("face", ["async"], indirect=True)
async def test_a_caller_who_cancels_is_free_though_the_agent_hangs(handle: Any, me2b_chaos: Chaos) -> None:
    started = asyncio.Event()
    task = asyncio.create_task(handle.run("echo started; sleep 4002", on_stdout=lambda _: started.set()))
    await started.wait()
    hang = me2b_chaos.on("process.start").hang()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: me2b_chaos.hits(hang), "its killer hangs, and nobody waits for that")
    me2b_chaos.remove(hang)
    me2b_chaos.release()
    await asyncio.to_thread(until, lambda: processes(handle, "sleep 4002") == "", "nothing of it runs")


@pytest.mark.parametrize("face", ["sync"], indirect=True)
async def test_ctrl_c_is_heard_while_a_command_is_silent(handle: Any) -> None:
    started = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

    def interrupt() -> None:
        started.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    helper = later(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            handle.run(FAMILY, on_stdout=lambda _: started.set())
    finally:
        helper.join(20)
        signal.signal(signal.SIGINT, before)
    until(lambda: processes(handle, "sleep 4001") == "", "nothing of it runs")
    assert handle.run("echo still here").stdout == "still here\n"


# -- TLS ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 and its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this host to make a certificate with")
    file = tmp_path_factory.mktemp("tls") / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    command += ["-keyout", "-", "-out", "-"]
    made = subprocess.run(command, capture_output=True, check=True, timeout=60)
    file.write_bytes(made.stdout)
    return file


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("how", ["close", "drop", "reset"])
def test_the_end_of_a_tls_connection_is_not_the_end_of_a_command(
    kind: str, how: Any, me2b_server: TestServer, certificate: Path, tmp_path: Path, program: Callable[[str], list[str]]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    source = """
    import asyncio, sys
    from managed_e2b import AsyncSandboxLifecycle, SandboxLifecycle
    kind, db = sys.argv[1:]
    LINE = "echo first; sleep 2; exit 5"
    def tell(text):
        print(text, end="", flush=True)
    def sync():
        with SandboxLifecycle(db) as lifecycle, lifecycle.acquire() as handle:
            return handle.run(LINE, on_stdout=tell)
    async def aio():
        async with AsyncSandboxLifecycle(db) as lifecycle, lifecycle.acquire() as handle:
            return await handle.run(LINE, on_stdout=tell)
    result = sync() if kind == "sync" else asyncio.run(aio())
    print(result.exit_code, result.output_lost, result.stdout == "first\\n")
    """
    with Proxy(me2b_server.url, context) as proxy:
        where = {"E2B_API_URL": proxy.url, "E2B_SANDBOX_URL": proxy.url, "E2B_API_KEY": me2b_server.api_key}
        with subprocess.Popen(
            [*program(textwrap.dedent(source)), kind, str(tmp_path / "x.db")],
            env={**os.environ, **where, "SSL_CERT_FILE": str(certificate)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stdout is not None
            assert running.stdout.readline() == "first\n", running.stderr and running.stderr.read()
            assert proxy.cut(how)
            out, err = running.communicate(timeout=60)
    assert out == "5 True True\n", err
