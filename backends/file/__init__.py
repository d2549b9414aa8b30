"""The embedded engine: pages in preallocated files of a local folder; they survive a restart."""

from asynchicache.backends.file.backend import FileBackend, open_backend

__all__ = ["FileBackend", "open_backend"]
