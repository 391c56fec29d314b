"""What a sandbox must not reach: files, processes, environment and settings of the host. As `user` and as root."""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from managed_e2b.local.runtime.base import GuestError, User
from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime

from .boxes import Box, eventually, first_output, read_all

pytestmark = pytest.mark.asyncio(loop_scope="module")
both = pytest.mark.parametrize("user", ["user", "root"])
INTERPRETER = os.path.realpath(sys.executable)
SECRET = "e2b_the_servers_own_key_0123456789"


@pytest.fixture(scope="module", autouse=True)
def key_in_the_servers_environment() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("E2B_API_KEY", SECRET)
        yield


@both
async def test_nothing_of_the_hosts_homes_is_there(box: Box, user: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    result = await box.run(
        f"ls -A /home /root; cat {tmp_path}/secret {Path.home()}/.bashrc /etc/shadow 2>&1 | grep -v 'such file'; "
        "ls -d /home/*",
        user=user,
    )
    homes = set(os.listdir("/home")) - {"user"}
    assert "/home/user" in result.out
    assert not homes & set(result.out.split())
    assert "secret" not in result.out


@both
async def test_nothing_of_the_hosts_directories_but_usr_is_there(box: Box, user: str) -> None:
    result = await box.run("ls -A /opt /mnt /srv /media /var/lib /run /tmp /sys", user=user)
    listed = set(result.out.split())
    for directory in ("/opt", "/srv", "/var/lib", "/run", "/tmp"):
        with contextlib.suppress(FileNotFoundError):
            assert not listed & (set(os.listdir(directory)) - {"lock"})


@both
async def test_environment_is_what_the_command_was_given(box: Box, user: str) -> None:
    result = await box.run("env; tr '\\0' '\\n' < /proc/1/environ", user=user, env={"ONLY": "this"})
    names = {line.partition("=")[0] for line in result.out.splitlines()}
    assert names <= {"ONLY", "PATH", "HOME", "USER", "PWD", "SHLVL", "_"}
    assert SECRET not in result.out


@both
async def test_sees_only_its_own_processes(box: Box, user: str) -> None:
    result = await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '; echo; ls -d /proc/[0-9]* | wc -l", user=user)
    assert "pytest" not in result.out
    assert "spawner" not in result.out
    assert int(result.out.split()[-1]) <= 6


@both
async def test_the_first_process_cannot_be_read_or_traced(box: Box, user: str) -> None:
    if user == "user" and not box.runtime.ids.full:
        pytest.skip("with one id `user` is root")
    script = """
    for name in exe root cwd; do readlink /proc/1/$name && echo REACHED $name; done
    for name in mem environ maps; do head -c1 /proc/1/$name >/dev/null && echo REACHED $name; done
    for fd in 0 2 10; do readlink /proc/1/fd/$fd && echo REACHED fd; done
    ls /proc/1/root/ && echo REACHED root
    """
    result = await box.run(script, user=user)
    assert "REACHED" not in result.out


TRACE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
    print("TRACED" if libc.ptrace(request, 1, None, None) == 0 else "refused")
"""


@both
async def test_ptrace_of_the_first_process_is_refused(box: Box, user: str) -> None:
    result = await box.run(f"python3 -c '{TRACE}'", user=user)
    if "not found" in result.err:
        pytest.skip("this host has no python3 for sandboxes")
    assert result.out.split() == ["refused", "refused"]


KEYS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (250, 0x40000000 | 250), "aarch64": (219,), "riscv64": (219,)}[os.uname().machine]
for number in numbers:  # keyctl(KEYCTL_GET_KEYRING_ID, KEY_SPEC_USER_KEYRING, create)
    print(libc.syscall(number, 0, -4, 1), errno.errorcode[ctypes.get_errno()])
"""


@both
async def test_the_kernels_keys_cannot_be_reached(box: Box, user: str) -> None:
    """They belong to a user id of the host and to no namespace."""
    result = await box.run(f"python3 -c '{KEYS}'; sudo python3 -c '{KEYS}'", user=user)
    if "not found" in result.err:
        pytest.skip("this host has no python3 for sandboxes")
    assert set(result.out.splitlines()) == {"-1 EPERM"}


SOCKETS = """
import ctypes, errno, os, socket
def kind(family):
    try:
        return socket.socket(family, socket.SOCK_STREAM).close() or "made"
    except OSError as error:
        return errno.errorcode[error.errno]
print(*map(kind, (socket.AF_UNIX, socket.AF_INET, socket.AF_VSOCK, 38)))
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(425, 8, ctypes.create_string_buffer(256)), errno.errorcode[ctypes.get_errno()])
socket.socketpair()
"""


@both
async def test_no_socket_leads_out_of_the_network_namespace(box: Box, user: str) -> None:
    """AF_VSOCK would: to the host's own listeners, and to a hypervisor. io_uring would make one past the filter."""
    result = await box.run(f"python3 -c '{SOCKETS}'", user=user)
    if "not found" in result.err:
        pytest.skip("this host has no python3 for sandboxes")
    assert result.out.splitlines() == ["made made EAFNOSUPPORT EAFNOSUPPORT", "-1 ENOSYS"]


INOTIFY = """
import ctypes
libc = ctypes.CDLL(None)
made = 0
while libc.inotify_init1(0) >= 0:
    made += 1
print(made)
"""


@both
async def test_a_sandbox_cannot_take_all_inotify_instances(box: Box, user: str) -> None:
    """The kernel counts them for the server's user, whose other programs need some too."""
    result = await box.run(f"cat /proc/sys/fs/inotify/max_user_instances; python3 -c '{INOTIFY}'", user=user)
    if "not found" in result.err:
        pytest.skip("this host has no python3 for sandboxes")
    allowed, made = map(int, result.out.split())
    assert made <= allowed // 4


async def test_what_is_written_to_dev_is_bounded(box: Box) -> None:
    """It is memory of the host. (What goes to /dev/shm is bounded too, on its own.)"""
    result = await box.run("head -c 4000000 /dev/zero > /dev/big; stat -c %s /dev/big; rm /dev/big", user="root")
    assert "No space left" in result.err
    assert int(result.out) <= 1 << 20


async def test_each_sandbox_is_counted_apart_from_the_host(
    make_box: Callable[[], Awaitable[Box]], runtime: BubblewrapRuntime
) -> None:
    """What the kernel limits for a user, all ids inside together, it counts to the owner of the user namespace."""
    if runtime.ids.owners is None:
        pytest.skip("only root of a host with all ids can give each sandbox an owner")

    def owner(box: Box) -> int:
        with open(f"/proc/{box.guest.host_pid}/ns/user") as namespace:
            found = array.array("I", [0])
            fcntl.ioctl(namespace, 0xB704, found)  # NS_GET_OWNER_UID
        return found[0]

    owners = {owner(await make_box()) for _ in range(2)}
    assert len(owners) == 2
    assert os.geteuid() not in owners


async def test_nothing_in_proc_is_opened_for_the_server_to_write(box: Box) -> None:
    """The server may do more to a process than anybody inside: keep it from being killed when memory ends, say."""
    sleeper = await box.start("sleep 60")
    for name in ("oom_score_adj", "autogroup", "mem"):
        path = f"/proc/{sleeper.pid}/{name}"
        with pytest.raises(GuestError) as caught:
            await box.guest.call("open_write", path=path, uid=0, gid=0, metadata={})
        assert caught.value.errno == errno.EPERM


WATCH_FOR_STRANGERS = """
import glob, os, sys
seen = set()
print("ready", flush=True)
while not os.path.exists("/tmp/stop"):
    for directory in glob.glob("/proc/[0-9]*"):
        for name in ("exe", "root", "cwd"):
            try:
                seen.add(os.readlink(f"{directory}/{name}"))
            except OSError:
                pass
        for name in ("environ", "maps", "cmdline"):
            try:
                with open(f"{directory}/{name}", "rb") as file:
                    seen.update(file.read().decode("utf-8", "replace").replace("\\0", "\\n").splitlines())
            except OSError:
                pass
        try:
            for fd in os.listdir(f"{directory}/fd"):
                seen.add(os.readlink(f"{directory}/fd/{fd}"))
        except OSError:
            pass
print("\\n".join(seen))
"""


async def test_a_process_of_ours_that_enters_cannot_be_looked_into(box: Box) -> None:
    """The forks that become commands are inside for a moment: root in there must not follow them out."""
    watcher = await box.start(f"exec python3 -c '{WATCH_FOR_STRANGERS}'", user="root")
    if await first_output(watcher) != b"ready\n":
        watcher.close()
        pytest.skip("this host has no python3 for sandboxes")
    for _ in range(100):
        await box.run("exit 0", user="root")
    await box.run("touch /tmp/stop", user="root")
    text = (await read_all(watcher.stdout_fd)).decode("utf-8", "replace")
    watcher.close()
    assert "/usr/bin/bash" in text  # it did see commands
    assert INTERPRETER.startswith("/usr/") or INTERPRETER not in text
    assert "managed_e2b" not in text
    assert "spawner_main" not in text
    assert SECRET not in text


@both
async def test_mounts_cannot_be_changed(box: Box, user: str) -> None:
    script = """
    mount -t tmpfs none /tmp && echo DONE
    mount -o remount,bind,ro /usr && echo DONE
    mount --bind /etc /mnt && echo DONE
    umount /usr && echo DONE
    umount -l /proc && echo DONE
    mount -t proc proc /mnt && echo DONE
    """
    assert "DONE" not in (await box.run(script, user=user)).out


@both
async def test_mounts_tell_nothing_of_the_host(box: Box, user: str, data_dir: Path) -> None:
    text = (await box.run("cat /proc/mounts /proc/self/mountinfo", user=user)).out
    assert "overlay / overlay" in text
    assert str(data_dir) not in text
    assert "oldroot" not in text
    assert not re.search(r"[=:]/(?!usr\b)", text)


@both
async def test_user_namespaces_give_no_way_around(box: Box, user: str) -> None:
    script = """
    unshare --user --map-root-user id && echo DONE
    unshare --mount true && echo DONE
    unshare --net true && echo DONE
    echo 1000 > /proc/sys/user/max_user_namespaces && echo DONE
    """
    assert "DONE" not in (await box.run(script, user=user)).out


@both
async def test_the_kernels_settings_cannot_be_changed(box: Box, user: str) -> None:
    script = """
    echo 1 > /proc/sys/kernel/panic && echo DONE
    echo x > /proc/sysrq-trigger && echo DONE
    hostname other && echo DONE
    date -s 2001-01-01 && echo DONE
    mknod /tmp/disk b 254 0 && echo DONE
    head -c1 /proc/kcore && echo DONE
    nice -n -10 true 2>/dev/null; true
    """
    assert "DONE" not in (await box.run(script, user=user)).out


async def test_links_lead_nowhere_on_the_host(box: Box, tmp_path: Path) -> None:
    """The file agent resolves them inside, absolute ones too."""
    target = tmp_path / "of-the-host"
    target.write_text("of the host")
    await box.run(f"ln -s {target} /tmp/absolute; ln -s ../../../../../..{target} /tmp/relative")
    await box.run("ln -s /proc/1/root /tmp/r")
    for link in ("/tmp/absolute", "/tmp/relative", f"/tmp/r{target}"):
        with pytest.raises(GuestError):
            await box.guest.call("open_read", path=link)
    assert target.read_text() == "of the host"


async def test_two_sandboxes_listen_on_the_same_port(make_box: Callable[[], Awaitable[Box]]) -> None:
    boxes = [await make_box(), await make_box()]
    script = "exec python3 -m http.server 8080 --bind 127.0.0.1 --directory /home/user"
    servers = []
    for number, box in enumerate(boxes):
        await box.run(f"echo box {number} > ~/name")
        servers.append(await box.start(script))
    for number, box in enumerate(boxes):
        descriptor = await _when_it_listens(box, 8080)
        loop = asyncio.get_running_loop()
        with socket.socket(fileno=descriptor) as connection:
            await loop.sock_sendall(connection, b"GET /name HTTP/1.0\r\n\r\n")
            answer = b""
            while chunk := await loop.sock_recv(connection, 4096):
                answer += chunk
        assert f"box {number}".encode() in answer
    for server in servers:
        server.close()


async def _when_it_listens(box: Box, port: int) -> int:
    descriptors: list[int] = []

    async def listens() -> bool:
        try:
            descriptors.append(await box.guest.connect(port))
        except GuestError:
            return False
        return True

    await eventually(listens)
    return descriptors[0]


async def test_the_hosts_loopback_is_not_the_sandboxs(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = await box.run(f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo CONNECTED")
        assert "CONNECTED" not in result.out
        with pytest.raises(GuestError, match="refused"):
            await box.guest.connect(port)


async def test_ids_of_the_host_do_not_go_in(box: Box) -> None:
    """Whatever ids are asked for, no process runs as the host's root or as an id outside the map."""
    with pytest.raises(GuestError):
        await box.run("id", user=User("x", 2**32 - 1, 0, (), "/", "/bin/sh"))
    with pytest.raises(GuestError):
        await box.run("id", user=User("x", 70_000, 0, (), "/", "/bin/sh"))


def told_to_everybody(name: str) -> dict[str, bytes]:
    """What every user of the host can read of all processes: pid → content."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            found[process.name] = (process / name).read_bytes()
    return found


async def test_other_users_of_the_host_do_not_learn_the_id_of_a_sandbox(box: Box) -> None:
    directory = box.guest.directory.encode()
    assert any(directory in text for text in told_to_everybody("cmdline").values())  # there is something to be read
    for name in ("cmdline", "mountinfo", "cgroup"):
        telling = [pid for pid, text in told_to_everybody(name).items() if box.guest.sandbox_id.encode() in text]
        assert telling == [], name
