"""All engines that have a limit to compare with."""

from __future__ import annotations

from asynchicache_lab.bench.storage import file, memory, mooncake, redis
from asynchicache_lab.bench.storage.limits import Peer

LIMITS: dict[str, Peer] = {
    "file": file.PEER,
    "memory": memory.PEER,
    "mooncake": mooncake.PEER,
    "redis": redis.PEER,
}
"""By the engine's name; an engine that is not here is measured without one."""
