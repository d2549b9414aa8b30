"""Pages in a Redis or Valkey server, received straight into host memory."""

from asynchicache.backends.redis.backend import RedisBackend, open_backend

__all__ = ["RedisBackend", "open_backend"]
