"""Images that the server makes by itself: made once, when first needed, and kept for the next server."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from managed_e2b.local.runtime.base import GuestSpec, ImageUnavailable
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime
from managed_e2b.local.runtime.recipes import hand_over

from .boxes import Box

pytestmark = pytest.mark.asyncio(loop_scope="module")

MakeBox = Callable[..., Awaitable[Box]]


class Hello:
    """A file in the root, a program in /usr."""

    def __init__(self, digest: str = "1") -> None:
        self.fills = 0
        self.error: Exception | None = None
        self._digest = digest

    def digest(self) -> str:
        return self._digest

    def fill(self, layer: Path) -> None:
        self.fills += 1
        (layer / "root/opt/hello").mkdir(parents=True)
        (layer / "root/opt/hello/text").write_text("hello\n")
        (layer / "root/opt/hello/text").chmod(0o4600)
        if self.error is not None:
            raise self.error
        (layer / "usr/local/bin").mkdir(parents=True)
        (layer / "usr/local/bin/hello").write_text("#!/bin/sh\ncat /opt/hello/text\n")
        (layer / "usr/local/bin/hello").chmod(0o700)


def new_name() -> str:
    return f"hello-{secrets.token_hex(4)}"


async def test_it_is_made_once_however_many_ask_at_once(runtime: BubblewrapRuntime, make_box: MakeBox) -> None:
    recipe, name = Hello(), new_name()
    runtime.offer(name, recipe)
    assert recipe.fills == 0
    boxes = await asyncio.gather(*(make_box(GuestSpec(name)) for _ in range(3)))
    assert recipe.fills == 1
    for box in boxes:
        assert (await box.run("hello; stat -c %a /opt/hello/text /usr/local/bin/hello")).out == "hello\n644\n755\n"
    await boxes[0].run("echo changed > /opt/hello/text", user="root")
    assert (await boxes[1].run("hello")).out == "hello\n"
    assert (await (await make_box()).run("command -v hello || echo none")).out == "none\n"


async def test_it_can_be_kept_further(runtime: BubblewrapRuntime, make_box: MakeBox) -> None:
    name, image = new_name(), new_name()
    runtime.offer(name, Hello())
    box = await make_box(GuestSpec(name))
    await box.run("echo more >> /opt/hello/text", user="root")
    await box.guest.commit(image)
    assert (await (await make_box(GuestSpec(image))).run("hello")).out == "hello\nmore\n"
    await runtime.remove_image(image)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ImageUnavailable("needs x")])
async def test_one_that_fails_says_why_and_is_tried_again(
    runtime: BubblewrapRuntime, make_box: MakeBox, error: Exception
) -> None:
    recipe, name = Hello(), new_name()
    recipe.error = error
    runtime.offer(name, recipe)
    with pytest.raises(ImageUnavailable, match=r"No space left|needs x"):
        await make_box(GuestSpec(name))
    assert not list(runtime.guests_directory.parent.glob("new-*"))
    recipe.error = None
    assert (await (await make_box(GuestSpec(name))).run("hello")).out == "hello\n"


async def test_names(runtime: BubblewrapRuntime) -> None:
    name = new_name()
    runtime.offer(name, Hello())
    for taken in (name, "base", "", "../x", "a/b", "A"):
        with pytest.raises(ValueError, match="cannot offer"):
            runtime.offer(taken, Hello())


async def test_the_next_server_finds_it(tmp_path_factory: pytest.TempPathFactory, runtime: BubblewrapRuntime) -> None:
    place, name = tmp_path_factory.mktemp("data"), new_name()
    recipes = []
    for digest in ("1", "1", "2"):
        recipes.append(Hello(digest))
        server = BubblewrapRuntime(place)
        await server.start()
        server.offer(name, recipes[-1])
        await (await server.create("abc", GuestSpec(name))).kill()
        await server.close()
    assert [recipe.fills for recipe in recipes] == [1, 0, 1]
    (kept,) = place.glob(f"sandboxes/layers-{name}-*")
    assert len(list(kept.iterdir())) == 1, "what nobody can use any more is gone"


async def test_handing_over(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o700)
    (tmp_path / "d/file").touch(mode=0o600)
    (tmp_path / "d/link").symlink_to("/etc/shadow")
    hand_over(tmp_path, -1, -1)
    modes = [oct(os.lstat(tmp_path / name).st_mode & 0o7777) for name in ("d", "d/file")]
    assert modes == ["0o755", "0o644"]
    assert os.readlink(tmp_path / "d/link") == "/etc/shadow"
