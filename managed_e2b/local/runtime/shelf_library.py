"""`library.Library` over a shelf: layers lie on it, and the server's own directory has links to those it uses."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from managed_e2b.local.runtime.base import GuestError
from managed_e2b.local.runtime.image_store import ImageStore
from managed_e2b.local.runtime.images import MAX_LAYERS, Image
from managed_e2b.local.runtime.library import Layer
from managed_e2b.local.runtime.link import SpawnerLink
from managed_e2b.local.runtime.shelf import Entry, Shelf, boot_id

MOST_BYTES = 20 * 1024**3
"""Of all kept layers together."""
LAYER_BYTES = 16 * 1024**3
LAYER_ENTRIES = 2_000_000
_AT_ONCE = 2  # archives that are fetched and unpacked


class ShelfLibrary:
    """`home` is the server's directory as it sees it itself, `view` as the spawner does; `provide` makes an image that
    is on offer.
    """

    def __init__(
        self,
        images: ImageStore,
        shelf: Shelf,
        spawner: Callable[[], SpawnerLink],
        provide: Callable[[str], Awaitable[None]],
        home: Path,
        view: str,
    ) -> None:
        self._images = images
        self._shelf = shelf
        self._spawner = spawner
        self._provide = provide
        self._home = home
        self._view = view
        self._links: dict[str, str] = {}  # layer in our directory → on the shelf
        self._pending: set[str] = set()  # layers that are not an image's yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()  # what is found on the shelf must not be taken away before it is used

    @property
    def directory(self) -> Path:
        return self._shelf.index

    @property
    def one_id(self) -> bool:
        return not self._shelf.ids.full

    def identity(self, image: str) -> str | None:
        found = self._images.get(image)
        return None if found.layers else repr((found.root, found.usr))

    async def name(self, image: str, name: str) -> None:
        await self._provide(image)
        self._images.add(name, self._images.get(image))

    async def recall(self, key: str, name: str) -> dict[str, Any] | None:
        async with self._lock:
            entry = await asyncio.to_thread(self._shelf.find, key)
            if entry is None:
                return None
            layers = [await self._link(layer) for layer in entry.layers]
        root = (*(f"{layer}/root" for layer in layers), *entry.root)
        usr = None if entry.usr is None else (*(f"{layer}/usr" for layer in layers), *entry.usr)
        self._add(name, Image(root, usr), layers)
        return dict(entry.note)

    async def keep(self, image: str, key: str, note: Mapping[str, Any]) -> None:
        keeping = asyncio.create_task(self._keep(image, key, note))
        self._tasks.add(keeping)
        keeping.add_done_callback(self._tasks.discard)
        await asyncio.shield(keeping)  # what is half on the shelf is of no use to anybody

    async def tidy(self) -> None:
        """Take away what is kept beyond the limit. At the start and at the end, when nothing is made of our images."""
        if self._shelf.there:
            self._links.clear()
            await self._make_room()

    async def settled(self) -> None:
        """Wait until nothing is being kept."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, image: str, key: str, note: Mapping[str, Any]) -> None:
        held = self._images.hold(image)
        try:
            async with self._lock:  # a layer may be of several images
                layers = [await self._shelve(layer) for layer in held.ordered]
            durable = held.usr is None and all(layer in self._shelf.durable for layer in layers)
            below = len(layers)
            usr = None if held.usr is None else list(held.usr[below:])
            entry = Entry(layers, list(held.root[below:]), usr, None if durable else boot_id(), note)
            await asyncio.to_thread(self._shelf.add, key, entry)
        finally:
            self._images.release(held)
        await self._make_room()

    async def assemble(self, name: str, layers: Sequence[Layer]) -> int:
        distinct = list({layer.digest: layer for layer in reversed(layers)}.values())  # topmost first
        if len(distinct) > MAX_LAYERS:
            raise GuestError(errno.EMLINK, f"it has more than {MAX_LAYERS} layers")
        turns = asyncio.Semaphore(_AT_ONCE)

        async def have(layer: Layer) -> tuple[str, int]:
            async with turns:
                return await self._have(layer)

        tasks = [asyncio.create_task(have(layer)) for layer in distinct]
        try:
            found = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._drop([end[0] for end in ended if not isinstance(end, BaseException)])
            raise
        paths = [path for path, _ in found]
        self._add(name, Image(tuple(f"{path}/root" for path in paths), None), paths)
        await self._make_room()
        return sum(left_out for _, left_out in found)

    async def _have(self, layer: Layer) -> tuple[str, int]:
        """A layer of ours, and how many device nodes it lacks."""
        async with self._lock:
            shelved = await asyncio.to_thread(self._shelf.by_digest, layer.digest)
            if shelved is not None:
                return await self._link(shelved), 0
        archive = await layer.open()
        path = self._new_layer()
        try:
            bounds = {"size": LAYER_BYTES, "entries": LAYER_ENTRIES}
            directory = f"{self._view}/{path}"
            unpacked = (await self._spawner().call("unpack", [archive], directory=directory, bounds=bounds)).value
            shelved = await asyncio.to_thread(self._shelf.put, self._home / path, unpacked["size"], layer.digest)
        except BaseException:
            self._drop([path])
            raise
        finally:
            os.close(archive)
        self._links[path] = shelved
        return path, unpacked["left_out"]

    def _new_layer(self) -> str:
        path = self._images.new_layer()
        self._pending.add(path)
        return path

    def _drop(self, layers: Sequence[str]) -> None:
        self._pending.difference_update(layers)
        self._images.discard(layers)

    async def _link(self, layer: str) -> str:
        path = self._new_layer()
        await asyncio.to_thread(self._shelf.link, layer, self._home / path)
        self._links[path] = layer
        return path

    async def _shelve(self, path: str) -> str:
        if path not in self._links:
            size = (await self._spawner().call("measure", directory=f"{self._view}/{path}")).value
            self._links[path] = await asyncio.to_thread(self._shelf.put, self._home / path, size)
        return self._links[path]

    def _add(self, name: str, image: Image, layers: Sequence[str]) -> None:
        try:
            self._images.add(name, image)
        except ValueError:
            self._drop(layers)
            raise
        self._pending.difference_update(layers)

    async def _make_room(self) -> None:
        async with self._lock:
            in_use = self._images.in_use | self._pending
            self._links = {path: layer for path, layer in self._links.items() if path in in_use}
            gone = await asyncio.to_thread(self._shelf.make_room, set(self._links.values()))
        for path in gone:
            await self._spawner().call("remove", directory=f"{self._view}/{path.name}")
