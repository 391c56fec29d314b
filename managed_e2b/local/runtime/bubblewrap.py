"""Sandboxes as Linux namespaces, through bubblewrap: the runtime that the local server uses."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from managed_e2b.local.runtime import bwrap, channel, doctor, idmap, storage
from managed_e2b.local.runtime.base import PLAIN, Exit, GuestError, GuestGone, GuestSpec, RuntimeUnavailable
from managed_e2b.local.runtime.deaths import MOST, WINDOW, Deaths
from managed_e2b.local.runtime.guest import BubblewrapGuest
from managed_e2b.local.runtime.idmap import IdMap
from managed_e2b.local.runtime.images import BASE, LAYERS, MAX_LAYERS, Image, Images
from managed_e2b.local.runtime.layers import Layout
from managed_e2b.local.runtime.link import OperationFailed, SpawnerLink
from managed_e2b.local.runtime.storage import Home

_log = logging.getLogger(__name__)
_SANDBOX_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LAUNCH_SECONDS = 30
_CLEAN_ATTEMPTS = 20
_KILLED = Exit(code=None, signal=9)
_PAUSE = 1.0  # seconds before the next try to start a process where the host allowed none


class BubblewrapRuntime:
    """`base.Runtime`. One object a server process and event loop.

    `data_dir`: where sandboxes keep their files; None chooses /var/lib/me2b for root and ~/.cache/me2b/local for
    others, and memory (/dev/shm) where neither can hold an overlay.
    """

    def __init__(self, data_dir: str | os.PathLike[str] | None = None) -> None:
        self._data_dir = data_dir
        self._ids: IdMap
        self._spawner: SpawnerLink | None = None
        self._next_spawner: asyncio.Task[None] | None = None
        self._deaths = Deaths()
        self._failed = asyncio.Event()
        self._reason = "the runtime is not started"
        self._home: Home | None = None
        self._view = ""  # our home as the spawner sees it
        self._images = Images()
        self._overlay = True
        self._program = ""
        self._python: str | None = None
        self._guests: dict[str, BubblewrapGuest] = {}
        self._launching: dict[str, asyncio.Task[BubblewrapGuest]] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._exits: dict[int, asyncio.Future[Exit]] = {}

    @property
    def ids(self) -> IdMap:
        """Which ids of the host stand for those inside. Once started."""
        return self._ids

    @property
    def spawner_link(self) -> SpawnerLink:
        """The process that makes sandboxes. Raises RuntimeUnavailable when there is none."""
        if self._spawner is None or self._failed.is_set():
            raise RuntimeUnavailable(self._reason)
        return self._spawner

    @property
    def guests_directory(self) -> Path:
        """Where each sandbox has a directory of its own, as the server sees it. Raises RuntimeUnavailable."""
        if self._home is None:
            raise RuntimeUnavailable("the runtime is not started")
        return self._home.path / "guests"

    @property
    def live_sandboxes(self) -> int:
        """How many sandboxes are there: being made, running, or being ended."""
        return len(self._guests) + len(self._launching)

    def describe(self) -> str:
        """Where the sandboxes' files are, for people. Once started."""
        if self._home is None:
            return "not started"
        return f"files in {self._home.top}" if self._overlay else "files in memory: no place here can hold an overlay"

    # -- start -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        program = bwrap.find()
        if program is None:
            raise RuntimeUnavailable(f"bubblewrap is missing: {doctor.INSTALL_BUBBLEWRAP}")
        if not os.access("/bin/bash", os.X_OK):
            raise RuntimeUnavailable("/bin/bash is missing: install bash")
        _raise_descriptor_limit()
        self._ids = idmap.detect()
        self._python = _python_elsewhere()
        try:
            self._spawner = await SpawnerLink.start(self._on_event, self._on_spawner_end)
            await self._enter_namespaces(self._spawner)
            await self._settle(self._spawner)
            await self._prepare(self._spawner, program)
        except GuestGone as error:
            await self.close()
            raise RuntimeUnavailable("the process that makes sandboxes died; its words are on stderr") from error
        except BaseException:
            await self.close()
            raise

    async def _enter_namespaces(self, spawner: SpawnerLink) -> None:
        ids = self._ids
        helpers = [shutil.which(name) or name for name in ("newuidmap", "newgidmap")] if ids.via == "helpers" else []
        try:
            await spawner.call(
                "configure", uids=ids.uids, gids=ids.gids, via=ids.via, helpers=helpers, owners=ids.owners
            )
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
                await self._leave(spawner)
            try:
                home = storage.claim(place or places[0], self._ids)
            except RuntimeUnavailable as error:
                refused.append(str(error))
                continue
            top = (await spawner.call("view", directory=str(home.top))).value
            self._home, self._view = home, f"{top}/{home.name}"
            if place is None:
                self._overlay = False
                return
            check = (await spawner.call("check_overlay", directory=f"{self._view}/check")).value
            if check["ok"]:
                return
            refused.append(f"{place}: {check['detail']}")
        raise RuntimeUnavailable(f"no place for sandboxes: {'; '.join(refused)}")

    async def _leave(self, spawner: SpawnerLink) -> None:
        home, self._home = self._home, None
        if home is None:
            return
        try:
            await spawner.call("empty", directory=self._view)
            home.release()
        except GuestGone:
            os.close(home.lock)  # the next server here removes it
        except OperationFailed as error:
            _log.warning("cannot remove %s: %s", home.path, error)
            os.close(home.lock)

    async def _prepare(self, spawner: SpawnerLink, program: Path) -> None:
        home = self._home
        if home is None:
            raise RuntimeUnavailable("no place for sandboxes")
        await self._remove_abandoned(spawner, home)
        tools = home.path / "tools"
        tools.mkdir(mode=0o755)
        installed = bwrap.install_copy(program, tools)
        if os.geteuid() == 0:  # everything in our home is of the sandboxes' root, which can remove it again
            for path in (tools, *tools.rglob("*")):
                os.chown(path, self._ids.root_uid, self._ids.root_gid)
        inside = tools in installed.parents
        self._program = f"{self._view}/tools/{installed.relative_to(tools)}" if inside else str(installed)
        kept = home.keep(self._ids)
        built = await spawner.call(
            "build",
            directory=f"{self._view}/guests",
            kept=f"{os.path.dirname(self._view)}/{kept.name}",
            scratch=f"{self._view}/new",
            layers=f"{self._view}/{LAYERS}",
            home=f"{self._view}/home",
            facts={"one_id": not self._ids.full, "python": self._python, "made_by": storage.made_by(self._ids)},
        )
        layers = f"../{kept.name}/{built.value['name']}"
        self._images.add(BASE, Image(("home", f"{layers}/root"), (f"{layers}/usr",)))
        home.retire(kept, built.value["name"])
        for line in built.value["missing"]:
            _log.warning("sandboxes lack %s", line)

    async def _remove_abandoned(self, spawner: SpawnerLink, home: Home) -> None:
        for old in storage.abandoned(home.top):
            view = f"{os.path.dirname(self._view)}/{old.name}"
            for attempt in range(_CLEAN_ATTEMPTS):
                try:
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
                    _log.info("removed %s, left by a server that died", old.path)
                break

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    async def create(self, sandbox_id: str, spec: GuestSpec = PLAIN) -> BubblewrapGuest:
        if not _SANDBOX_ID.fullmatch(sandbox_id) or sandbox_id in self._guests or sandbox_id in self._launching:
            raise ValueError(f"not a new sandbox id: {sandbox_id!r}")
        self.spawner_link  # noqa: B018 - raises: not started, or failed
        image = self._images.get(spec.image)
        self._images.hold(image)
        launching = asyncio.create_task(self._launch_surely(sandbox_id, image))
        self._launching[sandbox_id] = launching
        launching.add_done_callback(lambda _: self._launching.pop(sandbox_id, None))
        try:
            return await asyncio.shield(launching)
        except asyncio.CancelledError:
            launching.add_done_callback(self._kill_unwanted)
            raise

    async def _launch_surely(self, sandbox_id: str, image: Image) -> BubblewrapGuest:
        """A spawner that dies under it costs a new sandbox only time."""
        try:
            spawner = await self._living_spawner()
            try:
                return await self._launch(spawner, sandbox_id, image)
            except GuestGone:
                spawner = await self._living_spawner()
            try:
                await self._remove_remains(spawner, sandbox_id)
                return await self._launch(spawner, sandbox_id, image)
            except GuestGone as error:
                raise RuntimeUnavailable("the process that makes sandboxes died") from error
        except BaseException:
            self._discard(self._images.drop(image))
            raise

    async def _launch(self, spawner: SpawnerLink, sandbox_id: str, image: Image) -> BubblewrapGuest:
        layout = Layout(self._view, sandbox_id, image.root, image.usr, memory=not self._overlay)
        directory = f"{self._view}/{layout.top}"
        binds = bwrap.host_binds(self._python) if image.usr is not None else []
        argv = bwrap.arguments(self._program, layout.merged_root, layout.merged_usr, binds)
        try:
            async with asyncio.timeout(_LAUNCH_SECONDS):
                reply = await spawner.call("launch", sandbox=sandbox_id, argv=argv, layout=asdict(layout))
        except (OperationFailed, TimeoutError) as error:
            with contextlib.suppress(GuestGone, OperationFailed):
                await spawner.call("bury", sandbox=sandbox_id, directory=directory)
            detail = error.message if isinstance(error, OperationFailed) else f"not ready after {_LAUNCH_SECONDS} s"
            raise RuntimeUnavailable(f"a sandbox did not start ({detail}): {doctor.explain_launch(detail)}") from error
        guest = BubblewrapGuest(
            sandbox_id,
            directory,
            layout.changes,
            spawner,
            reply.value["pid"],
            reply.fds,
            self._expect_exit,
            functools.partial(self._commit, image),
            functools.partial(self._forget, image),
        )
        self._guests[sandbox_id] = guest
        return guest

    def _kill_unwanted(self, task: asyncio.Task[BubblewrapGuest]) -> None:
        """The caller of `create` was cancelled while it went on: nobody else will kill what came of it."""
        if not task.cancelled() and task.exception() is None:
            self._do(task.result().kill())

    def _do(self, chore: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(chore)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task

    def _forget(self, image: Image, guest: BubblewrapGuest) -> None:
        self._guests.pop(guest.sandbox_id, None)
        self._discard(self._images.drop(image))

    # -- images ------------------------------------------------------------------------------------------------------

    async def _commit(self, below: Image, name: str, guest: BubblewrapGuest, changes: Sequence[str]) -> None:
        """`Guest.commit`, once its processes stand still."""
        if name in self._images:
            raise ValueError(f"there is an image {name!r}")
        if not changes:
            raise GuestError(errno.EOPNOTSUPP, "its files are kept in a memory of its own: no place here can hold more")
        if len(below.root) >= MAX_LAYERS:
            raise GuestError(errno.EMLINK, f"it is made of {MAX_LAYERS} layers already")
        layer = self._images.new_layer()
        try:
            await self.spawner_link.call("keep", directories=list(changes), layer=f"{self._view}/{layer}")
            self._images.add(name, below.on_top(layer))
        except BaseException:
            self._discard([layer])
            raise

    async def remove_image(self, image: str) -> None:
        await self._remove_layers(self._images.remove(image))

    def _discard(self, layers: Sequence[str]) -> None:
        if layers:
            self._do(self._remove_layers(layers))

    async def _remove_layers(self, layers: Sequence[str]) -> None:
        for layer in layers:
            try:
                await self.spawner_link.call("remove", directory=f"{self._view}/{layer}")
            except (GuestGone, RuntimeUnavailable):
                return  # removed with all that is ours, at the end
            except OperationFailed as error:
                _log.warning("cannot remove %s: %s", layer, error.message)

    def _expect_exit(self, job: int) -> asyncio.Future[Exit]:
        future: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._exits[job] = future
        future.add_done_callback(lambda _: self._exits.pop(job, None))
        return future

    def _on_event(self, message: channel.Message) -> None:
        future = self._exits.get(message.get("job", 0))
        if message["event"] == "exit" and future is not None and not future.done():
            future.set_result(Exit(message["code"], message["signal"]))

    # -- when the spawner dies ---------------------------------------------------------------------------------------

    def _on_spawner_end(self) -> None:
        """Every sandbox dies with the spawner, and every process in them. New ones get a new spawner."""
        for future in list(self._exits.values()):
            if not future.done():
                future.set_result(_KILLED)
        started = self._spawner is not None and self._home is not None
        if started and (self._next_spawner is None or self._next_spawner.done()):
            self._next_spawner = asyncio.create_task(self._replace_spawner(list(self._guests.values())))

    async def _replace_spawner(self, dead: list[BubblewrapGuest]) -> None:
        """`dead`: the sandboxes that it took with it."""
        why = "it was killed"
        while self._deaths.add(time.monotonic()):
            _log.warning("the process that makes sandboxes died, and %d sandboxes with it; starting another", len(dead))
            try:
                spawner = await self._start_spawner()
            except GuestGone:
                continue  # it died as well
            except OSError as error:
                why = error.strerror or str(error)
                await asyncio.sleep(_PAUSE)
                continue
            except RuntimeUnavailable as error:
                self._give_up(str(error))
                return
            old, self._spawner = self._spawner, spawner
            if old is not None:
                await old.close()
            if not spawner.link.closed:
                self._do(self._bury(spawner, dead))
                return
        self._give_up(f"the process that makes sandboxes died more than {MOST} times within {WINDOW:g} s: {why}")

    async def _start_spawner(self) -> SpawnerLink:
        if self._home is None:
            raise RuntimeUnavailable(self._reason)
        spawner = await SpawnerLink.start(self._on_event, self._on_spawner_end)
        try:
            await self._enter_namespaces(spawner)
            await spawner.call("view", directory=str(self._home.top))
        except BaseException:
            await spawner.close()
            raise
        return spawner

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._failed.set()

    async def _living_spawner(self) -> SpawnerLink:
        if self._next_spawner is not None:
            await asyncio.wait([self._next_spawner])
            self._next_spawner.result()
        return self.spawner_link

    async def _bury(self, spawner: SpawnerLink, dead: list[BubblewrapGuest]) -> None:
        """Remove the files of sandboxes that died with their spawner."""
        for guest in dead:
            await guest.kill()
            try:
                await self._remove_remains(spawner, guest.sandbox_id)
            except GuestGone:
                return  # this spawner died too; what is left is removed at the end
            except OperationFailed as error:
                _log.warning("cannot remove what sandbox %s left: %s", guest.sandbox_id, error.message)

    async def _remove_remains(self, spawner: SpawnerLink, sandbox_id: str) -> None:
        await spawner.call("bury", sandbox=sandbox_id, directory=f"{self._view}/guests/{sandbox_id}")

    async def failed(self) -> RuntimeUnavailable:
        await self._failed.wait()
        return RuntimeUnavailable(self._reason)

    async def close(self) -> None:
        while self._launching:
            await asyncio.wait(list(self._launching.values()))
        if self._next_spawner is not None:
            await asyncio.wait([self._next_spawner])
        try:
            await asyncio.gather(*(guest.kill() for guest in list(self._guests.values())))
            await asyncio.gather(*self._chores)
        finally:
            spawner, self._spawner = self._spawner, None
            if spawner is not None:
                await self._leave(spawner)
                await spawner.close()


def _raise_descriptor_limit() -> None:
    """A sandbox takes four descriptors and a command up to five: the usual soft limit would end at 200 sandboxes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
