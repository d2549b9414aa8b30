"""3FS: pages in preallocated files of its mount, known to a metadata service; for many ranks and hosts."""

from asynchicache.backends.hf3fs.backend import Hf3fsBackend, open_backend

__all__ = ["Hf3fsBackend", "open_backend"]
