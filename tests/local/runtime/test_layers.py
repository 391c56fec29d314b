"""The layers of template `base` outlive their server: made once, made anew when what they are made of has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from managed_e2b.local.runtime import base_template, standins, storage
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime

from .boxes import Box

pytestmark = pytest.mark.asyncio(loop_scope="module")


def layers_in(place: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in place.glob("sandboxes/layers-*/*")}


async def test_the_next_server_takes_what_is_there(data_dir: Path, runtime: BubblewrapRuntime) -> None:
    place, found = data_dir / "layers", []
    for _ in range(2):
        server = BubblewrapRuntime(place)
        await server.start()
        guest = await server.create("s")
        assert (await Box(guest, server).run("stat -c %U ~ ~/.profile", cwd="/home/user")).out == "user\nuser\n" or (
            not server.ids.full
        )
        await Box(guest, server).run("echo changed > /etc/hostname; echo changed >> ~/.profile", user="root")
        await server.close()
        found.append(layers_in(place))
    assert found[0] == found[1]
    assert len(found[0]) == 1


async def test_changed_layers_replace_the_old_ones_when_nobody_uses_them(
    data_dir: Path, runtime: BubblewrapRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = data_dir / "changed"
    first, second, third = (BubblewrapRuntime(place) for _ in range(3))
    await first.start()
    before = layers_in(place)
    monkeypatch.setattr(storage, "made_by", lambda ids: "something else")
    await second.start()
    both = layers_in(place)
    assert both.keys() > before.keys()
    guest = await first.create("s")
    assert (await Box(guest, first).run("cat /etc/hostname")).out == f"{standins.HOSTNAME}\n"
    await second.close()
    await first.close()
    await third.start()
    await third.close()
    assert layers_in(place).keys() == both.keys() - before.keys()


FACTS = {"one_id": True, "python": None, "made_by": ""}


@pytest.fixture
def provide(tmp_path: Path) -> Callable[[], str]:
    """Make the layers as a server does, from an /etc of this test's own."""
    (tmp_path / "kept").mkdir()
    turns = iter(range(100))

    def make() -> str:
        turn = next(turns)
        made = base_template.provide(
            str(tmp_path / "kept"), str(tmp_path / f"new{turn}"), str(tmp_path / f"home{turn}"), FACTS
        )
        return str(made["name"])

    return make


async def test_a_changed_file_of_the_host_makes_other_layers(
    tmp_path: Path, provide: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "public"
    file.write_text("one")
    monkeypatch.setattr(base_template, "_FROM_ETC", (f"..{file}",))
    monkeypatch.setattr(base_template, "_skeleton", lambda source, depth: iter(()))
    one = provide()
    assert provide() == one
    file.write_text("two, longer")
    assert provide() != one


async def test_a_build_that_is_cut_short_is_not_taken_for_whole(
    tmp_path: Path, provide: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(base_template, "_FROM_ETC", ())
    monkeypatch.setattr(base_template, "_skeleton", lambda source, depth: iter(()))
    with monkeypatch.context() as cut:
        cut.setattr(base_template, "_build_usr", fail)
        with pytest.raises(OSError, match="no space"):
            provide()
    assert list((tmp_path / "kept").iterdir()) == []
    name = provide()
    assert (tmp_path / "kept" / name / "usr" / "local" / "bin").is_dir()
