"""The ledger: what this code means to have running, durable before anything costs money. The only SQL is here."""

from .opening import open_engine
from .store import Ledger

__all__ = ["Ledger", "open_engine"]
