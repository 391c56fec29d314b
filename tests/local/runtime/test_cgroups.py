"""Where control groups can be had, and what is written into them: decided from texts and values."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from managed_e2b.local.runtime import cgroup_claim, cgroups
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


class Version2:
    """Directories that behave as far as `claim` looks: controllers go down where they are handed down, and no group
    has both processes and controllers for groups below.
    """

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        self._add(top, {"memory", "pids", "cpu", "io"})
        monkeypatch.setattr(cgroup_claim, "_mkdir", lambda path: self.add(Path(path)))
        monkeypatch.setattr(cgroup_claim, "_try_to_join", lambda path: None)
        monkeypatch.setattr(cgroups, "empty_tree", lambda path: 0)
        monkeypatch.setattr(cgroups, "remove_tree", lambda path: shutil.rmtree(path))
        monkeypatch.setattr(cgroups, "write", self.write)

    def add(self, path: Path, processes: str = "", hands: str = "") -> Path:
        if not path.exists():
            path.mkdir()
            self._add(path, set((path.parent / "cgroup.subtree_control").read_text().split()))
        (path / "cgroup.procs").write_text(processes)
        for controller in hands.split():
            self.write(f"{path}/cgroup.subtree_control", f"+{controller}")
        return path

    def _add(self, path: Path, controllers: set[str]) -> None:
        (path / "cgroup.controllers").write_text(" ".join(sorted(controllers)))
        (path / "cgroup.subtree_control").write_text("")
        (path / "cgroup.procs").write_text("")

    def write(self, path: str, text: str) -> None:
        file = Path(path)
        if file.name == "cgroup.procs":
            for procs in self.top.rglob("cgroup.procs"):
                procs.write_text("\n".join(pid for pid in procs.read_text().split() if pid != text))
            file.write_text(f"{file.read_text()}\n{text}")
        elif (file.parent / "cgroup.procs").read_text().strip() and file.parent != self.top:
            raise OSError(errno.EBUSY, "busy")
        elif text[1:] not in (file.parent / "cgroup.controllers").read_text().split():
            raise OSError(errno.ENOENT, "no such controller")
        else:
            file.write_text(f"{file.read_text()} {text[1:]}")

    def claim(self, own: Path) -> tuple[str, set[str]]:
        tree = cgroup_claim._in_version_2(cgroup_claim.Mount(str(self.top), str(own), 2, frozenset()), "me2b-x", [11])
        return str(Path(tree.directory).relative_to(self.top)), set(tree.controllers)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Version2:
    top = tmp_path / "cgroup"
    top.mkdir()
    return Version2(top, monkeypatch)


def test_a_group_of_the_servers_own_is_made_room_in(tree: Version2) -> None:
    """As `systemd-run --scope -p Delegate=yes` makes one."""
    tree.add(tree.top, hands="memory pids cpu")
    own = tree.add(tree.top / "me2b.scope", f"11\n{os.getpid()}")
    assert tree.claim(own) == ("me2b.scope/me2b-x", {"memory", "pids", "cpu"})
    assert (own / "me2b-x-server" / "cgroup.procs").read_text().split() in (
        ["11", str(os.getpid())],
        [str(os.getpid()), "11"],
    )
    assert tree.claim(own / "me2b-x-server")[0] == "me2b.scope/me2b-x", "again, by the next spawner"


def test_else_it_is_the_nearest_group_that_hands_down_what_protects(tree: Version2) -> None:
    tree.add(tree.top, hands="memory pids cpu")
    slice_ = tree.add(tree.top / "app.slice", hands="memory pids")
    own = tree.add(slice_ / "terminal.scope", "11\n999")
    assert tree.claim(own) == ("app.slice/me2b-x", {"memory", "pids"})
    assert not (own / "me2b-x").exists(), "what was tried and is of less use is gone"
    assert (own / "cgroup.procs").read_text().split() == ["11", "999"], "nobody else is moved"


def test_else_the_one_that_hands_down_most(tree: Version2) -> None:
    tree.add(tree.top, hands="pids")
    own = tree.add(tree.top / "session.scope", "11\n999")
    assert tree.claim(own) == ("me2b-x", {"pids"})
    assert not (own / "me2b-x").exists()


def test_without_controllers_it_can_still_freeze(tree: Version2) -> None:
    own = tree.add(tree.top / "session.scope", "11\n999")
    assert tree.claim(own) == ("session.scope/me2b-x", set())
    assert not (tree.top / "me2b-x").exists()


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
    endless = Sizes(cpus=float("inf"), memory_mb=2**70, disk_mb=2**70, pids=2**70).limits()
    assert settings(_tree(2, "cpu"), endless) == [("cpu.max", "100000000000 100000", True)]
    assert max(endless.memory or 0, endless.pids or 0, endless.file or 0) < 2**63
    size = shown(sizes.limits(), enforced)
    assert (size.cpu_count, size.memory_mb, size.disk_mb) == (1, 64, 5000)
    alone = shown(sizes.limits(), Enforced(disk_bytes=7 * MB))
    assert alone.memory_mb > 64, "the host's own"


@pytest.mark.parametrize("wrong", [{"cpus": 0}, {"memory_mb": 1}, {"pids": 0}, {"disk_mb": -5}, {"cpus": float("nan")}])
def test_sizes_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needs at least"):
        Sizes(**wrong)
