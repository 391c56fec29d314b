"""The spawner's operations on files: places for them, layers, volumes, removal. Standard library only."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from importlib import import_module
from typing import Any

from managed_e2b.local.runtime import base_template, upkeep, volume_rooms
from managed_e2b.local.runtime.desk import BadRequest, Desk, Operation
from managed_e2b.local.runtime.forks import Told
from managed_e2b.local.runtime.volume_rooms import Room


class FileOperations:
    """`on_view` is called when our own view of the host has changed: forks made before do not have it."""

    def __init__(self, desk: Desk, on_view: Callable[[], None]) -> None:
        self._desk = desk
        self._on_view = on_view
        self._room: Room | None = None
        self.operations: dict[str, Operation] = {
            "view": self._view,
            "empty": self._empty,
            "check_overlay": self._check_overlay,
            "build": self._build,
            "keep": self._keep,
            "measure": self._measure,
            "unpack": self._unpack,
            "open_room": self._open_room,
            "create_volume": self._create_volume,
            "remove_volume": self._remove_volume,
            "mount_volumes": self._mount_volumes,
            "volume": self._volume,
            "remove": self._remove,
        }

    def _view(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        self._desk.answer(request, {"value": upkeep.reachable(args["directory"])})
        self._on_view()

    def _check_overlay(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory = args["directory"]
        self._desk.maintain(request, lambda: upkeep.try_overlay(directory))

    def _build(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory, layers, kept, scratch, home, facts = (
            args[name] for name in ("directory", "layers", "kept", "scratch", "home", "facts")
        )

        def build() -> dict[str, Any]:
            for path in (directory, layers):
                os.mkdir(path, 0o755)
            return base_template.provide(kept, scratch, home, facts)

        self._desk.maintain(request, build)

    def _empty(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory = args["directory"]
        self._desk.maintain(request, lambda: upkeep.empty(directory))

    def _keep(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directories, layer = list(args["directories"]), args["layer"]
        self._desk.maintain(request, lambda: upkeep.keep(directories, layer))

    def _measure(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory = args["directory"]
        self._desk.maintain(request, lambda: upkeep.measure(directory))

    def _unpack(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory, bounds = args["directory"], args["bounds"]
        if len(fds) != 1:
            raise BadRequest("one archive")
        archive = fds[0]

        def before() -> None:  # it is nobody on the host; and in the fork alone, or every other one would be larger
            import_module("managed_e2b.local.runtime.unpack")

        def work() -> dict[str, int]:
            from managed_e2b.local.runtime import unpack

            return unpack.unpack(archive, directory, unpack.Bounds(**bounds))

        self._desk.maintain(request, work, before, keep=[archive])

    def _open_room(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        store, scratch, overlay = args["store"], args["scratch"], bool(args["overlay"])
        maintenance = self._desk.maintenance

        def opened(told: Told) -> None:
            body, namespace = told
            if namespace:
                self._room = Room(os.dup(namespace[0]), f"{scratch}/all")
            self._desk.answer(request, body)

        self._desk.forks.fork(
            lambda report: volume_rooms.open_room(maintenance, store, scratch, overlay, report), opened
        )

    def _in_room(self, request: int, work: Callable[[str, socket.socket], volume_rooms.Answer | None]) -> None:
        maintenance, room = self._desk.maintenance, self._room
        if room is None:
            raise BadRequest("no room for volumes")
        self._desk.forks.fork(
            lambda report: volume_rooms.visit(maintenance, room, lambda told: work(room.top, told), report),
            self._desk.relay(request),
        )

    def _create_volume(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name = _file_name(args["volume"])
        self._in_room(request, lambda top, _: volume_rooms.create(f"{top}/{name}"))

    def _remove_volume(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name = _file_name(args["volume"])
        self._in_room(request, lambda top, _: volume_rooms.remove(top, name))

    def _mount_volumes(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        names = [_file_name(name) for name in args["volumes"]]
        self._in_room(request, lambda top, _: volume_rooms.mounts([f"{top}/{name}" for name in names]))

    def _volume(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        name, op, more = _file_name(args["volume"]), args["operation"], args["args"]
        self._in_room(request, lambda top, report: volume_rooms.operate(f"{top}/{name}", op, more, report))

    def _remove(self, request: int, args: dict[str, Any], fds: list[int]) -> None:
        directory = args["directory"]
        self._desk.maintain(request, lambda: upkeep.remove_tree(directory))


def _file_name(value: Any) -> str:
    if not isinstance(value, str) or not value or "/" in value or "\0" in value or value.startswith("."):
        raise BadRequest("the name of a volume")
    return value
