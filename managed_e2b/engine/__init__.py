"""The lifecycle of sandboxes, written once. Start reading at `acquire`; it ends in `release`."""

from .acquire import acquire, validated
from .base import Acquired, Engine
from .keeper import Keeper
from .reap import reap
from .release import release

__all__ = ["Acquired", "Engine", "Keeper", "acquire", "reap", "release", "validated"]
