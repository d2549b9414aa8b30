"""Pages as objects of a store in a cloud: S3, Google Cloud Storage, Azure; or below a folder."""

from asynchicache.backends.object.backend import ObjectBackend, open_backend

__all__ = ["ObjectBackend", "open_backend"]
