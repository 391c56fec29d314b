"""Where the engine meets threads, the event loop and the E2B SDK."""

from .aio import AioDriver
from .base import Wakeup, run
from .blocking import BlockingDriver
from .inside import NativeSandbox
from .sdk import Sdk

__all__ = [
    "AioDriver",
    "BlockingDriver",
    "NativeSandbox",
    "Sdk",
    "Wakeup",
    "run",
]
