"""What all sandboxes of one server stand on: their ids, the directory of their files, and the layers of `base`."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from managed_e2b.local.runtime import bwrap, cgroups, doctor, idmap, storage
from managed_e2b.local.runtime.base import GuestGone, RuntimeUnavailable
from managed_e2b.local.runtime.cgroups import Tree
from managed_e2b.local.runtime.idmap import IdMap
from managed_e2b.local.runtime.images import LAYERS, Image
from managed_e2b.local.runtime.layers import Layout
from managed_e2b.local.runtime.limits import Enforced, Limits
from managed_e2b.local.runtime.link import OperationFailed, SpawnerLink
from managed_e2b.local.runtime.storage import Home

_log = logging.getLogger(__name__)
_CLEAN_ATTEMPTS = 20


class Ground:
    """Found and laid by a spawner when a server starts, taken away when it ends.

    `view` is our directory as the spawner and the sandboxes' ids reach it; `overlay` is False where no place can hold
    the upper layer of one, and what sandboxes change is kept in memory.
    """

    def __init__(self, data_dir: str | os.PathLike[str] | None) -> None:
        self._data_dir = data_dir
        self._home: Home | None = None
        self._program = ""
        self._python = _python_elsewhere()
        self.ids: IdMap = idmap.detect()
        self._group = f"me2b-{secrets.token_hex(8)}"
        self._secret = secrets.token_bytes(32)
        self._trees: list[Any] = []  # as `cgroups.Tree.as_list`
        self.enforced = Enforced()
        self.view = ""
        self.overlay = True

    @property
    def home(self) -> Home:
        """Raises RuntimeUnavailable when there is none (any more)."""
        if self._home is None:
            raise RuntimeUnavailable("the runtime is not started")
        return self._home

    def describe(self) -> str:
        """Where the sandboxes' files are, for people."""
        if self._home is None:
            return "not started"
        return f"files in {self._home.top}" if self.overlay else "files in memory: no place here can hold an overlay"

    def layout(self, sandbox_id: str, image: Image) -> Layout:
        """Where the files of a new sandbox lie."""
        return Layout(self.view, self._place(sandbox_id), image.root, image.usr, memory=not self.overlay)

    def _place(self, sandbox_id: str) -> str:
        """The name of its directory, which every user of the host can read: in `ps`, and among the mounts.

        The id lets who knows it in to the sandbox's ports.
        """
        return hashlib.blake2b(sandbox_id.encode(), key=self._secret, digest_size=10).hexdigest()

    def command_line(self, layout: Layout, limits: Limits) -> list[str]:
        """bubblewrap's, for a sandbox with these files and limits."""
        binds = bwrap.host_binds(self._python) if layout.usr is not None else []
        return bwrap.arguments(self._program, layout.merged_root, layout.merged_usr, binds, limits.memory)

    async def lay(self, spawner: SpawnerLink, program: Path) -> Image:
        """Find a place, clear it of what servers that died have left, and make `base` there.

        Raises RuntimeUnavailable, OperationFailed and GuestGone.
        """
        await self._enter_namespaces(spawner)
        await self._settle(spawner)
        await self._remove_abandoned(spawner)
        self._install(program)
        return await self._build_base(spawner)

    async def show(self, spawner: SpawnerLink) -> None:
        """Make a spawner that comes later see all this. Raises as `lay`."""
        await self._enter_namespaces(spawner)
        await spawner.call("view", directory=str(self.home.top))

    async def _enter_namespaces(self, spawner: SpawnerLink) -> None:
        claimed = (await spawner.call("claim", name=self._group, server=os.getpid())).value
        self._trees = claimed["trees"]
        self.enforced = enforced(self._trees, claimed["missing"])
        ids = self.ids
        helpers = [shutil.which(name) or name for name in ("newuidmap", "newgidmap")] if ids.via == "helpers" else []
        try:
            await spawner.call("configure", **asdict(ids), helpers=helpers, trees=self._trees)
        except OperationFailed as error:
            detail, fix = doctor.explain_refusal(doctor.sysctls(), os.geteuid())
            if error.step == "id map":
                detail, fix = error.message, "correct /etc/subuid and /etc/subgid"
            raise RuntimeUnavailable(f"user namespaces are refused ({error.message}; {detail}): {fix}") from error

    async def _settle(self, spawner: SpawnerLink) -> None:
        """Take the first place that can hold an overlay's upper layer; else the first one, with changes in memory."""
        refused: list[str] = []
        places = storage.candidates(self._data_dir, os.geteuid(), os.environ)
        places = [place for place in places if not storage.too_small(place)]
        for place in [*places, None]:
            if self._home is not None:
                await self.clear(spawner)
            try:
                home = storage.claim(place or places[0], self.ids)
            except RuntimeUnavailable as error:
                refused.append(str(error))
                continue
            top = (await spawner.call("view", directory=str(home.top))).value
            home.note({"groups": [directory for directory, _, _ in self._trees]})
            self._home, self.view = home, f"{top}/{home.name}"
            if place is None:
                self.overlay = False
                self._look_at_disk()
                return
            check = (await spawner.call("check_overlay", directory=f"{self.view}/check")).value
            if check["ok"]:
                self._look_at_disk()
                return
            refused.append(f"{place}: {check['detail']}")
        raise RuntimeUnavailable(f"no place for sandboxes: {'; '.join(refused)}")

    def _look_at_disk(self) -> None:
        room = os.statvfs(self.home.path)
        self.enforced = replace(self.enforced, disk_bytes=room.f_blocks * room.f_frsize)

    async def _remove_abandoned(self, spawner: SpawnerLink) -> None:
        for old in storage.abandoned(self.home.top):
            view = f"{os.path.dirname(self.view)}/{old.name}"
            for attempt in range(_CLEAN_ATTEMPTS):
                try:
                    await spawner.call("remove_groups", directories=old.noted().get("groups", []))
                    await spawner.call("empty", directory=view)
                    old.release()
                except OSError as error:
                    _log.warning("cannot remove %s of an earlier server: %s", old.path, error.strerror)
                    break
                except OperationFailed as error:
                    if error.errno == errno.ENOTEMPTY and attempt + 1 < _CLEAN_ATTEMPTS:
                        await asyncio.sleep(0.05)  # its last processes are being killed this moment
                        continue
                    _log.warning("cannot remove %s of an earlier server: %s", old.path, error.message)
                    os.close(old.lock)
                else:
                    _log.warning("removed %s, left by a server that died", old.path)
                break

    def _install(self, program: Path) -> None:
        tools = self.home.path / "tools"
        tools.mkdir(mode=0o755)
        installed = bwrap.install_copy(program, tools)
        if os.geteuid() == 0:
            self._give_to_sandboxes(tools, *tools.rglob("*"))
        inside = tools in installed.parents
        self._program = f"{self.view}/tools/{installed.relative_to(tools)}" if inside else str(installed)

    def _give_to_sandboxes(self, *paths: Path) -> None:
        """Everything in our home is of the sandboxes' root, which can remove it again."""
        for path in paths:
            os.chown(path, self.ids.root_uid, self.ids.root_gid)

    async def _build_base(self, spawner: SpawnerLink) -> Image:
        home = self.home
        kept = home.keep(self.ids)
        facts: dict[str, Any] = {"one_id": not self.ids.full, "python": self._python}
        built = await spawner.call(
            "build",
            directory=f"{self.view}/guests",
            kept=f"{os.path.dirname(self.view)}/{kept.name}",
            scratch=f"{self.view}/new",
            layers=f"{self.view}/{LAYERS}",
            home=f"{self.view}/home",
            facts={**facts, "made_by": storage.made_by(self.ids)},
        )
        home.retire(kept, built.value["name"])
        for line in built.value["missing"]:
            _log.warning("sandboxes lack %s", line)
        layers = f"../{kept.name}/{built.value['name']}"
        return Image(("home", f"{layers}/root"), (f"{layers}/usr",))

    async def remove_remains(self, spawner: SpawnerLink, sandbox_id: str) -> None:
        """The directory of a sandbox that died with an earlier spawner. Raises GuestGone."""
        try:
            await spawner.call("bury", sandbox=sandbox_id, directory=f"{self.view}/guests/{self._place(sandbox_id)}")
        except OperationFailed as error:
            _log.warning("cannot remove what sandbox %s left: %s", sandbox_id, error.message)

    async def clear(self, spawner: SpawnerLink) -> None:
        """Remove our directory and all that is in it. May be called again."""
        home, self._home = self._home, None
        if home is None:
            return
        try:
            await spawner.call("remove_groups", directories=[directory for directory, _, _ in self._trees])
            await spawner.call("empty", directory=self.view)
            home.release()
        except GuestGone:
            os.close(home.lock)  # the next server here removes it
        except OperationFailed as error:
            _log.warning("cannot remove %s: %s", home.path, error)
            os.close(home.lock)


def enforced(trees: Sequence[Any], missing: Sequence[str]) -> Enforced:
    """What control groups like these keep sandboxes to."""
    found = [Tree.parse(value) for value in trees]
    controllers = frozenset[str]().union(*(tree.controllers for tree in found))
    return Enforced(controllers, cgroups.freezer(found) is not None, missing=tuple(missing))


def _python_elsewhere() -> str | None:
    """This interpreter's own installation, for hosts without /usr/bin/python3, if everybody may read it."""
    prefix = os.path.realpath(sys.base_prefix)
    if os.access("/usr/bin/python3", os.X_OK) or not os.path.isdir(f"{prefix}/lib"):
        return None
    part = prefix
    while part != "/":
        if not os.stat(part).st_mode & 0o001:
            return None
        part = os.path.dirname(part)
    return prefix
