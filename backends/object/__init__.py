"""Storage backend on object stores: S3, Google Cloud Storage, Azure, or a folder."""

from asynchicache.backends.object.backend import ObjectBackend, open_backend

__all__ = ["ObjectBackend", "open_backend"]
