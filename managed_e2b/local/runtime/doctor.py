"""What this host can and cannot do for local sandboxes, each finding with its fix."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from managed_e2b.local.runtime import bwrap, idmap, linux, netlink
from managed_e2b.local.runtime.base import RuntimeUnavailable
from managed_e2b.local.runtime.idmap import IdMap
from managed_e2b.local.runtime.limits import Enforced

_MINIMUM_KERNEL = (5, 11)  # overlays inside user namespaces
_TRIAL_SECONDS = 30
_SYSCTLS = (
    "user.max_user_namespaces",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)
INSTALL_BUBBLEWRAP = "pip install 'managed-e2b[local]', or install bubblewrap 0.11 or later"
# New user and mount namespaces, and a mount as root in there: some hosts allow the first and refuse the second.
_TRY_USER_NAMESPACE = (
    "import ctypes, os, sys\n"
    "c = ctypes.CDLL(None, use_errno=True)\n"
    "ok = c.unshare(0x10020000) == 0 and c.mount(b'none', b'/', None, 0x44000, None) == 0\n"
    "sys.exit(0 if ok else os.strerror(ctypes.get_errno()))\n"
)
# The way out of a sandbox, in namespaces of its own. 0x8914: SIOCSIFFLAGS, for the loopback to be up.
_TRY_WAY_OUT = (
    "import fcntl, runpy, socket, struct, sys\n"
    "runpy.run_path(sys.argv[1])['unshare'](0x50000000)\n"
    "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH14x', b'lo', 1))\n"
    "runpy.run_path(sys.argv[2])['open_way_out']()\n"
)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `ok` is False when sandboxes cannot run without `fix`."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None


def examine(data_dir: str | os.PathLike[str] | None = None) -> list[Check]:
    """Look at everything, and start a sandbox if nothing speaks against it. Takes a second; not for an event loop."""
    checks = [kernel(os.uname().release), bubblewrap(), user_namespaces(), ids(idmap.detect()), *programs(), network()]
    if all(check.ok for check in checks):
        checks += trial(data_dir)
    return checks


def kernel(release: str) -> Check:
    found = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    wanted = ".".join(str(part) for part in _MINIMUM_KERNEL)
    return Check("kernel", found >= _MINIMUM_KERNEL, f"Linux {release}", f"use Linux {wanted} or later")


def bubblewrap() -> Check:
    program = bwrap.find()
    if program is None:
        return Check("bubblewrap", False, "not found", INSTALL_BUBBLEWRAP)
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("bubblewrap", False, f"{program} does not run: {error}", INSTALL_BUBBLEWRAP)
    version = tuple(int(part) for part in re.findall(r"\d+", done.stdout)[:2])
    return Check(
        "bubblewrap", version >= bwrap.MINIMUM_VERSION, f"{done.stdout.strip()} ({program})", INSTALL_BUBBLEWRAP
    )


def user_namespaces() -> Check:
    """Try one, in a process of its own."""
    command = [sys.executable, "-I", "-S", "-c", _TRY_USER_NAMESPACE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode == 0:
        return Check("user namespaces", True, "allowed")
    detail, fix = explain_refusal(sysctls(), os.geteuid())
    return Check("user namespaces", False, f"{done.stderr.strip()}: {detail}", fix)


def sysctls() -> dict[str, int]:
    """Those that decide over user namespaces, as far as this kernel has them."""
    found = {}
    for name in _SYSCTLS:
        path = Path("/proc/sys") / name.replace(".", "/")
        if path.exists():
            found[name] = int(path.read_text())
    return found


def explain_refusal(found: Mapping[str, int], uid: int) -> tuple[str, str]:
    """Why a user namespace was refused, and the fix, from the values of `sysctls`."""
    if found.get("user.max_user_namespaces", 1) == 0:
        return "user.max_user_namespaces is 0", "sudo sysctl -w user.max_user_namespaces=15000"
    if uid != 0 and found.get("kernel.unprivileged_userns_clone", 1) == 0:
        return "only root may make them", "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    if uid != 0 and found.get("kernel.apparmor_restrict_unprivileged_userns", 0):
        return "AppArmor restricts them", "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    return (
        "this process is confined, most likely by a container",
        "start the container with --privileged, or with --security-opt seccomp=unconfined,systempaths=unconfined",
    )


def explain_launch(detail: str) -> str:
    """The fix for a sandbox that did not start, from what bubblewrap or the kernel said; they have no codes for it."""
    if "mount proc" in detail:
        return (
            "parts of /proc are hidden here, as in a container: start that with --security-opt systempaths=unconfined"
        )
    if "exec bwrap" in detail:
        return f"bubblewrap cannot be run: {INSTALL_BUBBLEWRAP}"
    return "`me2b doctor` tells what this host lacks"


def ids(found: IdMap) -> Check:
    """Never fatal: with one id, sandboxes work, and `user` and root are the same inside."""
    if found.full:
        extents = ", ".join(f"{inside}…{inside + count - 1} → {outside}…" for inside, outside, count in found.uids)
        return Check("ids", True, extents)
    way = "install newuidmap (package uidmap) and give yourself 65536 ids in /etc/subuid and /etc/subgid"
    return Check("ids", True, f"one id only, so that `user` and root are one inside; for two of them, {way}")


def programs() -> list[Check]:
    """What template `base` takes from the host's /usr. Only bash must be there."""
    shell = os.access("/bin/bash", os.X_OK)
    checks = [Check("bash", shell, "/bin/bash" if shell else "not found", "install bash")]
    wanted = {"python3": "python3", "git": "git", "curl": "curl", "setpriv": "util-linux (sudo inside needs it)"}
    place = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    missing = [package for name, package in wanted.items() if not shutil.which(name, path=place)]
    there = ", ".join(name for name in wanted if shutil.which(name, path=place))
    detail = f"{there or 'none'}" + (f"; to have more inside, install: {', '.join(missing)}" if missing else "")
    return [*checks, Check("programs", True, detail)]


def network() -> Check:
    """Never fatal: without a way out, sandboxes have their own loopback alone."""
    command = [sys.executable, "-I", "-S", "-c", _TRY_WAY_OUT, linux.__file__, netlink.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode == 0:
        return Check("network", True, "sandboxes reach the internet by TCP and DNS, as far as their rules allow")
    detail = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    way = "the kernel needs nf_tables with NAT (sudo modprobe nft_chain_nat)"
    return Check("network", True, f"sandboxes reach nothing but their own loopback ({detail}); to change that, {way}")


def limits(found: Enforced, uid: int) -> Check:
    """Never fatal: what is not enforced, a sandbox takes from the others and the host."""
    detail = found.describe()
    if found.missing:
        way = "start the server as `systemd-run --user --scope -p Delegate=yes me2b serve`"
        if uid == 0:
            way = "let the server write to its control group (in a container: --cgroupns=private and a writable one)"
        detail += f" ({'; '.join(found.missing)}; to have more, {way})"
    return Check("limits", True, detail)


def trial(data_dir: str | os.PathLike[str] | None = None) -> list[Check]:
    """Start a sandbox and end it; what it can be kept to."""
    from managed_e2b.local.runtime.bubblewrap import BubblewrapRuntime

    async def attempt() -> tuple[str, Enforced]:
        runtime = BubblewrapRuntime(data_dir)
        async with asyncio.timeout(_TRIAL_SECONDS):
            await runtime.start()
            try:
                await (await runtime.create("doctor")).kill()
                return runtime.describe(), runtime.enforced
            finally:
                await runtime.close()

    try:
        where, enforced = asyncio.run(attempt())
    except (RuntimeUnavailable, TimeoutError) as error:
        return [Check("a sandbox", False, str(error) or f"not ready after {_TRIAL_SECONDS} s")]
    return [Check("a sandbox", True, f"starts; {where}"), limits(enforced, os.geteuid())]
