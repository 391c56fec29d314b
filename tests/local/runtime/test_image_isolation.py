"""What root of a sandbox puts into its files to get more from an image of them: nothing comes of it."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from managed_e2b.local.runtime.base import GuestSpec
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime

from .boxes import Box

pytestmark = pytest.mark.asyncio(loop_scope="module")

MakeBox = Callable[..., Awaitable[Box]]


@pytest.fixture
async def child_of(runtime: BubblewrapRuntime, make_box: MakeBox) -> Callable[[Box], Awaitable[Box]]:
    async def make(box: Box) -> Box:
        image = f"i{secrets.token_hex(6)}"
        await box.guest.commit(image)
        child = await make_box(GuestSpec(image))
        await runtime.remove_image(image)
        return child

    return make


Child = Callable[[Box], Awaitable[Box]]

MARK = """
import os, sys
done = []
for name, value in (("opaque", b"y"), ("redirect", b"/etc"), ("redirect", b"../../../../../../etc"), ("metacopy", b""),
                    ("origin", b"x"), ("impure", b"y"), ("nlink", b"U+1"), ("whiteout", b"y"), ("xwhiteouts", b"y")):
    for prefix in ("user.overlay.", "trusted.overlay.", "user.overlay.overlay."):
        for path in ("/root/dir", "/root/file", "/root/empty", "/usr/local/dir", "/"):
            try:
                os.setxattr(path, prefix + name, value)
                done.append(f"{prefix}{name}")
            except OSError:
                pass
print(len(set(done)))
"""


async def test_marks_of_an_overlay_set_by_hand_mean_nothing(box: Box, child_of: Child, make_box: MakeBox) -> None:
    """`redirect` would let a directory show another one, `metacopy` a file the bytes of another."""
    script = "mkdir -p /root/dir/sub /usr/local/dir; echo own > /root/file; touch /root/empty /root/dir/sub/x; "
    result = await box.run(script + f"python3 - <<'END'\n{MARK}\nEND", user="root")
    if "not found" in result.err:
        pytest.skip("this host has no python3 for sandboxes")
    assert result.code == 0, result.err
    look = "ls -A /root/dir /usr/local/dir; cat /root/file /root/empty; ls -d /etc/passwd /usr/bin/env"
    wanted = await box.run(look, user="root")
    assert "own" in wanted.out
    assert "passwd" not in wanted.out.replace("/etc/passwd", "")
    child = await child_of(box)
    assert (await child.run(look, user="root")).out == wanted.out
    grandchild = await child_of(child)
    assert (await grandchild.run(look, user="root")).out == wanted.out
    untouched = await make_box()
    assert (await untouched.run("ls -A /etc", user="root")).out == (await child.run("ls -A /etc", user="root")).out


async def test_no_device_works_in_a_child_nor_is_made_a_whiteout(box: Box, child_of: Child) -> None:
    script = "cd /root; mknod white c 0 0; mknod null c 1 3; mknod disk b 8 0; mkfifo pipe; ls"
    made = (await box.run(script, user="root")).out.split()
    child = await child_of(box)
    assert (await child.run("ls /root", user="root")).out.split() == made
    result = await child.run("cd /root; for f in white null disk; do head -c1 $f && echo READ; done", user="root")
    assert "READ" not in result.out


async def test_setuid_files_of_a_child_give_no_more_than_its_own_root(box: Box, child_of: Child, two_ids: None) -> None:
    await box.run("cp /bin/bash /root/shell; cp /bin/bash /usr/local/shell; chmod 4755 /usr/local/shell", user="root")
    child = await child_of(box)
    seen = await child.run("/usr/local/shell -p -c 'id -u; cat /proc/self/uid_map; grep CapEff /proc/self/status'")
    assert seen.out.split()[0] == "0"
    own = await child.run("cat /proc/self/uid_map; grep CapEff /proc/self/status", user="root")
    assert seen.out.split()[1:] == own.out.split()
    assert own.out.split()[1] != "0", "root of the host is not root inside"


@pytest.fixture
def of_the_host(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    (tmp_path / "secret").write_text("of the host")
    return tmp_path


async def test_links_lead_nowhere_on_the_way_into_an_image(box: Box, child_of: Child, of_the_host: Path) -> None:
    script = f"""
    cd /root; ln -s {of_the_host}/secret to-host; ln -s {of_the_host} dir; ln -s / top; ln -s /proc/1/root proc
    mkdir real; ln -s ../../../../../../../../../..{of_the_host}/secret real/up
    rm -rf /opt /srv; ln -s {of_the_host} /opt; ln -s {of_the_host} /srv
    """
    await box.run(script, user="root")
    child = await child_of(box)
    result = await child.run("cat /root/to-host /root/dir/secret /root/real/up /opt/secret /srv/secret", user="root")
    assert result.out == ""
    assert (of_the_host / "secret").read_text() == "of the host"


async def test_what_was_removed_stays_so_and_what_was_kept_shows(box: Box, child_of: Child) -> None:
    """Whiteouts and opaque directories of the overlay itself are the ones that count."""
    script = "rm /etc/hostname; rm -r /usr/local/bin; mkdir /usr/local/bin; echo 1 > /usr/local/bin/only"
    await box.run(script, user="root")
    child = await child_of(await child_of(box))
    result = await child.run("ls /usr/local/bin; ls /etc/hostname", user="root")
    assert result.out == "only\n"
    assert result.code != 0
