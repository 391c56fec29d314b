"""A registry on the loopback address with stand-ins for the public images that the suites build from.

The suites ask for `ubuntu:22.04` and E2B's own base image. Without the internet they cannot be pulled; a small system
of this host's own programs, under the same names in a real registry, goes through all the same steps.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "local" / "builds"))
import images

NAMES = (
    ("library/ubuntu", "22.04"),
    ("library/ubuntu", "24.04"),
    ("library/ubuntu", "latest"),
    ("library/debian", "latest"),
    ("e2bdev/base", "latest"),
)
MORE_PROGRAMS = (
    *("awk", "basename", "base64", "date", "df", "diff", "du", "expr", "file", "getent", "groups", "head", "hostname"),
    *(
        "install",
        "kill",
        "mktemp",
        "mkfifo",
        "nohup",
        "pgrep",
        "ps",
        "realpath",
        "seq",
        "setsid",
        "sort",
        "stty",
        "tail",
    ),
    *("tee", "timeout", "tty", "uname", "uniq", "wc", "which", "xargs", "yes", "python3", "curl", "ss"),
)
"""What builders of templates expect of an image, as far as this host has it."""


@contextlib.contextmanager
def mirror() -> Iterator[list[str]]:
    """Yields what `me2b serve` has to be told; nothing where there is no docker-registry (Debian's package)."""
    if not images.available():
        print("no docker-registry on this host: images are pulled from where they are", file=sys.stderr)
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="me2b-registry-") as directory, images.serve(Path(directory)) as host:
        more = [name for name in MORE_PROGRAMS if shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")]
        small = images.stand_in()
        root = images.root_layer([*images.PROGRAMS, *more])
        registry, image = images.Registry(host), images.Image([root, *small.layers[1:]], small.env)
        for name, tag in NAMES:
            registry.push(name, image, tag)
        yield ["--registry-mirror", f"docker.io=http://{host}"]
