"""The ledger: what this code means to have running, durable before anything costs money. The only SQL is here."""

from .opening import location, open_engine
from .store import Ledger

__all__ = ["Ledger", "location", "open_engine"]
