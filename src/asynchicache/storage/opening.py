"""How the core opens one pool in a backend that it has not written."""

from __future__ import annotations

from functools import partial

from asynchicache.ports import Port
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.pool import GuardedPool
from asynchicache.storage.protocol import PoolBinding, StorageBackend
from asynchicache.storage.strangers import bounded, close, named


async def open_guarded(
    backend: StorageBackend, binding: PoolBinding, port: Port, limits: PoolLimits
) -> GuardedPool:
    """The backend's engine for a pool, made safe to call; one that nobody will use is closed.

    Args:
        backend: where the pages are.
        binding: the pool.
        port: clock and threads.
        limits: patience with the backend; it has `opening` seconds.

    Raises:
        StorageError: the backend cannot be used, took too long, raised, or gave no engine.
    """
    what = f"storage {backend.name!r}: opening pool {binding.pool!r}"
    unused = f"an engine of pool {binding.pool!r} that nobody uses"
    unwanted = partial(close, seconds=limits.closing, what=unused)
    with named(what):
        engine = await bounded(backend.open_pool(binding), limits.opening, what, unwanted=unwanted)
        try:
            return GuardedPool(engine, binding, port, limits)
        except BaseException:
            await unwanted(engine)
            raise
