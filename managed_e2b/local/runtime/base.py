"""What the API code may ask of a runtime, and nothing about how it is done.

A *runtime* makes *guests*: running sandboxes. The control plane and envd are written against these
protocols, so another runtime (OCI, a microVM) can be added without touching them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from managed_e2b.local.runtime.library import Library
from managed_e2b.local.runtime.limits import NO_LIMITS, Enforced, Limits
from managed_e2b.local.runtime.volumes import Mount, Volumes


class RuntimeUnavailable(Exception):
    """This host cannot run sandboxes. The message says what is missing and how to get it, in one line."""


class ImageUnavailable(Exception):
    """An image that is on offer cannot be made here. The message says why, and what to do, in one line."""


class GuestGone(Exception):
    """The sandbox is dead (or dying): nothing can be asked of it any more."""


class GuestError(Exception):
    """An operation inside the sandbox failed as the system call did: `errno` and a message for people."""

    def __init__(self, errno: int, message: str) -> None:
        super().__init__(message)
        self.errno = errno
        self.message = message


@dataclass(frozen=True)
class User:
    """A user as the sandbox's own /etc/passwd and /etc/group tell."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


@dataclass(frozen=True)
class PtySize:
    cols: int
    rows: int


@dataclass(frozen=True)
class Command:
    """One process to start. `env` is the whole environment: nothing is inherited. `cwd` is absolute and exists."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    user: User
    stdin: bool = False  # False: /dev/null
    pty: PtySize | None = None  # given: stdin, stdout and stderr are one terminal


@dataclass(frozen=True)
class Exit:
    """How a process ended: `code` when it exited, `signal` when it was killed by one. One of them is None."""

    code: int | None
    signal: int | None


@dataclass(frozen=True)
class GuestSpec:
    """What a sandbox is made of and with. `image`: the name of its files, see `Guest.commit`."""

    image: str = "base"
    limits: Limits = NO_LIMITS
    mounts: tuple[Mount, ...] = ()


PLAIN = GuestSpec()


class GuestProcess(Protocol):
    """A process inside a sandbox. The descriptors are ours, non-blocking; `close()` closes those still open."""

    pid: int  # as seen inside the sandbox
    stdin_fd: int | None
    stdout_fd: int | None
    stderr_fd: int | None
    pty_fd: int | None

    async def wait(self) -> Exit:
        """Wait for the end. May be awaited by many, and again after the end."""
        ...

    def signal(self, number: int, *, group: bool = False) -> bool:
        """Send a signal to the process alone, or to its process group; False when it has ended."""
        ...

    def kill_tree(self) -> None:
        """SIGKILL the process, its session and all its descendants, those that left the session included."""
        ...

    def resize(self, size: PtySize) -> None: ...

    def close_stdin(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Usage:
    """What a sandbox uses now. Bytes, and CPU as the percentage of one core times the cores in use."""

    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int


@dataclass(frozen=True)
class Reply:
    """The file agent's answer: a JSON-like value, and descriptors it opened for us (the caller closes them)."""

    value: Any
    fds: list[int] = field(default_factory=list)


class Guest(Protocol):
    """One sandbox that runs."""

    sandbox_id: str
    dead: asyncio.Event  # set once no process of it is left, however it came to that

    async def spawn(self, command: Command) -> GuestProcess:
        """Start a process. Raises GuestError (as execve or chdir failed) and GuestGone."""
        ...

    async def call(self, op: str, fds: Sequence[int] = (), **args: Any) -> Reply:
        """Run one operation of the file agent (see `agent_ops`) as root inside the sandbox's own mount namespace.

        Paths are resolved in there, so no link in a sandbox can name a file of the host.
        Raises GuestError (OSError in the agent) and GuestGone.
        """
        ...

    async def user(self, name: str) -> User:
        """The user of that name by the sandbox's own files. Raises KeyError when there is none."""
        ...

    async def connect(self, port: int) -> int:
        """A connected, non-blocking TCP socket (a descriptor) to a port inside the sandbox.

        Raises GuestError(ECONNREFUSED) when nothing listens there.
        """
        ...

    async def way_out(self) -> tuple[int, int]:
        """Lead what leaves the sandbox to two sockets: a listening TCP one, and a UDP one that gets DNS queries.

        They are non-blocking, and ours. A connection tells where it was going (SO_ORIGINAL_DST), a query which server
        it is for (IP_PKTINFO). Nothing else leaves, whatever runs in there. Once a sandbox, before anything runs.
        Raises GuestError where the host cannot do that, and GuestGone.
        """
        ...

    async def freeze(self) -> None:
        """Stop every process of the sandbox; memory is kept. A command that is asked for meanwhile may wait."""
        ...

    async def thaw(self) -> None: ...

    async def commit(self, image: str) -> None:
        """Keep its files, as they are now, as a new image. Its processes stand still meanwhile, and go on.

        The layers below are shared. Raises GuestGone, GuestError (no space, EOPNOTSUPP where files are kept in a
        memory of its own, EMLINK when it is made of too many layers already), and ValueError for a name that is taken.
        """
        ...

    async def usage(self) -> Usage: ...

    async def kill(self) -> None:
        """End it: when this returns no process, mount, port or file of it is left. May be called again."""
        ...


class Recipe(Protocol):
    """How the server makes an image by itself: what it puts on top of `base`. Both are called in a thread."""

    def digest(self) -> str:
        """Tells what `fill` would make now: the same text, the same files. Raises ImageUnavailable."""
        ...

    def fill(self, layer: Path) -> None:
        """Write what belongs at `/` into `layer/root`, and what belongs at `/usr` into `layer/usr`.

        Whose files they become, and their modes but for `x`, is the runtime's. Raises ImageUnavailable and OSError.
        """
        ...


class Runtime(Protocol):
    @property
    def library(self) -> Library:
        """What builds need. Once started."""
        ...

    @property
    def volumes(self) -> Volumes:
        """What sandboxes can share. Once started."""
        ...

    @property
    def enforced(self) -> Enforced:
        """Which limits of a sandbox this host keeps. Once started."""
        ...

    async def start(self) -> None:
        """Make ready; remove what an earlier server left. Raises RuntimeUnavailable."""
        ...

    async def create(self, sandbox_id: str, spec: GuestSpec = PLAIN) -> Guest:
        """A new sandbox, ready for commands.

        Raises RuntimeUnavailable, KeyError for an unknown image, ImageUnavailable for one that cannot be made, and
        MountFailed.
        """
        ...

    def offer(self, image: str, recipe: Recipe) -> None:
        """Let sandboxes be made of an image that is made when first needed. Raises ValueError: the name is taken."""
        ...

    async def remove_image(self, image: str) -> None:
        """Forget an image. Its files go when no sandbox is made of them any more. Raises KeyError."""
        ...

    async def failed(self) -> RuntimeUnavailable:
        """Return once no sandbox can be made any more, with the reason; until then, wait."""
        ...

    async def close(self) -> None:
        """Kill all guests and leave nothing behind."""
        ...
