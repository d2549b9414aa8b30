"""Both embedded engines, bare and behind wrappers, against the conformance tests; and broken ones,
to prove that those tests can fail.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from asynchicache.backends import file, memory
from asynchicache.errors import ConfigError, StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.chain import ChainStage, StagePolicy, StorageChain
from asynchicache.storage.protocol import PoolBinding, PoolEngine, StorageBackend
from asynchicache.testing.backends import BackendConformance
from asynchicache.testing.faults import FaultRates, Faulty, Latency, Persistent
from asynchicache.types import Outcome
from storage.file_stores import capacity_for


@pytest.mark.asyncio
class TestMemory(BackendConformance):
    bounded = True

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return memory.open_backend({}, port)

    async def make_bounded(self, port: Port, tmp_path: Path, pages: int) -> StorageBackend:
        return memory.open_backend({"capacity_bytes": pages * self.page_bytes}, port)


@pytest.mark.asyncio
class TestMemoryUnsealed(BackendConformance):
    sealed = False

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return memory.open_backend({"checksum": False}, port)


@pytest.mark.asyncio
class TestFile(BackendConformance):
    bounded = True

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return file.open_backend({"path": str(tmp_path)}, port)

    async def make_bounded(self, port: Port, tmp_path: Path, pages: int) -> StorageBackend:
        return file.open_backend({"path": tmp_path, "capacity_bytes": capacity_for(pages)}, port)


@pytest.mark.asyncio
class TestFileThroughTheKernelsCache(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return file.open_backend({"path": tmp_path, "direct": False}, port)


@pytest.mark.asyncio
class TestFileWithTinyPages(BackendConformance):
    page_bytes = 1

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return file.open_backend({"path": tmp_path}, port)


def chain_of(port: Port, *stages: tuple[str, Callable[[], StorageBackend], StagePolicy]) -> StorageChain:
    """A chain of stores, the nearest first."""
    return StorageChain([ChainStage(*stage) for stage in stages], port)


@pytest.mark.asyncio
class TestChainOfMemories(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return chain_of(
            port,
            ("near", partial(memory.open_backend, {}, port), StagePolicy()),
            ("far", partial(memory.open_backend, {}, port), StagePolicy()),
        )


@pytest.mark.asyncio
class TestMemoryBeforeFile(BackendConformance):
    """The memory is too small for most tests, so that pages come from the file."""

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        small = {"capacity_bytes": 2 * self.page_bytes}
        return chain_of(
            port,
            ("near", partial(memory.open_backend, small, port), StagePolicy()),
            ("far", partial(file.open_backend, {"path": tmp_path}, port), StagePolicy()),
        )


@pytest.mark.asyncio
class TestFileBeforeFile(BackendConformance):
    """What leaves the nearer file goes to the farther one."""

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        near = {"path": tmp_path / "near", "capacity_bytes": 64 << 20}
        return chain_of(
            port,
            ("near", partial(file.open_backend, near, port), StagePolicy()),
            (
                "far",
                partial(file.open_backend, {"path": tmp_path / "far"}, port),
                StagePolicy(write="leaving"),
            ),
        )


@pytest.mark.asyncio
class TestSlowMemory(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Latency(memory.open_backend({}, port), 0.001, page=0.0001)


@pytest.mark.asyncio
class TestSlowFile(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Latency(file.open_backend({"path": tmp_path}, port), 0.001)


@pytest.mark.asyncio
class TestMemoryWithoutFaults(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Faulty(memory.open_backend({}, port), FaultRates(), Random(0))


@pytest.mark.asyncio
class TestMemoryInParts(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Persistent(Faulty(memory.open_backend({}, port), FaultRates(partial=0.3), Random(0)))


@pytest.mark.asyncio
class TestFileWithoutFaults(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Faulty(file.open_backend({"path": tmp_path}, port), FaultRates(), Random(0))


@pytest.mark.asyncio
class TestFileInParts(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Persistent(
            Faulty(file.open_backend({"path": tmp_path}, port), FaultRates(partial=0.3), Random(0))
        )


class BrokenBackend:
    """The memory backend with one thing wrong in its engines."""

    name = "broken"

    def __init__(self, port: Port, wrong: type[BrokenEngine], **options: object) -> None:
        self._backend = memory.open_backend(options, port)
        self._wrong = wrong

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        return self._wrong(await self._backend.open_pool(binding), binding)

    async def aclose(self) -> None:
        await self._backend.aclose()


class BrokenEngine:
    def __init__(self, engine: PoolEngine, binding: PoolBinding) -> None:
        self.engine = engine
        self.binding = binding
        self.capabilities = engine.capabilities

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        return await self.engine.exists(keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self.engine.get(keys, slots)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self.engine.put(keys, slots)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return await self.engine.delete(keys)

    async def clear(self) -> int:
        return await self.engine.clear()

    async def aclose(self) -> None:
        await self.engine.aclose()


class ForgetsPools(BrokenEngine):
    """Keys without the pool: what one pool put, another gets."""

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        return await self.engine.exists([key._replace(pool="kv") for key in keys])

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        found = await self.exists(keys)
        await self.engine.get([key._replace(pool="kv") for key in keys], slots)
        return [Outcome.HIT if there else Outcome.MISS for there in found]


class MisplacesAfterHoles(BrokenEngine):
    """Found pages go to the first slots, not to their own."""

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        found = await self.exists(keys)
        there = [key for key, bit in zip(keys, found, strict=True) if bit]
        await self.engine.get(there, slots[: len(there)])
        return [Outcome.HIT if bit else Outcome.MISS for bit in found]


class StopsAtHoles(BrokenEngine):
    """As if only the leading run counted."""

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        found = await self.engine.exists(keys)
        run = found.find(0)
        return found if run < 0 else found[:run] + bytes(len(found) - run)


class KeepsDeleted(BrokenEngine):
    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return [Outcome.HIT if there else Outcome.MISS for there in await self.exists(keys)]


class SaysStoredOnly(BrokenEngine):
    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return [Outcome.STORED] * len(keys)


class AliasesSlots(BrokenEngine):
    """Remembers where a page was, not what it was."""

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self.where = dict(zip(keys, slots, strict=True))
        return await self.engine.put(keys, slots)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        for key, slot in zip(keys, slots, strict=True):
            self.binding.page(slot)[:] = self.binding.page(self.where[key])
        return [Outcome.HIT] * len(keys)


class Unsealed(BrokenEngine):
    """Keeps bytes, and no header."""

    def __init__(self, engine: PoolEngine, binding: PoolBinding) -> None:
        super().__init__(engine, binding)
        self.pages: dict[ObjectKey, bytes] = {}
        self.capabilities = replace(engine.capabilities, checks=False, immediate=False)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        for key, slot in zip(keys, slots, strict=True):
            self.pages[key] = bytes(self.binding.page(slot))
        return [Outcome.STORED] * len(keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        for key, slot in zip(keys, slots, strict=True):
            self.binding.page(slot)[:] = self.pages[key]
        return [Outcome.HIT] * len(keys)


class SaysThatItChecks(Unsealed):
    """Keeps headers, and does not look at them."""

    def __init__(self, engine: PoolEngine, binding: PoolBinding) -> None:
        super().__init__(engine, binding)
        self.capabilities = replace(engine.capabilities, immediate=False)


class SharesWithoutHeaders(Unsealed):
    """Others write there too, and nothing in a slot says whose page it is."""

    def __init__(self, engine: PoolEngine, binding: PoolBinding) -> None:
        super().__init__(engine, binding)
        self.capabilities = replace(engine.capabilities, shared=True, immediate=False)


class SaysThatItIsImmediate(BrokenEngine):
    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        await asyncio.sleep(0)
        return await self.engine.exists(keys)


class Hangs(BrokenEngine):
    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        await asyncio.Event().wait()
        return []


class QueuesQuestions(BrokenEngine):
    """A question waits until the thread is done with the pages of others."""

    def __init__(self, engine: PoolEngine, binding: PoolBinding) -> None:
        super().__init__(engine, binding)
        self.capabilities = replace(engine.capabilities, immediate=False)
        self.turn = asyncio.Lock()

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        async with self.turn:
            outcomes = await self.engine.get(keys, slots)
            await asyncio.to_thread(self.binding.check, slots[0], keys[0])
        return outcomes

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        async with self.turn:
            return await self.engine.exists(keys)


class BlocksTheLoop(BrokenEngine):
    """Each call waits in the loop's thread."""

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        time.sleep(0.001)  # noqa: ASYNC251 - this is what is wrong with it
        return await super().exists(keys)


class BlocksInATask(BrokenEngine):
    """As the one before, in a task of its own, which is behind an innocent step."""

    def __init__(self, engine: PoolEngine, binding: PoolBinding) -> None:
        super().__init__(engine, binding)
        self.capabilities = replace(engine.capabilities, immediate=False)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        await asyncio.sleep(0)
        return await asyncio.create_task(self._get(keys, slots))

    async def _get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        threading.Event().wait(0.001)
        return await self.engine.get(keys, slots)


class Overwrites(BrokenEngine):
    """The last one who puts a page under a key is believed."""

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        await self.engine.delete(keys)
        return await self.engine.put(keys, slots)


class OverwritesAndSaysExists(Overwrites):
    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        found = await self.engine.exists(keys)
        await super().put(keys, slots)
        return [Outcome.EXISTS if there else Outcome.STORED for there in found]


class IgnoresUses(BrokenEngine):
    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        pass


class StoresWhatItIsToTouch(IgnoresUses):
    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        await self.engine.put(keys, [63] * len(keys))


class TurnsPathsAround(IgnoresUses):
    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return (await self.engine.put(keys[::-1], slots[::-1]))[::-1]


class EvictsWhatItStores(IgnoresUses):
    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        pairs = zip(keys, slots, strict=True)
        return [outcome for key, slot in pairs for outcome in await self.engine.put([key], [slot])]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        (ForgetsPools, "test_pools_shards_and_weights_are_apart"),
        (MisplacesAfterHoles, "test_one_answer_a_key_with_holes_between"),
        (StopsAtHoles, "test_one_answer_a_key_with_holes_between"),
        (StopsAtHoles, "test_exists_answers_for_many_keys"),
        (KeepsDeleted, "test_a_deleted_page_is_a_miss_and_may_come_again"),
        (SaysStoredOnly, "test_a_page_comes_back_into_any_slot"),
        (SaysStoredOnly, "test_closing_twice_and_opening_again"),
        (AliasesSlots, "test_the_slot_is_the_callers_again_after_put"),
        (Unsealed, "test_a_page_comes_back_into_any_slot"),
        (SaysThatItChecks, "test_a_page_that_is_not_what_was_sealed_is_no_hit"),
        (SharesWithoutHeaders, "test_a_page_comes_back_into_any_slot"),
        (Hangs, "test_a_page_comes_back_into_any_slot"),
        (QueuesQuestions, "test_a_question_waits_for_no_page"),
        (BlocksTheLoop, "test_no_call_blocks_the_loop"),
        (BlocksInATask, "test_no_call_blocks_the_loop"),
        (Overwrites, "test_a_key_that_exists_keeps_its_bytes"),
        (OverwritesAndSaysExists, "test_a_key_that_exists_keeps_its_bytes"),
        (BrokenEngine, "test_what_was_touched_last_is_evicted_last"),  # it has no touch
        (IgnoresUses, "test_what_was_touched_last_is_evicted_last"),
        (StoresWhatItIsToTouch, "test_a_touch_changes_no_page"),
        (TurnsPathsAround, "test_a_path_loses_its_end_first"),
        (EvictsWhatItStores, "test_no_put_evicts_its_own_pages"),
    ],
)
async def test_the_tests_find_what_is_wrong(wrong: type[BrokenEngine], test: str, tmp_path: Path) -> None:
    class Suite(BackendConformance):
        seconds = 0.02 if wrong is Hangs else 1 if wrong is QueuesQuestions else 300
        bounded = True

        async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
            return BrokenBackend(port, wrong)

        async def make_bounded(self, port: Port, tmp_path: Path, pages: int) -> StorageBackend:
            return BrokenBackend(port, wrong, capacity_bytes=pages * self.page_bytes)

    with pytest.raises(AssertionError):
        await getattr(Suite(), test)(tmp_path)


@pytest.mark.asyncio
async def test_they_find_an_engine_that_is_not_as_immediate_as_it_says(tmp_path: Path) -> None:
    class Suite(BackendConformance):
        async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
            return BrokenBackend(port, SaysThatItIsImmediate)

    with pytest.raises(StorageError, match="immediate"):
        await Suite().test_an_immediate_engine_never_suspends(tmp_path)


@pytest.mark.asyncio
async def test_a_backend_that_no_cache_would_take_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nameless(BackendConformance):
        async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
            return BrokenBackend(port, BrokenEngine)

    monkeypatch.delattr(BrokenBackend, "name")
    with pytest.raises(ConfigError, match=r"what Nameless opens is no StorageBackend: it lacks name$"):
        await Nameless().test_what_was_never_put_is_a_miss(tmp_path)
