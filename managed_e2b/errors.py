"""Every error that managed-e2b raises, and what to do about it.

    Me2bError
    ├── ConfigError                no key and no backend, a bad endpoint, a bad .env (also a ValueError)
    │   └── LedgerError            the ledger cannot be opened or is not one
    ├── ValidationError            an argument is wrong; nothing was sent anywhere (also a ValueError)
    ├── StateTransitionError       an operation that the sandbox's state does not allow
    ├── AcquireTimeoutError        no slot came free within `acquire_timeout` (also a TimeoutError)
    ├── BackendError               the endpoint refused or failed an operation
    │   ├── BackendUnavailableError    it could not be reached, or this host cannot run the local one
    │   ├── AuthenticationError        the key was refused
    │   ├── TemplateNotFoundError      no such template there
    │   ├── RateLimitedError           429; `retry_after` in seconds when the endpoint named one
    │   └── SandboxCreateError         a create failed, or its answer never came and could not be found
    ├── SandboxGoneError           the sandbox of this handle is not there any more; `reason` says why
    ├── CommandError               a command failed and `check=True` was asked for; `result` holds it
    │   └── CommandTimeoutError        … because it ran past its timeout (also a TimeoutError)
    ├── StageError                 a file could not be staged in or out; `path` names it
    ├── SandboxLeakError           cleanup could not be proved within its time; `sandbox_ids` lists what may live
    ├── PrewarmError               a template could not be built
    └── TosError                   a bucket could not be mounted

Exceptions of the E2B SDK never leave a managed call unmapped; the original one is the `__cause__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .models import CommandResult


class Me2bError(Exception):
    """Base of all errors of this package."""


class ConfigError(Me2bError, ValueError):
    """The configuration cannot work. The message names the ways out."""


class LedgerError(ConfigError):
    """The ledger cannot be opened: missing directory, not a ledger, newer than this code, or not reachable."""


class ValidationError(Me2bError, ValueError):
    """An argument is wrong. Raised at the call, before anything was sent or written."""


class StateTransitionError(Me2bError):
    """The sandbox's state does not allow the operation."""


class AcquireTimeoutError(Me2bError, TimeoutError):
    """No slot came free in time. `holders` describes the rows that hold the slots."""

    def __init__(self, message: str, *, holders: Sequence[str] = ()) -> None:
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


class SandboxGoneError(Me2bError):
    """The sandbox of a handle is not there any more (released, expired, killed). `reason` is the ledger's word."""

    def __init__(self, message: str, *, sandbox_id: str | None, reason: str | None) -> None:
        super().__init__(message)
        self.sandbox_id = sandbox_id
        self.reason = reason


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


class StreamBroken(BackendError):
    """A command's stream ended without telling how the command ended."""


class SandboxNotRunning(BackendError):
    """The gateway in front of a sandbox says that it does not run (killed, paused or expired)."""
