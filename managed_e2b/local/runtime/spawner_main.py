"""The spawner's program: `python -I -S spawner_main.py FD PACKAGE_ROOT`. See `spawner`.

It must not run `managed_e2b/__init__.py`, which brings the whole manager and its dependencies with it: every process
put into a sandbox begins as a fork of this one. So the packages above `runtime` are empty stand-ins with the right
path.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types


def _stand_in(root: str) -> None:
    name, path = "", root
    for part in ("managed_e2b", "local", "runtime"):
        name, path = f"{name}.{part}".lstrip("."), os.path.join(path, part)
        module = types.ModuleType(name)
        module.__path__ = [path]
        sys.modules[name] = module


def _rename() -> None:
    """Overwrite our command line: forks of ours are seen inside for a moment, where paths of the host are nobody's."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    start, end = int(fields[45]), int(fields[46])
    title = b"me2b-spawner"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, min(len(title), end - start - 1))


if __name__ == "__main__":
    descriptor, package_root = int(sys.argv[1]), sys.argv[2]
    _stand_in(package_root)
    from managed_e2b.local.runtime import spawner

    _rename()
    spawner.main(descriptor)
