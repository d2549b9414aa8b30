"""Pages in the memory of other machines, by Mooncake Store: moved without a copy, shared, evictable."""

from asynchicache.backends.mooncake.backend import MooncakeBackend, open_backend
from asynchicache.backends.mooncake.options import MooncakeOptions

__all__ = ["MooncakeBackend", "MooncakeOptions", "open_backend"]
