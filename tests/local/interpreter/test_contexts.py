"""Contexts over kernels that the test holds in its hand: turns, interruptions, deaths."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from managed_e2b.local.interpreter.inside import contexts as module
from managed_e2b.local.interpreter.inside.contexts import Contexts, Refused
from managed_e2b.local.interpreter.inside.kernel import Died


class FakeKernel:
    """Code is what becomes of it: `wait`, `die`, `deaf` (waits, and heeds no interruption), or text that it says."""

    def __init__(self, cwd: str) -> None:
        self.cwd = cwd
        self.variables: dict[str, str | None] = {}
        self.runs: list[str] = []
        self.running = asyncio.Event()
        self.interrupted = asyncio.Event()
        self.stopped = asyncio.Event()
        self.start_gate = asyncio.Event()
        self.start_gate.set()

    async def start(self) -> None:
        await self.start_gate.wait()

    async def run(self, code, put) -> None:
        self.runs.append(code)
        put({"type": "stdout", "text": code})
        self.running.set()
        if code == "die":
            raise Died
        ends = {"wait": (self.interrupted, self.stopped), "deaf": (self.stopped,)}.get(code, ())
        if ends:
            await asyncio.wait([asyncio.create_task(end.wait()) for end in ends], return_when=asyncio.FIRST_COMPLETED)
        if self.stopped.is_set():
            raise Died

    async def set_variables(self, values) -> None:
        self.variables.update(values)

    async def interrupt(self) -> None:
        self.interrupted.set()

    async def stop(self) -> None:
        self.stopped.set()


class Made(list[FakeKernel]):
    """The kernels that were made."""

    def __init__(self) -> None:
        self._some = asyncio.Event()

    def add(self, kernel: FakeKernel) -> FakeKernel:
        self.append(kernel)
        self._some.set()
        return kernel

    async def first_runs(self) -> FakeKernel:
        await self._some.wait()
        await self[0].running.wait()
        return self[0]


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def contexts(made: Made) -> Contexts:
    def make(cwd: str) -> FakeKernel:
        return made.add(FakeKernel(cwd))

    return Contexts({"python": make, "javascript": make})


async def run(context, code, variables=None):
    async with aclosing(context.execute(code, variables or {})) as events:
        return [event async for event in events]


async def test_a_kernel_is_made_once_when_it_is_first_needed(contexts, made):
    context = contexts.default(None)
    assert made == []
    assert contexts.default("python") is context
    assert await run(context, "a") == [{"type": "stdout", "text": "a"}]
    await run(context, "b")
    assert [kernel.runs for kernel in made] == [["a", "b"]]


async def test_names_of_languages(contexts):
    assert contexts.default(" JS ") is contexts.default("javascript")
    with pytest.raises(Refused, match="there are: javascript, python") as refused:
        contexts.default("r")
    assert refused.value.status == 400


async def test_variables_of_one_execution_are_gone_after_it(contexts, made, monkeypatch):
    monkeypatch.setenv("GIVEN", "theirs")
    monkeypatch.delenv("NEW", raising=False)
    await run(contexts.default(None), "a", {"GIVEN": "mine", "NEW": "x"})
    assert made[0].variables == {"GIVEN": "theirs", "NEW": None}


@pytest.mark.parametrize("variables", [{"": "x"}, {"a b": "x"}, {"a=": "x"}, {"a;id": "x"}, {"a": "\0"}, {"1": ""}])
async def test_what_is_no_variable_is_refused_before_anything_runs(contexts, made, variables):
    with pytest.raises(Refused, match="environment variable"):
        await run(contexts.default(None), "a", variables)
    assert made == []


async def test_executions_wait_for_each_other(contexts, made):
    context = contexts.default(None)
    first = asyncio.create_task(run(context, "wait"))
    second = asyncio.create_task(run(context, "b"))
    await made.first_runs()
    assert made[0].runs == ["wait"]
    await made[0].interrupt()
    await first
    await second
    assert made[0].runs == ["wait", "b"]


async def test_code_that_nobody_waits_for_is_interrupted_and_the_kernel_stays(contexts, made):
    context = contexts.default(None)
    waiting = asyncio.create_task(run(context, "wait", {"A": "1"}))
    await made.first_runs()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert made[0].interrupted.is_set()
    assert made[0].variables == {"A": None}
    assert not made[0].stopped.is_set()
    await run(context, "b")
    assert len(made) == 1


async def test_code_that_heeds_no_interruption_is_ended_with_its_kernel(contexts, made, monkeypatch):
    monkeypatch.setattr(module, "_INTERRUPT_SECONDS", 0.01)
    context = contexts.default(None)
    waiting = asyncio.create_task(run(context, "deaf"))
    await made.first_runs()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert made[0].stopped.is_set()
    await run(context, "b")
    assert made[1].runs == ["b"]


async def test_a_client_that_leaves_while_it_waits_its_turn_runs_nothing(contexts, made):
    context = contexts.default(None)
    first = asyncio.create_task(run(context, "wait"))
    await made.first_runs()
    second = asyncio.create_task(run(context, "never"))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not made[0].interrupted.is_set(), "what runs is somebody else's"
    await made[0].interrupt()
    await first
    assert made[0].runs == ["wait"]


async def test_a_kernel_that_dies_is_told_and_replaced(contexts, made):
    context = contexts.default(None)
    events = await run(context, "die")
    assert events[-1]["type"] == "error"
    assert events[-1]["name"] == "ContextRestarting"
    assert made[0].stopped.is_set()
    await run(context, "b")
    assert made[1].runs == ["b"]


async def test_a_restart_ends_what_runs(contexts, made):
    context = await contexts.create("python", "/tmp")
    running = asyncio.create_task(run(context, "wait"))
    await made[0].running.wait()
    await context.restart()
    assert (await running)[-1]["name"] == "ContextRestarting"
    assert made[0].stopped.is_set()
    assert [kernel.cwd for kernel in made] == ["/tmp", "/tmp"]


async def test_a_removed_context_is_gone(contexts, made):
    context = await contexts.create(None, None if module.HOME == "/" else "/")
    await contexts.remove(context.id)
    assert made[0].stopped.is_set()
    assert context not in list(contexts)
    with pytest.raises(Refused, match="not found"):
        contexts.get(context.id)
    with pytest.raises(Refused, match="not found"):
        await run(context, "a")


async def test_a_kernel_that_comes_up_after_its_context_was_removed_is_ended():
    kernel = FakeKernel("/")
    kernel.start_gate.clear()
    contexts = Contexts({"python": lambda cwd: kernel})
    context = contexts.default(None)
    starting = asyncio.create_task(context.ready())
    await asyncio.sleep(0)
    await contexts.remove(context.id)
    kernel.start_gate.set()
    with pytest.raises(Refused, match="not found"):
        await starting
    assert kernel.stopped.is_set()


async def test_the_default_context_can_be_removed_and_comes_back(contexts):
    old = contexts.default(None)
    await contexts.remove(old.id)
    assert contexts.default(None) is not old


async def test_a_context_whose_kernel_does_not_start_does_not_exist(contexts, monkeypatch):
    monkeypatch.setattr(FakeKernel, "start", failing)
    with pytest.raises(Refused, match="Failed to start a python kernel: no") as refused:
        await contexts.create(None, "/")
    assert refused.value.status == 500
    assert list(contexts) == []


async def failing(self) -> None:
    raise RuntimeError("no")


@pytest.mark.parametrize("cwd", ["/there/is/none", "/dev/null", "\0"])
async def test_a_working_directory_that_is_none_is_refused(contexts, made, cwd):
    with pytest.raises(Refused, match="no directory"):
        await contexts.create(None, cwd)
    assert made == []


async def test_a_client_far_behind_is_told_and_the_code_interrupted(contexts, made, monkeypatch):
    monkeypatch.setattr(module, "_MOST_UNSENT", 3)
    events = await run(contexts.default(None), "too much")
    assert events == [{"type": "error", "name": "OutputTooLarge", "value": events[0]["value"], "traceback": ""}]
    await made[0].interrupted.wait()
