"""Which layers the files of a sandbox are made of, and which of them nobody needs any more. No I/O.

An *image* is a name for layers. Template `base` is one; a sandbox's files as they are at some moment become another
by `Guest.commit`: the image it was made of, and one more layer. A layer is shared by all who are made of it, and goes
when neither an image nor a sandbox has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

BASE = "base"

MAX_LAYERS = 120
"""The kernel takes a page of mount options, and at most 500 layers."""


@dataclass(frozen=True)
class Image:
    """Directories below the server's home, topmost first. `usr` is what lies over the host's own /usr; None: the root
    has a /usr of its own.
    """

    root: tuple[str, ...]
    usr: tuple[str, ...] | None

    def on_top(self, layer: str) -> Image:
        """The same with the changes that one sandbox made."""
        usr = None if self.usr is None else (f"{layer}/usr", *self.usr)
        return Image((f"{layer}/root", *self.root), usr)

    @property
    def ordered(self) -> list[str]:
        """The directories in `LAYERS` that it needs, topmost first. What `base` is made of is not counted: it stays."""
        return [path.rpartition("/")[0] for path in self.root if path.startswith(f"{LAYERS}/")]

    @property
    def layers(self) -> frozenset[str]:
        return frozenset(self.ordered)


LAYERS = "layers"
"""The directory, below the server's home, of layers that sandboxes and builds have made."""


class Images:
    """The images of one runtime, and how often each layer is in use."""

    def __init__(self) -> None:
        self._images: dict[str, Image] = {}
        self._uses: Counter[str] = Counter()
        self._made = 0

    def __contains__(self, name: str) -> bool:
        return name in self._images

    def get(self, name: str) -> Image:
        """Raises KeyError."""
        return self._images[name]

    @property
    def in_use(self) -> frozenset[str]:
        """The layers that somebody needs."""
        return frozenset(self._uses)

    def new_layer(self) -> str:
        """A directory for one more layer. Short, as all names of an overlay must fit into one page."""
        self._made += 1
        return f"{LAYERS}/{self._made}"

    def add(self, name: str, image: Image) -> None:
        """Name an image. Raises ValueError when the name is taken."""
        if name in self._images:
            raise ValueError(f"there is an image {name!r}")
        self._images[name] = image
        self.hold(image)

    def remove(self, name: str) -> list[str]:
        """Forget a name; the layers that nobody needs now. Raises KeyError."""
        return self.drop(self._images.pop(name))

    def hold(self, image: Image) -> None:
        """Somebody is made of it."""
        self._uses.update(image.layers)

    def drop(self, image: Image) -> list[str]:
        """Who was made of it is gone; the layers that nobody needs now."""
        return self._unused(image.layers)

    def _unused(self, layers: Iterable[str]) -> list[str]:
        unused = []
        for layer in sorted(layers):
            self._uses[layer] -= 1
            if not self._uses[layer]:
                del self._uses[layer]
                unused.append(layer)
        return unused
