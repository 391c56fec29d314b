"""Every error that managed-e2b raises, and what to do about it.

    Me2bError
    ├── ConfigError                no key and no backend, a bad endpoint, a bad .env (also a ValueError)
    │   └── LedgerError            the ledger cannot be opened, or fails while it is in use
    ├── ValidationError            an argument is wrong; nothing was sent anywhere (also a ValueError)
    ├── StateTransitionError       an operation that the sandbox's state does not allow
    ├── AcquireTimeoutError        no slot came free within `acquire_timeout` (also a TimeoutError)
    ├── BackendError               the endpoint refused or failed an operation
    │   ├── BackendUnavailableError    it could not be reached, or this host cannot run the local one
    │   ├── AuthenticationError        the key was refused
    │   ├── TemplateNotFoundError      no such template there
    │   ├── TemplateOutdatedError      the agent in its sandboxes is too old for the SDK
    │   ├── RateLimitedError           429; `retry_after` in seconds when the endpoint named one
    │   ├── SandboxCreateError         a create failed, or its answer never came and could not be found
    │   └── SandboxUnreachableError    nothing in the sandbox answers; it is not known to be dead
    ├── SandboxGoneError           the sandbox of this handle cannot be used any more; the subclass says why
    │   ├── SandboxReleasedError       its `with` block was left, or its lifecycle was shut down
    │   ├── SandboxExpiredError        its hard `timeout` has passed
    │   ├── SandboxLapsedError         its lease was not renewed in time, and the backend ended it
    │   ├── SandboxReapedError         its owner looked dead, and a reaper ended it
    │   ├── SandboxKilledError         another user of this ledger ended it
    │   ├── SandboxPausedError         somebody paused it; it can be resumed
    │   └── SandboxLostError           it vanished early: lost by the provider, or killed outside of this ledger
    ├── CommandLostError           how a command ended cannot be known any more; what it wrote is in there
    ├── CommandError               a command failed and `check=True` was asked for; `result` holds it
    │   └── CommandTimeoutError        … because it ran past its timeout (also a TimeoutError)
    ├── StageError                 a file could not be staged in or out; `path` names it
    ├── SandboxLeakError           cleanup could not be proved within its time; `sandbox_ids` lists what may live
    ├── PrewarmError               a template could not be built
    └── TosError                   a bucket could not be mounted

Exceptions of the E2B SDK never leave a managed call unmapped; the original one is the `__cause__`. What a handle
raises of the gone family, and SandboxUnreachableError, is also an instance of the exception that the SDK itself has
for the case (SandboxNotRunningException, SandboxNotFoundException, SandboxUnreachableException): handlers written for
the SDK go on working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .models import CommandResult, Holder


class Me2bError(Exception):
    """Base of all errors of this package."""


class ConfigError(Me2bError, ValueError):
    """The configuration cannot work. The message names the ways out."""


class LedgerError(ConfigError):
    """The ledger cannot be opened (missing directory, not a ledger, newer than this code, not reachable), or fails
    while it is in use (a full disk, a file that was replaced, a database that is gone); the `__cause__` tells more.
    """


class ValidationError(Me2bError, ValueError):
    """An argument is wrong. Raised at the call, before anything was sent or written."""


class StateTransitionError(Me2bError):
    """The sandbox's state does not allow the operation."""


class AcquireTimeoutError(Me2bError, TimeoutError):
    """No slot came free in time. `holders` are the sandboxes that hold the slots: ids, owners, ages, states."""

    def __init__(self, message: str, *, holders: Sequence[Holder] = ()) -> None:
        super().__init__(message)
        self.holders = tuple(holders)


class BackendError(Me2bError):
    """The endpoint refused or failed an operation. `status` is its HTTP status, when there was one."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BackendUnavailableError(BackendError):
    """The endpoint could not be reached, or the local one cannot run on this host."""


class AuthenticationError(BackendError):
    """The endpoint refused the key."""


class TemplateNotFoundError(BackendError):
    """The endpoint knows no such template."""


class TemplateOutdatedError(BackendError):
    """The agent (envd) in the template's sandboxes is too old for this SDK: build the template anew."""


class RateLimitedError(BackendError):
    """The endpoint answered 429. `retry_after` is in seconds, None when it named no time."""

    def __init__(self, message: str, *, status: int | None = 429, retry_after: float | None = None) -> None:
        super().__init__(message, status=status)
        self.retry_after = retry_after


class SandboxCreateError(BackendError):
    """A sandbox could not be created. `ticket` names its row in the ledger, which tells what became of it."""

    def __init__(self, message: str, *, ticket: str, status: int | None = None) -> None:
        super().__init__(message, status=status)
        self.ticket = ticket


class SandboxUnreachableError(BackendError):
    """Nothing in the sandbox answers, or its endpoint does not, and nobody says that it is dead.

    `running` is True when the backend says that the sandbox runs (its agent, network or shell is broken), None when
    the backend could not be asked either.
    """

    def __init__(self, message: str, *, status: int | None = None, running: bool | None = None) -> None:
        super().__init__(message, status=status)
        self.running = running


class SandboxGoneError(Me2bError):
    """The sandbox of a handle cannot be used any more. Which subclass it is, and `ending` (its name), say why.

    `reason` is the ledger's word, `ticket` the ledger's id of it. `started_at` (it ran since), `ended_at` (proved dead)
    and `noticed_at` are microseconds since the epoch on the ledger's clock, None where the ledger does not know.
    """

    ending: ClassVar[str] = "gone"

    def __init__(
        self,
        message: str,
        *,
        sandbox_id: str | None,
        reason: str | None,
        ticket: str | None = None,
        started_at: int | None = None,
        ended_at: int | None = None,
        noticed_at: int | None = None,
    ) -> None:
        super().__init__(message)
        self.sandbox_id = sandbox_id
        self.ticket = ticket
        self.reason = reason
        self.started_at = started_at
        self.ended_at = ended_at
        self.noticed_at = noticed_at


class SandboxReleasedError(SandboxGoneError):
    """Its owner has ended it: the `with` block was left, the lifecycle shut down, or the acquire was cancelled."""

    ending = "released"


class SandboxExpiredError(SandboxGoneError):
    """Its hard limit, `acquire(timeout=...)`, has passed."""

    ending = "expired"


class SandboxLapsedError(SandboxGoneError):
    """Nobody renewed its lease in time, and the backend ended it: the owner was suspended or cut off from it."""

    ending = "lapsed"


class SandboxReapedError(SandboxGoneError):
    """Its owner looked dead for longer than `stale_timeout`, and a reaper of this ledger ended it."""

    ending = "reaped"


class SandboxKilledError(SandboxGoneError):
    """Another user of this ledger ended it; `reason` is what was said."""

    ending = "killed"


class SandboxPausedError(SandboxGoneError):
    """Somebody else paused it. It is not lost: once it runs again, the handle works again."""

    ending = "paused"


class SandboxLostError(SandboxGoneError):
    """The backend does not know it any more, before its time, and nobody of this ledger ended it.

    The provider lost it, or somebody killed it outside of this ledger: the backend does not tell the two apart.
    """

    ending = "lost"


class CommandLostError(Me2bError):
    """A command's stream was cut, and how the command ended, or whether it ran at all, cannot be known any more.

    It was not run again. `stdout_bytes` and `stderr_bytes` are what had come; `pid` is None when it is not known to
    have begun.
    """

    def __init__(self, message: str, *, stdout_bytes: bytes, stderr_bytes: bytes, pid: int | None) -> None:
        super().__init__(message)
        self.stdout_bytes = stdout_bytes
        self.stderr_bytes = stderr_bytes
        self.pid = pid


class CommandError(Me2bError):
    """A command exited non-zero (or was killed) under `check=True`. `result` is what it left."""

    def __init__(self, message: str, *, result: CommandResult) -> None:
        super().__init__(message)
        self.result = result


class CommandTimeoutError(CommandError, TimeoutError):
    """A command ran past its timeout under `check=True`; it and its children were killed."""


class StageError(Me2bError):
    """A file could not be staged. `path` names it."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class SandboxLeakError(Me2bError):
    """Some sandboxes could not be proved dead in time. Their rows stay `cleaning`, for the keeper or a reaper."""

    def __init__(self, message: str, *, sandbox_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.sandbox_ids = tuple(sandbox_ids)


class PrewarmError(Me2bError):
    """A template could not be built."""


class TosError(Me2bError):
    """A bucket could not be mounted."""


# -- signals between rooms: the engine turns them into results or into one of the above ---------------------


class DeadlineExceeded(BackendError):
    """A command's own timeout passed."""


class NotOpened(BackendError):
    """A stream was not opened within its deadline: whether its command has begun is not known."""


class StreamBroken(BackendError):
    """A command's stream ended without telling how the command ended."""


class SandboxNotRunning(BackendError):
    """The gateway in front of a sandbox says that it does not run (killed, paused or expired)."""


class ProcessGone(BackendError):
    """The sandbox knows no process of this pid: it has ended, and its end is not kept any more."""
