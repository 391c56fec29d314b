from __future__ import annotations

import dataclasses

import pytest

from managed_e2b.models import Host, Owner
from managed_e2b.rules.leases import SECOND
from managed_e2b.rules.liveness import is_alive, sees_its_process

HERE = Host("machine", "boot", "pid:[1]")
OWNER = Owner("o", HERE, pid=42, pid_started=1000, label="x", heartbeat=0, stale_after=600 * SECOND)
DAY = 24 * 3600 * SECOND


@pytest.mark.parametrize(
    ("started", "alive"), [(1000, True), (None, False), (2000, False)], ids=["runs", "is gone", "pid was recycled"]
)
def test_on_the_same_host_the_process_decides_whatever_the_clock_says(started: int | None, alive: bool) -> None:
    assert sees_its_process(OWNER, HERE)
    for now in (-3 * DAY, 0, 3 * DAY):
        assert is_alive(OWNER, HERE, started, now) is alive


def test_from_another_host_the_heartbeat_decides() -> None:
    there = Host("another", "boot2", "pid:[1]")
    assert not sees_its_process(OWNER, there)
    assert is_alive(OWNER, there, None, 600 * SECOND)
    assert not is_alive(OWNER, there, None, 600 * SECOND + 1)


def test_another_container_of_the_machine_is_another_host() -> None:
    assert is_alive(OWNER, dataclasses.replace(HERE, pid_namespace="pid:[2]"), None, 0)


def test_a_machine_with_the_same_id_may_be_a_clone_so_the_heartbeat_decides() -> None:
    clone = dataclasses.replace(HERE, boot_id="boot2")
    assert is_alive(OWNER, clone, None, 600 * SECOND)
    assert not is_alive(OWNER, clone, None, 600 * SECOND + 1)


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_on_a_system_without_proc_the_heartbeat_decides(field: str) -> None:
    host = dataclasses.replace(HERE, **{field: "unknown"})
    owner = dataclasses.replace(OWNER, host=host, pid_started=0)
    assert is_alive(owner, host, None, 600 * SECOND)
    assert is_alive(dataclasses.replace(OWNER, pid_started=0), HERE, None, 600 * SECOND)


def test_an_owner_that_said_goodbye_is_dead_though_its_process_runs() -> None:
    assert not is_alive(dataclasses.replace(OWNER, closed_at=1), HERE, 1000, 0)
