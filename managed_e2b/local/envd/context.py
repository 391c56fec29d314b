"""What envd of one sandbox knows: the values its services share."""

from __future__ import annotations

from dataclasses import dataclass, field

from managed_e2b.local.logbook import Logbook
from managed_e2b.local.runtime.base import Guest


@dataclass
class EnvdContext:
    """One sandbox as its envd sees it.

    `access_token` guards every call (`X-Access-Token`); None leaves the sandbox open, as upstream does for sandboxes
    that are not secured. `env_vars` are the sandbox's own, given at creation. `default_user` runs what names no user,
    in `default_workdir` or, when that is None, in the user's home. Commands are told the ids. What
    happens is written into `logbook`.
    """

    sandbox_id: str
    guest: Guest
    access_token: str | None = field(default=None, repr=False)
    env_vars: dict[str, str] = field(default_factory=dict, repr=False)
    default_user: str = "user"
    default_workdir: str | None = None
    template_id: str | None = None
    logbook: Logbook = field(default_factory=Logbook)
