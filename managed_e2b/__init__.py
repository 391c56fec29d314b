"""managed-e2b: no E2B sandbox is ever left running that nobody is using, whatever dies."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    AcquireTimeoutError,
    AuthenticationError,
    BackendError,
    BackendUnavailableError,
    CommandError,
    CommandLostError,
    CommandTimeoutError,
    ConfigError,
    LedgerError,
    Me2bError,
    PrewarmError,
    RateLimitedError,
    SandboxCreateError,
    SandboxExpiredError,
    SandboxGoneError,
    SandboxKilledError,
    SandboxLapsedError,
    SandboxLeakError,
    SandboxLostError,
    SandboxPausedError,
    SandboxReapedError,
    SandboxReleasedError,
    SandboxUnreachableError,
    StageError,
    StateTransitionError,
    TemplateNotFoundError,
    TemplateOutdatedError,
    TosError,
    ValidationError,
)

if TYPE_CHECKING:
    from .handle import AsyncSandboxHandle, SandboxHandle
    from .lifecycle import AsyncSandboxLifecycle, SandboxLifecycle
    from .models import (
        AcquireRequest,
        CommandResult,
        Compared,
        Holder,
        PortForward,
        Reaped,
        ReapReport,
        ReconcileReport,
        RemoteSandbox,
        SandboxConfig,
        SandboxRecord,
        State,
    )
    from .settings import E2BConfig, get_e2b_config, load_env

__all__ = [
    "AcquireRequest",
    "AcquireTimeoutError",
    "AsyncSandboxHandle",
    "AsyncSandboxLifecycle",
    "AuthenticationError",
    "BackendError",
    "BackendUnavailableError",
    "CommandError",
    "CommandLostError",
    "CommandResult",
    "CommandTimeoutError",
    "Compared",
    "ConfigError",
    "E2BConfig",
    "Holder",
    "LedgerError",
    "Me2bError",
    "PortForward",
    "PrewarmError",
    "RateLimitedError",
    "ReapReport",
    "Reaped",
    "ReconcileReport",
    "RemoteSandbox",
    "SandboxConfig",
    "SandboxCreateError",
    "SandboxExpiredError",
    "SandboxGoneError",
    "SandboxHandle",
    "SandboxKilledError",
    "SandboxLapsedError",
    "SandboxLeakError",
    "SandboxLifecycle",
    "SandboxLostError",
    "SandboxPausedError",
    "SandboxReapedError",
    "SandboxRecord",
    "SandboxReleasedError",
    "SandboxUnreachableError",
    "StageError",
    "State",
    "StateTransitionError",
    "TemplateNotFoundError",
    "TemplateOutdatedError",
    "TosError",
    "ValidationError",
    "get_e2b_config",
    "load_env",
]

_ON_DEMAND = ("models", "settings", "handle", "lifecycle")


def __getattr__(name: str) -> Any:
    # These bring pydantic, the SDK and SQLAlchemy: half a second, and 60 MB, that the command, the local server and
    # the watchdog need not pay.
    if name in __all__:
        for room in _ON_DEMAND:
            if (found := getattr(import_module(f".{room}", __name__), name, None)) is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
