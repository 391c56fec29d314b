"""The overlays of one sandbox: its template's layers below, its own changes on top. Where they lie, and their mounting.

They are mounted here and not by bubblewrap for two reasons. `volatile`: without it, the end of each sandbox would sync
the host's whole filesystem below it. And relative paths: what /proc/mounts shows inside tells nothing of the host.

Standard library only; `mount` runs in a fork of the spawner.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from managed_e2b.local.runtime import children, linux

VOLUME_STEP = "volume"
"""What a failure to mount a volume is told with."""


@dataclass(frozen=True)
class Layout:
    """Paths are relative to `home`, lower layers topmost first. `usr`: what lies over the host's /usr; None: the root
    has its own. `memory`: changes are kept in a tmpfs of its own. `volumes`: absolute paths inside at which some are.
    """

    home: str
    sandbox: str
    root: Sequence[str]
    usr: Sequence[str] | None
    memory: bool
    volumes: Sequence[str] = ()

    @property
    def top(self) -> str:
        """The sandbox's own directory."""
        return f"guests/{self.sandbox}"

    @property
    def merged_root(self) -> str:
        """Where the sandbox's root is mounted, for bubblewrap to take it from."""
        return f"{self.home}/{self.top}/root-merged"

    @property
    def merged_usr(self) -> str | None:
        return None if self.usr is None else f"{self.home}/{self.top}/usr-merged"

    @property
    def overlays(self) -> list[tuple[str, list[str]]]:
        """The name and the lower layers of each."""
        return [("root", [*self.root])] + ([] if self.usr is None else [("usr", [*self.usr, "/usr"])])

    @property
    def changes(self) -> list[str]:
        """Directories of the host that hold what the sandbox changed."""
        return [] if self.memory else [f"{self.home}/{self.top}/{name}" for name, _ in self.overlays]


def options(lower: Sequence[str], upper: str) -> str:
    """Of an overlay as a user namespace may mount it."""
    return f"lowerdir={':'.join(lower)},upperdir={upper},workdir={upper}-work,userxattr,volatile"


def mount(layout: Layout, volumes: Sequence[int] = ()) -> None:
    """Mount both overlays in a new mount namespace, as root of the sandbox's user namespace, and in them its volumes.

    `volumes`: mounts that are mounted nowhere yet, as many as `layout.volumes`. Raises StepError.
    """
    with children.step("prepare directories"):
        os.chdir(layout.home)
        os.mkdir(layout.top)
    with children.step("mount"):
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        if layout.memory:
            linux.mount("me2b", layout.top, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
        for name, lower in layout.overlays:
            upper = f"{layout.top}/{name}"
            for directory in (upper, f"{upper}-work", f"{upper}-merged"):
                os.mkdir(directory)
            linux.mount("overlay", f"{upper}-merged", "overlay", linux.MS_NODEV, options(lower, upper))
    with children.step(VOLUME_STEP):
        _mount_volumes(layout, volumes)


def _mount_volumes(layout: Layout, volumes: Sequence[int]) -> None:
    """What lies there already is the image's: a link in it could lead anywhere, and so none is followed."""
    for path, tree in zip(layout.volumes, volumes, strict=True):
        place = os.open(layout.merged_root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in path.strip("/").split("/"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=place)
            parent, place = place, linux.open_directory_beneath(place, name)
            os.close(parent)
        linux.move_mount(tree, place)
        os.close(place)
        os.close(tree)
