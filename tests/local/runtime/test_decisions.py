"""What is decided from values alone: id maps, bubblewrap's arguments, places, explanations."""

from __future__ import annotations

from pathlib import Path

import pytest

from managed_e2b.local.runtime import bwrap, doctor, idmap, layers, standins, storage
from managed_e2b.local.runtime.deaths import MOST, WINDOW, Deaths
from managed_e2b.local.runtime.layers import Layout

WHOLE = [(0, 0, 4294967295)]


def test_root_gets_a_range_far_from_ids_in_use() -> None:
    found = idmap.root_map(WHOLE, WHOLE)
    assert found.uids == ((0, 2_100_000_000, 65536),)
    assert found.full


@pytest.mark.parametrize(
    "own", [[(0, 0, 65536)], [(0, 100000, 65536)], [(0, 1000, 1), (1, 100000, 65536)], [(0, 0, 5000)]]
)
def test_root_of_a_container_takes_what_there_is_and_never_root(own: list[tuple[int, int, int]]) -> None:
    found = idmap.root_map(own, own)
    ((inside, outside, count),) = found.uids
    assert inside == 0
    assert outside > 0
    assert found.full
    assert any(first <= outside and outside + count <= first + length for first, _, length in own)


def test_root_of_a_container_with_few_ids_takes_one_that_is_not_root() -> None:
    found = idmap.root_map([(0, 0, 500)], [(0, 0, 500)])
    assert found.uids == ((0, 499, 1),)
    assert not found.full


def test_root_of_a_namespace_with_one_id_has_but_that() -> None:
    found = idmap.root_map([(0, 1000, 1)], [(0, 1000, 1)])
    assert (found.uids, found.gids, found.via) == (((0, 0, 1),), ((0, 0, 1),), "single")


def test_an_ordinary_user_maps_the_subordinate_range() -> None:
    found = idmap.user_map(1000, 1000, (1, 100000, 65536), (1, 200000, 65536), helpers=True)
    assert found.uids == ((0, 1000, 1), (1, 100000, 65535))
    assert found.gids == ((0, 1000, 1), (1, 200000, 65535))
    assert found.via == "helpers"


@pytest.mark.parametrize(
    ("subuid", "subgid", "helpers"),
    [
        (None, None, True),
        ((1, 100000, 65536), None, True),
        ((1, 1, 999), (1, 1, 999), True),
        ((1, 1, 65536), (1, 1, 65536), False),
    ],
)
def test_without_range_or_helpers_there_is_one_id(subuid: object, subgid: object, helpers: bool) -> None:
    found = idmap.user_map(1000, 1001, subuid, subgid, helpers=helpers)  # type: ignore[arg-type]
    assert (found.uids, found.gids, found.via) == (((0, 1000, 1),), ((0, 1001, 1),), "single")


def test_the_longest_range_of_a_user_is_taken() -> None:
    text = "other:1:2\n4321:100000:100\n4321:300000:65536\n# comment\nbroken\n4321:x:1\n"
    assert idmap.subordinate(text, 4321) == (1, 300000, 65536)
    assert idmap.subordinate(text, 1234) is None


def test_bubblewrap_gets_namespaces_mounts_and_no_capability_but_one() -> None:
    argv = bwrap.arguments("bwrap", "/m/root", "/m/usr", [("/bin", "/bin")])
    text = " ".join(argv)
    assert "--bind /m/root / --bind /m/usr /usr --ro-bind /bin /bin --proc /proc --perms 0444 --ro-bind-data" in text
    assert "/usr" not in bwrap.arguments("bwrap", "/m/root", None)
    for wanted in ("pid", "ipc", "uts", "net"):
        assert f"--unshare-{wanted}" in argv
    assert "--die-with-parent" in argv
    assert "--clearenv" in argv
    assert argv[argv.index("--cap-drop") + 1] == "ALL"
    assert argv.count("--cap-add") == 1


def test_layers_are_told_topmost_first_and_in_relative_paths() -> None:
    layout = Layout("/home-of-all", "x", ["upper", "lower"], ["over"], memory=False)
    text = layers.options(layout.root, f"{layout.top}/root")
    assert text == "lowerdir=upper:lower,upperdir=guests/x/root,workdir=guests/x/root-work,userxattr,volatile"
    assert layout.changes == ["/home-of-all/guests/x/root", "/home-of-all/guests/x/usr"]


def test_places_for_sandboxes_in_order() -> None:
    env = {"HOME": "/home/ann", "XDG_RUNTIME_DIR": "/run/user/5"}
    memory = Path("/dev/shm/me2b-5")
    assert storage.candidates(None, 5, env) == [Path("/home/ann/.cache/me2b/local"), Path("/run/user/5/me2b"), memory]
    assert storage.candidates(None, 5, {**env, "XDG_CACHE_HOME": "/c"})[0] == Path("/c/me2b/local")
    assert storage.candidates("/given", 5, env) == [Path("/given"), memory]
    assert storage.candidates(None, 0, env)[0] == Path("/var/lib/me2b")


@pytest.mark.parametrize(
    ("found", "uid", "fix"),
    [
        ({"user.max_user_namespaces": 0}, 0, "user.max_user_namespaces="),
        ({"kernel.unprivileged_userns_clone": 0}, 1000, "kernel.unprivileged_userns_clone=1"),
        ({"kernel.apparmor_restrict_unprivileged_userns": 1}, 1000, "kernel.apparmor_restrict_unprivileged_userns=0"),
        ({"kernel.apparmor_restrict_unprivileged_userns": 1}, 0, "container"),
        ({}, 1000, "container"),
    ],
)
def test_a_refusal_is_explained_with_its_fix(found: dict[str, int], uid: int, fix: str) -> None:
    assert fix in doctor.explain_refusal(found, uid)[1]


def test_a_hidden_proc_is_explained() -> None:
    assert "systempaths=unconfined" in doctor.explain_launch("bwrap: Can't mount proc on /newroot/proc")


@pytest.mark.parametrize(
    ("release", "ok"), [("6.18.44-fc", True), ("5.11.0", True), ("5.10.200", False), ("4.19", False)]
)
def test_old_kernels_are_told(release: str, ok: bool) -> None:
    assert doctor.kernel(release).ok is ok


def test_one_id_is_told_but_is_no_failure() -> None:
    check = doctor.ids(idmap.user_map(1000, 1000, None, None, helpers=False))
    assert check.ok
    assert "uidmap" in check.detail


def test_with_one_id_it_has_the_name_user() -> None:
    assert standins.passwd(one_id=True).startswith("user:x:0:0:")
    assert standins.passwd(one_id=False).splitlines()[1].startswith("user:x:1000:1000:")
    assert "--keep-groups" in standins.sudo(one_id=True)


def test_examine_looks_at_everything() -> None:
    names = {check.name for check in doctor.examine()}
    assert {"kernel", "bubblewrap", "user namespaces", "ids", "bash", "programs", "network"} <= names


def test_deaths_are_bounded_within_a_window() -> None:
    deaths = Deaths()
    assert all(deaths.add(float(turn)) for turn in range(MOST))
    assert not deaths.add(MOST + 0.5)
    assert deaths.add(MOST + WINDOW)  # those before are forgotten
