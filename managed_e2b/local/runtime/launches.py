"""The spawner's sandboxes, from their launch to their burial. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable
from typing import Any

from managed_e2b.local.runtime import cgroups, channel, children, launch, upkeep
from managed_e2b.local.runtime.cgroups import Tree
from managed_e2b.local.runtime.confine import Confinement
from managed_e2b.local.runtime.desk import BadRequest, Desk, Operation
from managed_e2b.local.runtime.launch import LaunchPipes
from managed_e2b.local.runtime.launcher import Launching, Sandbox
from managed_e2b.local.runtime.layers import Layout
from managed_e2b.local.runtime.spares import Spare
from managed_e2b.local.runtime.userns import OWNERS, MapSpec

_END_SECONDS = 2.0  # for the control groups of sandboxes whose processes are being killed


class Launches:
    """`on_ready` is called with the name of a sandbox that can be worked with."""

    def __init__(self, desk: Desk, on_ready: Callable[[str], None]) -> None:
        self._desk = desk
        self._on_ready = on_ready
        self.sandboxes: dict[str, Sandbox] = {}
        self.groups: list[Tree] = []
        self._bwraps: dict[int, str] = {}
        self._numbers = itertools.count()
        self._seed: tuple[str, Spare] | None = None  # the fork of the next launch, in the groups of that name
        self._spec: MapSpec | None = None
        self._turns = itertools.count(int.from_bytes(os.urandom(2)))  # so that two servers do not share owners
        self.operations: dict[str, Operation] = {
            "configure": self._configure,
            "launch": self._launch,
            "bury": self._bury,
            "remove_groups": self._remove_groups,
        }

    def sandbox(self, name: Any) -> Sandbox:
        """Raises OSError(ESRCH)."""
        sandbox = self.sandboxes.get(name) if isinstance(name, str) else None
        if sandbox is None:
            raise OSError(errno.ESRCH, "no such sandbox")
        return sandbox

    def bwrap_ended(self, pid: int) -> bool:
        """Whether that child, which has ended, was bubblewrap."""
        name = self._bwraps.pop(pid, None)
        sandbox = None if name is None else self.sandboxes.get(name)
        if sandbox is not None:
            sandbox.ended()
        return name is not None

    def dismiss_spares(self) -> None:
        """Of sandboxes, not the seed."""
        for sandbox in self.sandboxes.values():
            sandbox.dismiss_spare()

    def end_all(self) -> None:
        """What is frozen would outlive us: it hears of no death. And nobody else is left to remove the groups."""
        self._drop_seed()
        for sandbox in self.sandboxes.values():
            sandbox.end()
        for tree in self.groups:
            with contextlib.suppress(OSError):  # the next server here tries again
                cgroups.remove_tree(tree.directory, _END_SECONDS)

    def _configure(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        spec = MapSpec(args["uids"], args["gids"], args["via"], args["helpers"], args["owners"])
        self.groups = [Tree.parse(value) for value in args["trees"]]
        self._desk.maintenance = upkeep.keep_user_namespace(spec)
        self._spec = spec
        self._desk.answer(request, {"value": None})

    # -- the fork of the next launch -------------------------------------------------------------------------------

    def sow_anew(self) -> None:
        self._drop_seed()
        self._desk.forks.when_idle(self._sow)

    def _sow(self) -> None:
        """Make it, unless it is there, or there are no groups to be joined."""
        spec = self._spec
        if self._seed is not None or spec is None or not self.groups:
            return
        group, trees, parent = self._new_group(), self.groups, os.getpid()

        def go_on(order: dict[str, Any], fds: list[int]) -> None:
            launch.become_sandbox(
                spec,
                order["owner"],
                Layout(**order["layout"]),
                order["argv"],
                LaunchPipes(*fds[:3]),
                parent,
                Confinement.parse(group, trees, order["limits"]),
                fds[3:],
                grouped=True,
            )

        self._seed = group, self._desk.forks.spare(lambda: cgroups.make(trees, group), go_on, [])

    def _new_group(self) -> str:
        return f"s{next(self._numbers)}"

    def _drop_seed(self) -> None:
        seed, self._seed = self._seed, None
        if seed is not None:
            seed[1].dismiss()

    # -- operations ------------------------------------------------------------------------------------------------

    def _launch(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, argv, layout = args["sandbox"], args["argv"], Layout(**args["layout"])
        spec = self._spec
        if spec is None or not isinstance(name, str) or name in self.sandboxes or name in self._bwraps.values():
            raise BadRequest("not configured, or the sandbox exists")
        Confinement.parse("", self.groups, args["limits"])
        life_reader, life_writer = os.pipe2(os.O_CLOEXEC)
        status_reader, status_writer = os.pipe2(os.O_CLOEXEC)
        info_reader, info_writer = os.pipe2(os.O_CLOEXEC)
        pipes, parent = LaunchPipes(life_reader, status_writer, info_writer), os.getpid()
        ends = [life_reader, status_writer, info_writer]
        owner = None if spec.owners is None else spec.owners + next(self._turns) % OWNERS
        group, bwrap = self._grow({**args, "owner": owner}, [*ends, *fds])
        confinement = Confinement.parse(group, self.groups, args["limits"])
        if bwrap is None:
            bwrap = children.fork(
                lambda: launch.become_sandbox(spec, owner, layout, argv, pipes, parent, confinement, fds)
            )
        channel.close_all(ends)
        self._bwraps[bwrap] = name
        self.sandboxes[name] = Sandbox(bwrap, -1, confinement)
        self._desk.forks.when_idle(self._sow)

        def answer(body: dict[str, Any], ours: list[int]) -> None:
            self._desk.answer(request, body, ours)
            if "errno" not in body:
                self._on_ready(name)

        Launching(
            self._desk.forks,
            lambda: self.sandboxes.get(name),
            answer,
            bwrap,
            status_reader,
            info_reader,
            life_writer,
        ).watch()

    def _grow(self, order: dict[str, Any], fds: list[int]) -> tuple[str, int | None]:
        """The seed becomes the sandbox: its groups and its pid. None: it cannot, and the groups are new ones."""
        seed, self._seed = self._seed, None
        if seed is None:
            return self._new_group(), None
        group, spare = seed
        if len(fds) <= channel.MAX_FDS and spare.order(order, fds):
            self._desk.forks.let_go(spare.pid)
            return group, spare.pid
        spare.dismiss()
        self._desk.clean(lambda: cgroups.remove(self.groups, group))
        return self._new_group(), None

    def _bury(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, directory = args["sandbox"], args["directory"]
        sandbox = self.sandboxes.get(name)
        groups = self.groups

        def remove() -> None:
            def groups_first() -> None:
                if sandbox is not None:
                    cgroups.remove(groups, sandbox.confinement.group)

            if sandbox is not None:
                self.sandboxes.pop(name, None)
                if sandbox.pidfd >= 0:
                    os.close(sandbox.pidfd)
            self._desk.maintain(request, lambda: upkeep.remove_tree(directory), before=groups_first)

        if sandbox is None:
            remove()
        else:
            sandbox.when_ended(remove)

    def _remove_groups(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directories = list(args["directories"])
        if any(tree.directory in directories for tree in self.groups):
            self._drop_seed()
            self.dismiss_spares()
        self._desk.work(request, lambda: max([0, *map(cgroups.remove_tree, directories)]))
