"""What the control plane knows about a sandbox, and the states it can be in."""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from managed_e2b.local.envd.context import EnvdContext
from managed_e2b.local.history import History
from managed_e2b.local.lifetime import Lifetime
from managed_e2b.local.logbook import Logbook
from managed_e2b.local.network.policy import OPEN, Policy
from managed_e2b.local.runtime.base import Guest
from managed_e2b.local.sizes import Size
from managed_e2b.local.templates import NO_SETTINGS, Settings
from managed_e2b.local.volumes.rules import VolumeMount

ENVD_PORT = 49983
ENVD_VERSION = "0.6.13"  # the envd release whose behaviour is served; SDKs switch features on by it
CLIENT_ID = "local"  # legacy field of the API; upstream answers a constant too

_ID_ALPHABET = string.ascii_lowercase + string.digits


def new_sandbox_id() -> str:
    """`i` and 20 random characters: nobody guesses one, and it fits into a DNS label with a port before it."""
    return "i" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(20))


def new_token() -> str:
    return secrets.token_hex(32)


class State(StrEnum):
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    ENDING = "ending"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.RUNNING: frozenset({State.PAUSING, State.ENDING}),
    # back to running when its processes can't be stopped: it never was paused
    State.PAUSING: frozenset({State.PAUSED, State.RUNNING, State.ENDING}),
    State.PAUSED: frozenset({State.RESUMING, State.ENDING}),
    # back to paused when its processes can't be continued
    State.RESUMING: frozenset({State.RUNNING, State.PAUSED, State.ENDING}),
    # back when the kill failed: what is not proven dead must stay in the list, where it can be killed again
    State.ENDING: frozenset({State.RUNNING, State.PAUSED}),
}

SHOWN: Mapping[State, str | None] = {
    State.RUNNING: "running",
    State.PAUSING: "paused",
    State.PAUSED: "paused",
    State.RESUMING: "paused",
    State.ENDING: None,
}
"""The state an answer shows; None hides the sandbox."""


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox was asked to be. `timeout` in seconds; `image` is the runtime's name of its files,
    `settings`, `cpu_count` and `memory_mb` are its template's, None: what the server gives.
    """

    template_id: str
    alias: str | None
    timeout: int
    image: str = "base"
    settings: Settings = NO_SETTINGS
    cpu_count: int | None = None
    memory_mb: int | None = None
    secure: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict, repr=False)
    volume_mounts: tuple[VolumeMount, ...] = ()
    auto_pause: bool = False
    auto_pause_memory: bool = True
    auto_resume: bool = False
    allow_internet_access: bool | None = None
    network: Mapping[str, Any] | None = None
    public_traffic: bool = True
    mask_request_host: str | None = None
    https_ports: frozenset[int] = frozenset()
    """Ports that serve TLS themselves."""
    egress: Policy = OPEN
    """What it may reach outside."""


class EnvdApp(Protocol):
    """envd of one sandbox, as an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def abort(self, message: str) -> None:
        """End every open stream with an error that says `message`; new calls are not affected."""
        ...


class EnvdFactory(Protocol):
    def __call__(self, ctx: EnvdContext, /) -> EnvdApp: ...


@dataclass(eq=False)
class Sandbox:
    """One sandbox that exists. Only the registry changes it."""

    sandbox_id: str
    spec: SandboxSpec
    access_token: str | None = field(repr=False)
    traffic_token: str | None = field(repr=False)
    guest: Guest
    envd: EnvdApp
    lifetime: Lifetime
    size: Size
    state: State = State.RUNNING
    transition: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is being paused, resumed or copied. A kill never waits for it."""
    ending: asyncio.Future[None] | None = None
    """The kill under way."""
    kept: str | None = None
    """The image of its files, while it is paused without its processes; its guest is dead then."""
    booting: asyncio.Future[None] | None = None
    """The boot from `kept` under way. A kill waits for it."""
    logbook: Logbook = field(default_factory=Logbook)
    history: History = field(default_factory=History)

    def become(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"sandbox {self.sandbox_id} cannot go from {self.state} to {state}")
        self.state = state

    def is_in(self, state: State) -> bool:
        """Ask again after an `await`, when others may have changed it."""
        return self.state is state

    @property
    def shown_state(self) -> str | None:
        return SHOWN[self.state]

    @property
    def pause_mode(self) -> str:
        """How it is paused, as the API calls it."""
        return "full" if self.kept is None else "filesystem"

    # what lists filter and sort by
    @property
    def started_at(self) -> datetime:
        return self.lifetime.start.wall

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.spec.metadata

    @property
    def template_names(self) -> frozenset[str]:
        names = {self.spec.template_id}
        if self.spec.alias is not None:
            names.add(self.spec.alias)
        return frozenset(names)
