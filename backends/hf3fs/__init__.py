"""Storage backend on 3FS: preallocated files and a store of names, shared by many ranks and hosts."""

from asynchicache.backends.hf3fs.backend import Hf3fsBackend, open_backend

__all__ = ["Hf3fsBackend", "open_backend"]
