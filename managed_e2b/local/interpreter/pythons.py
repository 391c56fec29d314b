"""Which Python runs the packages inside: one that sandboxes see below /usr, or a copy of the server's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from managed_e2b.local.interpreter.packages import copy_module
from managed_e2b.local.runtime.base import ImageUnavailable

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
COPY = "/opt/me2b/python"
_NOT_COPIED = {
    "__pycache__",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}
_PROBE_SECONDS = 30
_PROBE = (
    "import asyncio, bz2, ctypes, hashlib, json, multiprocessing, sqlite3, ssl, sysconfig, unittest, uuid, zlib;"
    "print(sysconfig.get_config_var('SOABI'))"
)


@dataclass(frozen=True)
class SandboxPython:
    """`program`: its path inside. `source`: the installation to copy to `COPY` first; None: it is there already."""

    program: str
    source: Path | None


def choose() -> SandboxPython:
    """One that can load what was installed for the server's interpreter."""
    name = f"python{VERSION}"
    own = Path(sys.base_prefix)
    places = [f"{own}/bin/{name}"] if own in (Path("/usr"), Path("/usr/local")) else []
    places += [f"/usr/local/bin/{name}", f"/usr/bin/{name}"]
    for program in places:
        if fits(program):
            return SandboxPython(program, None)
    return SandboxPython(f"{COPY}/bin/{name}", Path(os.path.realpath(own)))


def fits(program: str) -> bool:
    """Whether a program is a whole Python with our ABI that everybody may run."""
    if not os.path.isfile(program) or not os.stat(program).st_mode & 0o001:
        return False
    try:
        probe = subprocess.run(
            [program, "-I", "-S", "-c", _PROBE], capture_output=True, text=True, env={}, timeout=_PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0 and probe.stdout.strip() == sysconfig.get_config_var("SOABI")


def _copy_to_where_it_is_found(library: Path, layer: Path) -> None:
    """Of what the loader searches by itself: a Python may be told to find its library where it was installed."""
    for directory in ("lib", "lib64"):
        if os.path.isdir(f"/usr/{directory}") and not os.path.exists(f"/usr/{directory}/{library.name}"):
            (layer / "usr" / directory).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, layer / "usr" / directory / library.name)


def copy(source: Path, layer: Path) -> None:
    """Copy an installation, without its packages, into a layer. Raises ImageUnavailable and OSError."""
    target = layer / "root" / COPY.lstrip("/")
    name = f"python{VERSION}"
    (target / "bin").mkdir(parents=True)
    shutil.copyfile(os.path.realpath(source / "bin" / name), target / "bin" / name)
    (target / "bin" / name).chmod(0o755)
    for library in (source / "lib").glob("*.so*"):  # its own, and of some distributions of Python what it is linked to
        if library.is_file():
            (target / "lib").mkdir(exist_ok=True)
            shutil.copyfile(library, target / "lib" / library.name)
            if library.name.startswith("libpython"):
                _copy_to_where_it_is_found(library, layer)
    modules = source / "lib" / name
    for parent, directories, files in os.walk(modules):
        directories[:] = [
            entry for entry in directories if entry not in _NOT_COPIED and not entry.startswith("config-")
        ]
        for file in files:
            path = Path(parent, file)
            below = path.relative_to(source)
            copy_module(path, target / below, f"{COPY}/{below}")
    if not fits(str(target / "bin" / name)):
        raise ImageUnavailable(
            f"sandboxes cannot run a copy of {source}: install Python {VERSION} below /usr, or run the server with the "
            "system's Python"
        )
