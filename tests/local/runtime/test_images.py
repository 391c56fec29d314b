"""Files of a sandbox kept as an image: what is in it, who is made of it, and when it goes."""

from __future__ import annotations

import asyncio
import errno
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from managed_e2b.local.runtime.base import GuestError, GuestGone, GuestSpec
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime
from managed_e2b.local.runtime.images import MAX_LAYERS, Image, Images

from .boxes import Box, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTS_BOOT = Path("/proc/sys/kernel/random/boot_id").read_text()
MakeBox = Callable[..., Awaitable[Box]]


def new_image() -> str:
    return f"i{secrets.token_hex(6)}"


def layers_of(runtime: BubblewrapRuntime) -> set[str]:
    return {path.name for path in (runtime.guests_directory.parent / "layers").iterdir()}


async def test_another_sandbox_has_the_files_as_they_were(runtime: BubblewrapRuntime, make_box: MakeBox) -> None:
    box = await make_box()
    await box.run("echo one > ~/kept; mkdir -p ~/d/e; echo x > ~/d/e/f; ln ~/kept ~/hard; ln -s kept ~/soft")
    await box.run("chmod 4750 /home/user/kept; rm /etc/hostname; rm -r /usr/local/bin; echo hi > /root/r", user="root")
    image = new_image()
    await box.guest.commit(image)
    await box.run("echo two > ~/kept")
    await box.guest.kill()
    other = await make_box(GuestSpec(image))
    seen = await other.run("cd ~; cat kept; stat -c '%a %U %h' kept hard; readlink soft; cat d/e/f")
    owner = "user" if runtime.ids.full else "root"
    assert seen.out.split("\n")[0] == "one"
    assert seen.out.count(" 2\n") == 2, "a hard link stays one"
    assert "kept\nx\n" in seen.out
    assert owner in seen.out or not runtime.ids.full
    assert (await other.run("cat /root/r; ls -d /etc/hostname /usr/local/bin", user="root")).out == "hi\n"
    await runtime.remove_image(image)


async def test_what_is_made_of_one_image_is_apart(runtime: BubblewrapRuntime, make_box: MakeBox) -> None:
    box, image = await make_box(), new_image()
    await box.run("echo same > ~/file")
    await box.guest.commit(image)
    first, second = await make_box(GuestSpec(image)), await make_box(GuestSpec(image))
    await first.run("echo first > ~/file")
    assert [(await each.run("cat ~/file")).out for each in (box, first, second)] == ["same\n", "first\n", "same\n"]
    again = new_image()
    await first.guest.commit(again)
    third = await make_box(GuestSpec(again))
    assert (await third.run("cat ~/file")).out == "first\n"
    for name in (image, again):
        await runtime.remove_image(name)
    assert (await third.run("cat ~/file; ls /usr/bin/env")).out == "first\n/usr/bin/env\n", "its layers stay with it"


async def test_layers_go_with_the_last_who_has_them(runtime: BubblewrapRuntime, make_box: MakeBox) -> None:
    before = layers_of(runtime)
    box, image = await make_box(), new_image()
    await box.guest.commit(image)
    other = await make_box(GuestSpec(image))
    (layer,) = layers_of(runtime) - before
    await runtime.remove_image(image)
    with pytest.raises(KeyError):
        await runtime.create("x", GuestSpec(image))
    with pytest.raises(KeyError):
        await runtime.remove_image(image)
    await box.guest.kill()
    assert layer in layers_of(runtime)
    await other.guest.kill()
    await eventually(lambda: layer not in layers_of(runtime))


async def test_processes_go_on_after_a_commit_and_stay_where_they_stood(
    runtime: BubblewrapRuntime, make_box: MakeBox
) -> None:
    box, image = await make_box(), new_image()
    process = await box.start("while :; do sleep 0.05; echo >> ~/ticks; done")
    await box.guest.commit(image)
    before = (await box.run("wc -l < ~/ticks || echo 0")).out
    await box.prints(f"[ $(wc -l < ~/ticks) -gt {int(before)} ] && echo more", "more")
    await box.guest.freeze()
    again = new_image()
    await box.guest.commit(again)
    state = await box.guest._ask("usage", directories=[])
    assert state.value["processes"] >= 1
    other = await make_box(GuestSpec(again))
    count = (await other.run("wc -l < ~/ticks")).out
    third = new_image()
    await box.guest.commit(third)
    assert (await (await make_box(GuestSpec(third))).run("wc -l < ~/ticks")).out == count, "it stood still all the time"
    await box.guest.thaw()
    process.kill_tree()
    await process.wait()
    process.close()
    for name in (image, again, third):
        await runtime.remove_image(name)


async def test_each_start_is_a_boot_of_its_own(runtime: BubblewrapRuntime, make_box: MakeBox) -> None:
    script = "cat /proc/sys/kernel/random/boot_id"
    boxes = [await make_box(), await make_box()]
    ids = [(await box.run(script)).out for box in boxes]
    assert ids[0] != ids[1]
    assert (await boxes[0].run(script)).out == ids[0]
    assert HOSTS_BOOT not in ids
    assert (await boxes[0].run("echo x > /proc/sys/kernel/random/boot_id", user="root")).code != 0


async def test_refusals(runtime: BubblewrapRuntime, make_box: MakeBox) -> None:
    box, image = await make_box(), new_image()
    await box.guest.commit(image)
    with pytest.raises(ValueError, match=image):
        await box.guest.commit(image)
    deep = new_image()
    many = Image(("home",) * MAX_LAYERS, ())
    runtime._images.add(deep, many)
    with pytest.raises(GuestError) as refused:
        await runtime._images.commit(many, new_image(), ["x"])
    assert refused.value.errno == errno.EMLINK
    for name in (image, deep):
        await runtime.remove_image(name)
    await box.guest.kill()
    with pytest.raises(GuestGone):
        await box.guest.commit(new_image())


async def test_a_commit_whose_caller_goes_leaves_nothing_standing_still(
    runtime: BubblewrapRuntime, make_box: MakeBox
) -> None:
    box, image = await make_box(), new_image()
    task = asyncio.create_task(box.guest.commit(image))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await box.run("echo goes on")).out == "goes on\n"
    await eventually(lambda: image in runtime._images)
    await runtime.remove_image(image)


async def test_counting() -> None:
    images = Images()
    base = Image(("home", "../kept/root"), ("../kept/usr",))
    images.add("base", base)
    one = base.on_top(images.new_layer())
    two = one.on_top(images.new_layer())
    images.add("one", one)
    images.add("two", two)
    images.hold(two)
    assert images.remove("one") == []
    assert images.remove("two") == []
    assert images.drop(two) == ["layers/1", "layers/2"]
    assert two.root[0] == "layers/2/root"
    assert two.usr is not None
    assert two.usr[:2] == ("layers/2/usr", "layers/1/usr")
    assert images.remove("base") == []
