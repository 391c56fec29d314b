"""A process that dies, or is interrupted, at every boundary of its path leaves nothing that nobody repairs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from managed_e2b import SandboxHandle, SandboxLifecycle, State
from managed_e2b.rules import states
from managed_e2b.testing import TestServer, local_server
from managed_e2b.testing.crash import Scenario, boundaries, crash, interrupt

from .conftest import until

SAMPLE = 4
"""Without --exhaustive every fourth boundary is visited, each kind of test beginning at another one."""

FACES = pytest.mark.parametrize("face", ["sync", "async"])
Face = Literal["sync", "async"]
Visit = Callable[[int, int], list[int]]


@pytest.fixture(scope="module")
def server() -> Iterator[TestServer]:
    with local_server() as server:
        yield server


class Bystander:
    """Another owner on the same ledger and key, with a sandbox in use: nobody's repair may touch it."""

    def __init__(self, server: TestServer, db: Path) -> None:
        self.lifecycle = SandboxLifecycle(
            db, e2b_api_url=server.url, e2b_key=server.api_key, opening_reap=False, watchdog=False, label="bystander"
        )
        self._context = self.lifecycle.acquire(timeout=600)
        self.handle: SandboxHandle = self._context.__enter__()

    def others(self) -> list[str]:
        """What the server runs beside it: the list of a server that tells the truth."""
        ids = [item.sandbox_id for item in self.lifecycle.list_remote()]
        assert self.handle.sandbox_id in ids, "the bystander's sandbox was touched"
        return [sandbox_id for sandbox_id in ids if sandbox_id != self.handle.sandbox_id]

    def close(self) -> None:
        assert self.handle.run("echo untouched").stdout == "untouched\n"
        self._context.__exit__(None, None, None)
        self.lifecycle.shutdown()


@pytest.fixture
def bystander(server: TestServer, tmp_path: Path) -> Iterator[Bystander]:
    bystander = Bystander(server, tmp_path / "sandboxes.db")
    yield bystander
    bystander.close()


def scenario_of(
    face: Face, server: TestServer, tmp_path: Path, *, watchdog: bool = False, lease: int = 300
) -> Scenario:
    db = str(tmp_path / "sandboxes.db")
    return Scenario(face, db, server.url, server.api_key, watchdog=watchdog, lease=lease)


@pytest.fixture
def visit(request: pytest.FixtureRequest) -> Visit:
    """The boundaries to visit, of so many: all of them with --exhaustive, else a sample that begins at `first`."""
    step = 1 if request.config.getoption("--exhaustive") else SAMPLE
    return lambda count, first: list(range(first % step, count, step))


def tell(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f" [{text}]")


@FACES
@pytest.mark.timeout(300)
def test_killed_at_every_boundary_the_next_process_repairs_it(
    face: Face,
    server: TestServer,
    bystander: Bystander,
    tmp_path: Path,
    visit: Visit,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = scenario_of(face, server, tmp_path)
    names = boundaries(scenario)
    numbers = visit(len(names), 0 if face == "sync" else 2)
    for number in numbers:
        name = names[number]
        ended = crash(scenario, number)
        assert (ended.exit_code, ended.boundaries[-1]) == (-9, name)
        with SandboxLifecycle(
            scenario.db_path, e2b_api_url=server.url, e2b_key=server.api_key, watchdog=False
        ) as after:
            until(lambda: not bystander.others(), f"nothing runs after a crash {name}")
            until(
                lambda: (
                    not [
                        row
                        for row in after.records()
                        if row.state not in states.TERMINAL
                        and row.sandbox_id not in (None, bystander.handle.sandbox_id)
                    ]
                ),
                f"no row with a sandbox is open after a crash {name}",
            )
    tell(capsys, f"{face}: {len(names)} boundaries, {len(numbers)} crashes")


@FACES
@pytest.mark.timeout(300)
def test_killed_at_every_boundary_the_watchdog_repairs_it(
    face: Face,
    server: TestServer,
    bystander: Bystander,
    tmp_path: Path,
    visit: Visit,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = scenario_of(face, server, tmp_path, watchdog=True)
    names = boundaries(scenario)
    longest = 0.0
    numbers = visit(len(names), 1 if face == "sync" else 3)
    for number in numbers:
        assert crash(scenario, number).exit_code == -9
        died = time.monotonic()
        until(lambda: not bystander.others(), f"nothing runs after a crash {names[number]}")
        longest = max(longest, time.monotonic() - died)
    tell(capsys, f"{face}: {len(names)} boundaries, {len(numbers)} crashes, longest until empty {longest:.2f} s")


@pytest.mark.timeout(300)
def test_killed_at_every_boundary_with_nobody_left_the_backend_ends_it_within_a_lease(
    server: TestServer, bystander: Bystander, tmp_path: Path, visit: Visit, capsys: pytest.CaptureFixture[str]
) -> None:
    total = 0
    for face in ("sync", "async"):
        elsewhere = tmp_path / face
        elsewhere.mkdir()
        scenario = scenario_of(face, server, elsewhere, lease=10)
        for number in visit(len(boundaries(scenario)), total):
            assert crash(scenario, number).exit_code == -9
            total += 1
    until(lambda: not bystander.others(), "the backend has ended all of them", seconds=40)
    tell(capsys, f"{total} crashes, lease 10 s")


@FACES
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.timeout(300)
def test_ctrl_c_at_every_boundary_leaves_nothing(
    face: Face,
    times: int,
    server: TestServer,
    bystander: Bystander,
    tmp_path: Path,
    visit: Visit,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario = scenario_of(face, server, tmp_path)
    names = boundaries(scenario)
    numbers = visit(len(names), times if face == "sync" else times + 1)
    for number in numbers:
        interrupt(scenario, number, times)
        assert bystander.others() == [], f"left by {times} Ctrl-C {names[number]}"
    rows = [row for row in bystander.lifecycle.records() if row.sandbox_id != bystander.handle.sandbox_id]
    assert [row for row in rows if row.state not in states.TERMINAL and row.sandbox_id is not None] == []
    assert any(row.state is State.CLEANED for row in rows)
    tell(capsys, f"{face} x{times}: {len(names)} boundaries, {len(numbers)} interrupted")
