"""The store: a protocol with deadlines, over torch's TCPStore or in memory. Importing this needs no torch."""

from everstep.store.api import MAX_VALUE, Store
from everstep.store.memory import MemoryStore

__all__ = ["MAX_VALUE", "MemoryStore", "Store"]
