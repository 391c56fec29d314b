"""Where control groups can be had, and what is written into them: decided from texts and values."""

from __future__ import annotations

import pytest

from managed_e2b.local.runtime import cgroup_claim
from managed_e2b.local.runtime.cgroups import Tree, settings
from managed_e2b.local.runtime.confine import Confinement
from managed_e2b.local.runtime.limits import NO_LIMITS, Enforced, Limits
from managed_e2b.local.sizes import MB, Sizes, shown

V1 = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
36 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
"""
V1_OWN = """\
12:devices:/user.slice
4:memory:/user.slice/some
3:cpu,cpuacct:/
1:name=systemd:/user.slice
0::/user.slice/session-1.scope
"""
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"


def test_version_1_beside_version_2() -> None:
    found = cgroup_claim.mounts(V1, V1_OWN)
    assert [(mount.own, mount.version, sorted(mount.controllers)) for mount in found] == [
        ("/sys/fs/cgroup/cpu,cpuacct", 1, ["cpu", "cpuacct"]),
        ("/sys/fs/cgroup/memory/user.slice/some", 1, ["memory"]),
        ("/sys/fs/cgroup/unified/user.slice/session-1.scope", 2, []),
    ]


def test_version_2_alone() -> None:
    (mount,) = cgroup_claim.mounts(V2, "0::/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope\n")
    assert mount.top == "/sys/fs/cgroup"
    assert mount.own == "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope"
    assert list(cgroup_claim._upwards(mount))[-2:] == ["/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"]
    (root,) = cgroup_claim.mounts(V2, "0::/\n")
    assert list(cgroup_claim._upwards(root)) == ["/sys/fs/cgroup"]


@pytest.mark.parametrize(
    ("line", "own", "wanted"),
    [
        # a container without a cgroup namespace sees its own part of the hierarchy only
        ("30 23 0:26 /docker/1 /sys/fs/cgroup ro - cgroup2 cgroup rw", "0::/docker/1\n", "/sys/fs/cgroup"),
        ("30 23 0:26 /docker/1 /sys/fs/cgroup ro - cgroup2 cgroup rw", "0::/docker/1/in\n", "/sys/fs/cgroup/in"),
        # and somebody else's
        ("30 23 0:26 /docker/1 /sys/fs/cgroup ro - cgroup2 cgroup rw", "0::/docker/2\n", None),
        ("30 23 0:26 /docker/1 /sys/fs/cgroup ro - cgroup2 cgroup rw", "0::/docker/11\n", None),
        ("30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw", "0::/../elsewhere\n", None),
        (r"30 23 0:26 / /my\040groups rw - cgroup2 cgroup rw", "0::/a\n", "/my groups/a"),
        ("30 23 0:26 / /proc rw - proc proc rw", "0::/a\n", None),
        ("30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw", "", None),
    ],
)
def test_only_a_group_that_can_be_seen(line: str, own: str, wanted: str | None) -> None:
    assert [mount.own for mount in cgroup_claim.mounts(line, own)] == ([] if wanted is None else [wanted])


def test_what_is_written() -> None:
    limits = Limits(memory=1000, cpus=1.5, pids=7, file=1)
    old = {name: text for tree in ("memory", "cpu", "pids") for name, text, _ in settings(_tree(1, tree), limits)}
    assert old == {
        "memory.limit_in_bytes": "1000",
        "memory.memsw.limit_in_bytes": "1000",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
        "pids.max": "7",
    }
    new = {name: text for name, text, _ in settings(_tree(2, "memory", "cpu", "pids"), limits)}
    assert new == {"memory.max": "1000", "memory.swap.max": "0", "cpu.max": "150000 100000", "pids.max": "7"}
    assert settings(_tree(2), limits) == []
    assert settings(_tree(2, "memory", "cpu", "pids"), NO_LIMITS) == []
    assert settings(_tree(2, "cpu"), Limits(cpus=0.0001)) == [("cpu.max", "1000 100000", True)]


def _tree(version: int, *controllers: str) -> Tree:
    return Tree("/t", version, frozenset(controllers))


@pytest.mark.parametrize("value", [["relative", 1, []], ["/t", 3, []], [5, 1, []], ["/t", 1]])
def test_what_is_no_tree(value: list[object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Tree.parse(value)


@pytest.mark.parametrize("limits", [{"memory": 0}, {"pids": -1}, {"cpus": "many"}, {"speed": 1}])
def test_what_is_no_limit(limits: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Confinement.parse("x", [], limits)


def test_what_is_enforced_is_told() -> None:
    everything = Enforced(frozenset({"memory", "cpu", "pids"}), freezer=True)
    assert everything.describe().startswith("memory, cpu, processes by control groups; ")
    assert "not enforced: disk as a whole" in everything.describe()
    nothing = Enforced(missing=("no control groups are mounted here",))
    assert "not enforced: memory, cpu" in nothing.describe()
    assert "processes by RLIMIT_NPROC" in nothing.describe()
    assert nothing.kept(Limits(1, 1.0, 2, 4)) == Limits(pids=2, file=4)


def test_sizes() -> None:
    enforced = Enforced(frozenset({"memory", "cpu", "pids"}), disk_bytes=5000 * MB)
    sizes = Sizes(cpus=1, memory_mb=64, disk_mb=100, pids=20)
    assert sizes.limits() == Limits(64 * MB, 1.0, 20, 100 * MB)
    assert sizes.limits(4, 32).memory == 32 * MB
    assert sizes.limits(memory_mb=1).memory == 16 * MB
    size = shown(sizes.limits(), enforced)
    assert (size.cpu_count, size.memory_mb, size.disk_mb) == (1, 64, 5000)
    alone = shown(sizes.limits(), Enforced(disk_bytes=7 * MB))
    assert alone.memory_mb > 64, "the host's own"


@pytest.mark.parametrize("wrong", [{"cpus": 0}, {"memory_mb": 1}, {"pids": 0}, {"disk_mb": -5}, {"cpus": float("nan")}])
def test_sizes_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needs at least"):
        Sizes(**wrong)
