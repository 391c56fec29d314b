"""Layers that outlive their server, and an index that tells which images they were: what `shelf_library` keeps.

Two directories beside the server's own. The shelf holds layers, each in a directory with a random name; it belongs to
the sandboxes' root. The index holds small files of the server's own, written whole or not at all:

| file | what it tells |
|---|---|
| `layer-ID` | `size` in bytes |
| `digest-HEX` | `layer`: the ID that the archive with this digest became |
| `image-KEY` | an `Entry`; its time is when it was last used |

Several servers share both. A layer is taken away only while there is no other server.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from managed_e2b.local.runtime.idmap import IdMap
from managed_e2b.local.runtime.storage import Home

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


FORMAT = 1
"""Of what is kept with an image: to be raised when an Entry, or a note of the builds, gets other fields. The shelf is
shared by all versions that ever ran here.
"""


@dataclass(frozen=True)
class Entry:
    """An image: `layers` on the shelf, topmost first, and what lies below them, as of `images.Image`.

    `boot`: of the host, when a layer was not written to disk before it was shelved; a crash may leave it empty.
    """

    layers: list[str]
    root: list[str]
    usr: list[str] | None
    boot: str | None
    note: Mapping[str, Any]


class Shelf:
    """Blocking; for a thread. `most`: bytes of all layers together, past which those go that were not used longest."""

    def __init__(self, home: Home, ids: IdMap, most: int) -> None:
        tag = hashlib.sha256(repr((ids.uids, ids.gids)).encode()).hexdigest()[:8]
        self._home = home
        self.ids = ids
        self._most = most
        self._layers = home.top / f"shelf-{tag}"
        self._index = home.top / f"shelf-{tag}.index"
        self._made = False
        self.durable: set[str] = set()
        """Layers of this server that are on disk."""

    def _open(self) -> None:
        """Make both directories, where they are not there yet. Only who needs them has them."""
        if self._made:
            return
        with self._home.only_one():
            self._layers.mkdir(mode=0o700, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(self._layers, self.ids.root_uid, self.ids.root_gid)
            self._index.mkdir(mode=0o700, exist_ok=True)
        self._made = True

    @property
    def there(self) -> bool:
        """Whether anything was ever kept here."""
        return self._layers.is_dir()

    @property
    def index(self) -> Path:
        self._open()
        return self._index

    def link(self, layer: str, at: Path) -> None:
        """Let a path in the server's own directory mean a layer of the shelf."""
        os.symlink(Path(os.path.relpath(self._layers, at.parent)) / layer, at)

    def put(self, directory: Path, size: int, digest: str | None = None) -> str:
        """Move a new layer here, and leave a link in its place. `digest`: of its archive; it is on disk then."""
        self._open()
        layer = secrets.token_hex(8)
        self._write(f"layer-{layer}", {"size": size})
        directory.rename(self._layers / layer)
        self.link(layer, directory)
        if digest is not None:
            self.durable.add(layer)
            self._write(f"digest-{_name(digest)}", {"layer": layer})
        return layer

    def by_digest(self, digest: str) -> str | None:
        """The layer that an archive became."""
        told = self._read(f"digest-{_name(digest)}")
        layer = None if told is None else told.get("layer")
        if not isinstance(layer, str) or not self._has(layer):
            return None
        self.durable.add(layer)
        return layer

    def find(self, key: str) -> Entry | None:
        """The image that was kept under a key, if all of it is still there."""
        told = self._read(_image_file(key))
        if told is None:
            return None
        entry = Entry(**told)
        if entry.boot not in (None, boot_id()) or not all(self._has(layer) for layer in entry.layers):
            return None
        below = [*entry.root, *(entry.usr or ())]
        if not all((self._home.path / path).is_dir() for path in below):
            return None  # `base` has changed since
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._index / _image_file(key))
        return entry

    def add(self, key: str, entry: Entry) -> None:
        self._open()
        self._write(_image_file(key), asdict(entry))

    def make_room(self, in_use: Collection[str]) -> list[Path]:
        """Move layers out of the shelf until the rest fits: where they are now, for removal.

        Those that no image needs go first, then with their images those that were not used longest. `in_use`: by this
        server. While there is another one, nothing goes.
        """
        self._open()
        with self._home.only_one() as alone:
            if not alone:
                return []
            sizes = {path.name: self._size(path.name) for path in self._layers.iterdir()}
            total = sum(sizes.values())
            users = dict(self._images())
            unneeded = sizes.keys() - set(in_use).union(*users.values())
            gone: list[Path] = []
            while True:
                for layer in unneeded:
                    total -= sizes[layer]
                    gone.append(self._take(layer))
                if total <= self._most or not users:
                    return gone
                oldest = next(iter(users))
                candidates = users.pop(oldest) - set(in_use).union(*users.values())
                unneeded = candidates & sizes.keys() - {path.name for path in gone}
                (self._index / oldest).unlink(missing_ok=True)

    def _images(self) -> Iterator[tuple[str, set[str]]]:
        """The layers of each image, the one that was not used longest first."""
        files = sorted(self._index.glob("image-*"), key=lambda file: (file.stat().st_mtime_ns, file.name))
        for file in files:
            told = self._read(file.name)
            yield file.name, set() if told is None else set(told["layers"])

    def _take(self, layer: str) -> Path:
        target = self._home.path / f"old-{layer}"
        (self._layers / layer).rename(target)
        (self._index / f"layer-{layer}").unlink(missing_ok=True)
        return target

    def _size(self, layer: str) -> int:
        told = self._read(f"layer-{layer}")
        return 0 if told is None else int(told["size"])

    def _has(self, layer: str) -> bool:
        return (self._layers / layer).is_dir()

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            told: dict[str, Any] = json.loads((self._index / name).read_bytes())
        except (FileNotFoundError, ValueError):  # a crash may leave a file empty
            return None
        return told

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        scratch = self._index / f"new-{secrets.token_hex(8)}"
        scratch.write_text(json.dumps(value))
        scratch.rename(self._index / name)


def boot_id() -> str:
    """Of the host: what was not synced may be lost when it changes."""
    return _BOOT_ID.read_text().strip()


def _image_file(key: str) -> str:
    """Images that a version with other notes has kept are not found."""
    return f"image-{_name(f'{FORMAT} {key}')}"


def _name(key: str) -> str:
    """Keys and digests come from outside: they are no file names."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
