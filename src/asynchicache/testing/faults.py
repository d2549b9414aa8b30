"""Backend wrappers that add seeded faults (latency, errors, wrong answers), or retry failed pages."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from asynchicache.errors import ConfigError, StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.storage.protocol import (
    OPTIONAL_VERBS,
    EngineWrapper,
    PoolBinding,
    PoolEngine,
    StorageBackend,
    check_backend,
)
from asynchicache.types import Outcome, check_number

Sleep = Callable[[float], Awaitable[object]]
EngineMethod = Callable[[Sequence[ObjectKey], Sequence[int]], Awaitable[list[Outcome]]]

CALLS = ("exists", "get", "put", "delete", "clear", *OPTIONAL_VERBS)
"""What may go wrong, by the engine's methods."""

_REMEMBERED = 64  # recent pages of an engine that a swap may return instead


class _WrappingBackend:
    """A backend whose engines are wrapped, each once."""

    def __init__(
        self, kind: str, backend: StorageBackend, wrap: Callable[[PoolEngine, PoolBinding], PoolEngine]
    ) -> None:
        self.name = f"{kind}-{check_backend(f'storage {backend!r}', backend).name}"
        self._backend = backend
        self._wrap = wrap
        self._wrapped: dict[PoolEngine, PoolEngine] = {}

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        engine = await self._backend.open_pool(binding)
        return self._wrapped.setdefault(engine, self._wrap(engine, binding))

    async def aclose(self) -> None:
        await self._backend.aclose()


class Persistent(_WrappingBackend):
    """A backend that retries FAILED pages until all succeed or `attempts` is reached.

    Wrapped around a `Faulty` with partial failures, it passes the conformance tests if the inner backend
    handles any subset of a call's pages correctly.

    Args:
        attempts: maximum calls per page.

    Raises:
        ConfigError: `attempts` is not a number above 0.
    """

    def __init__(self, backend: StorageBackend, attempts: int = 64) -> None:
        check_number("attempts", attempts)
        if attempts < 1:
            raise ConfigError(f"attempts {attempts} must be above 0")
        super().__init__("persistent", backend, lambda engine, _: _PersistentEngine(engine, attempts))


class _PersistentEngine(EngineWrapper):
    def __init__(self, engine: PoolEngine, attempts: int) -> None:
        super().__init__(engine)
        self._attempts = attempts

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._again(self._engine.get, keys, slots)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._again(self._engine.put, keys, slots)

    async def _again(
        self, call: EngineMethod, keys: Sequence[ObjectKey], slots: Sequence[int]
    ) -> list[Outcome]:
        outcomes = await call(keys, slots)
        for _ in range(self._attempts - 1):
            failed = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.FAILED]
            if not failed:
                break
            again = await call([keys[place] for place in failed], [slots[place] for place in failed])
            for place, outcome in zip(failed, again, strict=True):
                outcomes[place] = outcome
        return outcomes


class Latency(_WrappingBackend):
    """A backend with added latency.

    Args:
        call: extra seconds per call.
        page: extra seconds per page of a call.
        sleep: sleeps for a given time; replace it to use another clock.
    """

    def __init__(
        self, backend: StorageBackend, call: float, page: float = 0.0, *, sleep: Sleep = asyncio.sleep
    ) -> None:
        super().__init__("slow", backend, lambda engine, _: _SlowEngine(engine, self._wait))
        self._call = call
        self._page = page
        self._sleep = sleep

    async def _wait(self, pages: int) -> None:
        await self._sleep(self._call + pages * self._page)


class _SlowEngine(EngineWrapper):
    def __init__(self, engine: PoolEngine, wait: Callable[[int], Awaitable[None]]) -> None:
        super().__init__(engine)
        self._wait = wait
        self.capabilities = replace(engine.capabilities, immediate=False)

    async def call(self, verb: str, *arguments: Any) -> Any:
        if verb != "aclose":
            await self._wait(len(arguments[0]) if arguments and isinstance(arguments[0], Sequence) else 0)
        return await super().call(verb, *arguments)


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probabilities of faults, each from 0 to 1, and the calls and pools they affect.

    Attributes:
        fail: a call does nothing and returns FAILED for every key.
        raises: a call does nothing and raises.
        hang: a call waits for `Faulty.release`, then continues.
        late: a call does its work immediately, but returns `late_seconds` of the `Faulty` later.
        partial: a page of a get or put is skipped and returns FAILED.
        lie: a key of `exists` or `confirm` gets the wrong answer.
        swap: a read returns HIT with another complete, sealed page: one of the same call or one that the
            engine stored before. If there is none, the right page gets a flipped bit.
        drop: a page of a put returns STORED but is not stored.
        calls: the affected calls, a subset of `CALLS`. Default: all.
        pools: the affected pools. Default (empty): all.

    Each fault is drawn by itself, so rates need not sum to 1 at most.

    Raises:
        ConfigError: a rate, a call or the pools are not such.
    """

    fail: float = 0.0
    raises: float = 0.0
    hang: float = 0.0
    late: float = 0.0
    partial: float = 0.0
    lie: float = 0.0
    swap: float = 0.0
    drop: float = 0.0
    calls: Collection[str] = CALLS
    pools: Collection[str] = ()

    def __post_init__(self) -> None:
        for rate in fields(self):
            value = getattr(self, rate.name)
            if rate.default == 0 and not (isinstance(value, int | float) and 0 <= value <= 1):
                raise ConfigError(f"fault rate {rate.name}={value!r} must be 0 to 1")
        for name in ("calls", "pools"):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Collection):
                raise ConfigError(f"fault rates' {name}={given!r} must be several names, no string")
        if not set(self.calls) <= set(CALLS):
            raise ConfigError(f"fault rates' calls={self.calls!r} must be some of {CALLS}")

    def concern(self, call: str, pool: str) -> bool:
        """Whether faults affect this call on this pool."""
        return call in self.calls and (not self.pools or pool in self.pools)


class Faulty(_WrappingBackend):
    """A backend with seeded faults.

    Its engines never claim to verify reads, even if the wrapped engines do, so the core checks every page.

    Args:
        rates: fault probabilities; may be replaced at any time.
        chance: the only source of randomness.
        late_seconds: delay of a late answer.
        sleep: sleeps for a given time; replace it to use another clock.
    """

    def __init__(
        self,
        backend: StorageBackend,
        rates: FaultRates,
        chance: random.Random,
        *,
        late_seconds: float = 60.0,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        super().__init__("faulty", backend, lambda engine, binding: _FaultyEngine(engine, binding, self))
        self.rates = rates
        self.injected: Counter[str] = Counter()
        """How often what went wrong, by the name of its rate."""
        self._chance = chance
        self._late_seconds = late_seconds
        self._sleep = sleep
        self._hanging: list[asyncio.Event] = []

    @property
    def hanging(self) -> int:
        """Calls that wait for `release`."""
        return len(self._hanging)

    def release(self) -> None:
        """Let all hanging calls continue."""
        hanging, self._hanging = self._hanging, []
        for event in hanging:
            event.set()

    async def aclose(self) -> None:
        self.release()
        await super().aclose()

    def occurs(self, name: str) -> bool:
        """Decide whether the named fault happens now, and count it if so."""
        rate: float = getattr(self.rates, name)
        if not rate or self._chance.random() >= rate:
            return False
        self.injected[name] += 1
        return True

    async def enter(self) -> bool:
        """Apply faults before a call does its work. Returns False if the call must fail.

        Raises:
            StorageError: the `raises` fault happened.
        """
        if self.occurs("hang"):
            event = asyncio.Event()
            self._hanging.append(event)
            await event.wait()
        if self.occurs("raises"):
            raise StorageError("made to raise")
        return not self.occurs("fail")

    async def leave(self) -> None:
        """Apply faults after a call did its work."""
        if self.occurs("late"):
            await self._sleep(self._late_seconds)


class _FaultyEngine(EngineWrapper):
    def __init__(self, engine: PoolEngine, binding: PoolBinding, faults: Faulty) -> None:
        super().__init__(engine)
        self._binding = binding
        self._faults = faults
        self._stored: deque[ObjectKey] = deque(maxlen=_REMEMBERED)
        self.capabilities = replace(engine.capabilities, checks=False, immediate=False)

    async def call(self, verb: str, *arguments: Any) -> Any:
        """What goes wrong with every verb but `get` and `put`."""
        if not self._concerned(verb):
            return await super().call(verb, *arguments)
        if not await self._faults.enter():
            if verb == "delete":
                return [Outcome.FAILED] * len(arguments[0])
            raise StorageError(f"made to fail; {verb} has no other word for it")
        answer = await super().call(verb, *arguments)
        await self._faults.leave()
        bits = isinstance(answer, bytearray)
        return (
            bytearray([there ^ (there < 2 and self._faults.occurs("lie")) for there in answer])
            if bits
            else answer
        )

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        if not self._concerned("get"):
            return await self._engine.get(keys, slots)
        outcomes = await self._some(self._engine.get, keys, slots)
        pairs = zip(keys, slots, strict=True)
        await self._swap(
            [pair for pair, outcome in zip(pairs, outcomes, strict=True) if outcome is Outcome.HIT]
        )
        return outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        if not self._concerned("put"):
            outcomes = await self._engine.put(keys, slots)
        else:
            outcomes = await self._some(self._put, keys, slots)
        stored = zip(keys, outcomes, strict=True)
        self._stored.extend(key for key, outcome in stored if outcome is Outcome.STORED)
        return outcomes

    async def _put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        outcomes = await self._engine.put(keys, slots)
        stored = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.STORED]
        if dropped := [key for key in stored if self._faults.occurs("drop")]:
            await self._engine.delete(dropped)
        return outcomes

    def _concerned(self, call: str) -> bool:
        return self._faults.rates.concern(call, self._binding.pool)

    async def _some(
        self,
        call: EngineMethod,
        keys: Sequence[ObjectKey],
        slots: Sequence[int],
    ) -> list[Outcome]:
        """Pass some of the pages to the engine; the others fail."""
        outcomes = [Outcome.FAILED] * len(keys)
        if not await self._faults.enter():
            return outcomes
        chosen = [place for place in range(len(keys)) if not self._faults.occurs("partial")]
        done = await call([keys[place] for place in chosen], [slots[place] for place in chosen])
        for place, outcome in zip(chosen, done, strict=True):
            outcomes[place] = outcome
        await self._faults.leave()
        return outcomes

    async def _swap(self, read: Sequence[tuple[ObjectKey, int]]) -> None:
        struck = [pair for pair in read if self._faults.occurs("swap")]
        if len(struck) == 1:
            await self._replace(*struck[0])
        for (_, one), (_, other) in pairwise(struck):  # rotates the pages: the first moves to the end
            self._exchange(one, other)

    async def _replace(self, key: ObjectKey, slot: int) -> None:
        """Read a page other than `key`'s into `slot`, or damage the page in it."""
        for other in self._stored:
            if other != key and await self._engine.get([other], [slot]) == [Outcome.HIT]:
                return
        self._binding.page(slot)[0] ^= 1

    def _exchange(self, one: int, other: int) -> None:
        for view in (self._binding.header, self._binding.page):
            mine, yours = view(one), view(other)
            mine[:], yours[:] = bytes(yours), bytes(mine)
