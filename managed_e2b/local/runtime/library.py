"""Images that builds make: put together from layers of a registry, and found again by later builds and servers.

What of a runtime builds need beside sandboxes. No implementation here, see `shelf_library`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Layer:
    """One layer of an OCI image. `digest` is its archive's; `open` gives a descriptor of the archive, checked against
    the digest, which the caller closes. It is only called for a layer that is not there yet.
    """

    digest: str
    open: Callable[[], Awaitable[int]]


class Library(Protocol):
    """The runtime's images, as builds see them."""

    @property
    def one_id(self) -> bool:
        """Whether all users inside are one, because the host gives no more ids."""
        ...

    def identity(self, image: str) -> str | None:
        """Tells what an image is made of, for a key; None: nobody else can make the same. Raises KeyError."""
        ...

    async def name(self, image: str, name: str) -> None:
        """Give an image one more name; its files go with the last.

        Raises KeyError; ValueError: the name is taken; ImageUnavailable: it is on offer, and cannot be made.
        """
        ...

    async def assemble(self, name: str, layers: Sequence[Layer]) -> int:
        """Make an image of layers, the lowest first; how many device nodes in them were left out.

        Layers are shared and outlive the server. Raises GuestError: EINVAL for a damaged layer, EFBIG for one that is
        too large, EMLINK for too many, and what a full disk says; and whatever `open` raises.
        """
        ...

    async def recall(self, key: str, name: str) -> dict[str, Any] | None:
        """Name the image that was kept under a key, and return its note; None when there is none (any more)."""
        ...

    async def keep(self, image: str, key: str, note: Mapping[str, Any]) -> None:
        """Let later builds and servers find an image by a key, until room is needed. `note` is JSON-like.

        Raises KeyError, GuestError.
        """
        ...

    @property
    def directory(self) -> Path:
        """The server's own, beside the sandboxes' files: for what builds are sent. It outlives the server."""
        ...
