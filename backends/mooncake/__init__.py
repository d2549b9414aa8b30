"""Storage backend on Mooncake Store: pages in the memory of other machines, zero-copy, shared, evictable."""

from asynchicache.backends.mooncake.backend import MooncakeBackend, open_backend
from asynchicache.backends.mooncake.options import MooncakeOptions

__all__ = ["MooncakeBackend", "MooncakeOptions", "open_backend"]
