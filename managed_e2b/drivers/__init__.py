"""Where the engine meets threads, the event loop and the E2B SDK."""

from .aio import AioDriver
from .base import Driver, Wakeup, run
from .blocking import BlockingDriver
from .sdk import DeadlineExceeded, NativeSandbox, Sdk, StreamBroken

__all__ = [
    "AioDriver",
    "BlockingDriver",
    "DeadlineExceeded",
    "Driver",
    "NativeSandbox",
    "Sdk",
    "StreamBroken",
    "Wakeup",
    "run",
]
