"""Storage that outlives caches, goes wrong by a script, and is watched: what is stored must be right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asynchicache.backends.memory import MemoryBackend, MemoryEngine, MemoryStore
from asynchicache.hashing import ObjectKey
from asynchicache.storage.protocol import PoolBinding, PoolEngine, StorageBackend, touch_of
from asynchicache.testing.chaos.faults import SLOWER, Luck
from asynchicache.testing.chaos.ledger import Ledger
from asynchicache.testing.chaos.script import StorageFaults
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.oracle import HostOracle
from asynchicache.types import Outcome

CALL_SECONDS = 5e-4
"""The mean time that a storage call takes."""


class ChaosStorage:
    """One cache's way to a store, through all that may go wrong.

    Attributes:
        backend: what the cache is given.
    """

    def __init__(
        self, store: MemoryStore, faults: StorageFaults, oracle: HostOracle, luck: Luck, ledger: Ledger
    ) -> None:
        self._store = store
        self._luck = luck
        self._stall = faults.stall
        self._rates = FaultRates(
            **{name: getattr(faults, name) for name in StorageFaults.__struct_fields__ if name != "stall"}
        )
        self._witness = Witness(MemoryBackend(store), oracle, ledger)
        self._faulty = Faulty(self._witness, self._rates, luck.chance, late_seconds=0.03)
        self.backend = CutOffs(Latency(self._faulty, CALL_SECONDS, sleep=self._sleep))

    async def _sleep(self, mean_seconds: float) -> None:
        slower = SLOWER if self._luck.strikes("storage.stall", self._stall) else 1
        await asyncio.sleep(self._luck.chance.expovariate(1 / (mean_seconds * slower)))

    def holds(self, digest: bytes) -> bool:
        """Whether the store has a page of attention; not without memory for such pages to arrive in."""
        binding = self._witness.bindings.get("kv")
        return (
            binding is not None
            and ObjectKey(binding.fingerprint, digest, binding.pool, binding.shard) in self._store
        )

    def release(self) -> None:
        """Let calls that hang go on."""
        self._faulty.release()

    async def restart(self, seconds: float, *, lose: bool) -> None:
        """Answer nothing for a while; and forget everything, if it is to."""
        self._luck.count("storage.lose" if lose else "storage.restart")
        self._faulty.rates = FaultRates(raises=1.0)
        if lose:
            for key in list(self._store):
                self._store.drop(key)
        await asyncio.sleep(seconds)
        self._faulty.rates = self._rates

    def mend(self) -> None:
        """Nothing goes wrong from now on."""
        self._stall, self._rates = 0.0, FaultRates()
        self._faulty.rates = self._rates
        self._faulty.release()

    def settle(self) -> None:
        """Add up what went wrong."""
        for name, count in self._faulty.injected.items():
            self._luck.counted[f"storage.{name}"] += count
        self._faulty.injected.clear()


class CutOffs:
    """A backend that notices who does not wait for the end of its calls.

    Attributes:
        calls: reads and writes that had not ended when they were given up.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.name = backend.name
        self.calls = 0
        self._backend = backend
        self.aclose = backend.aclose

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        return _CutOffEngine(await self._backend.open_pool(binding), self)


class _CutOffEngine:
    def __init__(self, engine: PoolEngine, count: CutOffs) -> None:
        self._engine = engine
        self._count = count
        self.capabilities = engine.capabilities
        self.exists = engine.exists
        self.delete = engine.delete
        self.clear = engine.clear
        self.touch = touch_of(engine)
        self.aclose = engine.aclose

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        with self._noticing():
            return await self._engine.get(keys, slots)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        with self._noticing():
            return await self._engine.put(keys, slots)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            self._count.calls += 1
            raise


class Witness:
    """A backend that looks at every page that it is to store.

    Attributes:
        bindings: of the pools that were opened, by name.
    """

    def __init__(self, backend: MemoryBackend, oracle: HostOracle, ledger: Ledger) -> None:
        self.name = f"watched-{backend.name}"
        self._backend = backend
        self._oracle = oracle
        self._ledger = ledger
        self.bindings: dict[str, PoolBinding] = {}

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        self.bindings[binding.pool] = binding
        engine = await self._backend.open_pool(binding)
        return _WatchedEngine(engine, binding, self._oracle, self._ledger)

    async def aclose(self) -> None:
        await self._backend.aclose()


class _WatchedEngine:
    def __init__(
        self, engine: MemoryEngine, binding: PoolBinding, oracle: HostOracle, ledger: Ledger
    ) -> None:
        self._engine = engine
        self._binding = binding
        self._oracle = oracle
        self._ledger = ledger
        self.capabilities = engine.capabilities
        self.exists = engine.exists
        self.get = engine.get
        self.delete = engine.delete
        self.clear = engine.clear
        self.touch = touch_of(engine)
        self.aclose = engine.aclose

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        binding = self._binding
        for key, slot in zip(keys, slots, strict=True):
            if not self._oracle.holds(binding.pool, binding.page(slot), key.digest):
                self._ledger.violations.append(
                    f"wrong bytes: host slot {slot} of {binding.pool!r} goes to storage as another page"
                )
        return await self._engine.put(keys, slots)
