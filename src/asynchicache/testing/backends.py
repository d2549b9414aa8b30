"""Conformance tests for storage backends, to be run by a backend's author.

    @pytest.mark.asyncio
    class TestMine(BackendConformance):
        async def make_backend(self, port, tmp_path):
            return MyBackend(tmp_path, port)

The module does not need pytest: the tests are coroutines that take a folder and assert. It exceeds 400 lines
because one place lists all requirements on a backend.
"""

from __future__ import annotations

import asyncio
import mmap
import resource
import selectors
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256, shake_128
from pathlib import Path
from typing import Any

from asynchicache.hashing import NO_NAMESPACE, ObjectKey, naming_page, placed_pages
from asynchicache.layouts import HEADER_BYTES, SlotLayout
from asynchicache.ports import AsyncioPort, Port
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.deadlines import run_immediate
from asynchicache.storage.protocol import OptionalVerbs, PoolEngine, StorageBackend, check_backend, has_verb
from asynchicache.types import Outcome

_POISON = b"\xa5"


class SlotSlab:
    """Host slots of one pool in separate memory, without torch; a `storage.binding.SlotMemory`."""

    def __init__(self, layout: SlotLayout, slots: int) -> None:
        self.layout = layout
        self.slots = slots
        self._pages = memoryview(mmap.mmap(-1, slots * layout.slot_bytes))
        self._headers = memoryview(mmap.mmap(-1, slots * HEADER_BYTES))

    def page(self, slot: int) -> memoryview:
        size = self.layout.slot_bytes
        return self._pages[slot * size : (slot + 1) * size]

    def header(self, slot: int) -> memoryview:
        return self._headers[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]

    def regions(self) -> tuple[memoryview, memoryview]:
        return self._headers, self._pages


def slab_of(pool: str, page_bytes: int, slots: int) -> SlotSlab:
    """Slots of a synthetic pool with pages of `page_bytes`."""
    tensor = TensorSpec("bytes", (0,), (page_bytes,), "uint8")
    return SlotSlab(SlotLayout.of(PoolSpec(pool, (tensor,)), page_size=1), slots)


def fingerprint_of(text: str) -> bytes:
    """A 32-byte fingerprint that represents a model and its weights."""
    return sha256(text.encode()).digest()


def pattern(key: ObjectKey, size: int) -> bytes:
    """The bytes that a test stores under a key; they differ by key, which reveals misplaced pages."""
    return shake_128(b"\0".join((key.fingerprint, key.digest, key.pool.encode(), key.shard.encode()))).digest(
        size
    )


class TearingBinding(SlotBinding):
    """A binding that damages chosen pages when it seals them.

    Attributes:
        torn: digests of the pages to damage; initially empty.
        flow: while it is cleared, threads that seal or check a page wait; the loop's thread does not.
    """

    def __init__(
        self, memory: SlotSlab, fingerprint: bytes, shard: str = "", *, depends_on: str | None = None
    ) -> None:
        super().__init__(memory, fingerprint, shard, depends_on=depends_on)
        self.torn: set[bytes] = set()
        self.flow = threading.Event()
        self.flow.set()
        self._home = threading.get_ident()

    def _wait(self) -> None:
        if threading.get_ident() != self._home:
            self.flow.wait()

    def check(self, slot: int, key: ObjectKey) -> Outcome:
        self._wait()
        return super().check(slot, key)

    def restore(self, slot: int, key: ObjectKey, checksum: bytes) -> Outcome:
        self._wait()
        return super().restore(slot, key, checksum)

    def seal(self, slot: int, key: ObjectKey) -> bytes:
        self._wait()
        checksum = super().seal(slot, key)
        if key.digest not in self.torn:
            return checksum
        self.header(slot)[0] ^= 0xFF
        return bytes(byte ^ 0xFF for byte in checksum)


@dataclass(frozen=True, slots=True)
class PoolUnderTest:
    """One open pool and its host slots."""

    engine: PoolEngine
    binding: SlotBinding

    def tear(self, keys: Sequence[ObjectKey]) -> None:
        """Damage these pages when they are next sealed."""
        assert isinstance(self.binding, TearingBinding), f"{self.binding!r} damages nothing"
        self.binding.torn.update(key.digest for key in keys)

    def keys(self, *names: int) -> list[ObjectKey]:
        """A key for each number, which is that of its page on one path."""
        paged = {*names, *map(naming_page, names)}
        digests = {name: NO_NAMESPACE + sha256(b"%d" % name).digest() for name in paged}
        return list(map(self.binding.placed_key, placed_pages(digests, names)))

    def fill(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> None:
        """Put each key's bytes into its slot."""
        for key, slot in zip(keys, slots, strict=True):
            self.binding.page(slot)[: self.binding.page_bytes] = pattern(key, self.binding.page_bytes)

    def poison(self, slots: Sequence[int]) -> None:
        """Fill slots and headers with bytes that belong to no key."""
        for slot in slots:
            for view in (self.binding.header(slot), self.binding.page(slot)):
                view[:] = _POISON * len(view)

    def holds(self, key: ObjectKey, slot: int) -> bool:
        """Whether a slot has a key's bytes."""
        return self.binding.page(slot)[: self.binding.page_bytes] == pattern(key, self.binding.page_bytes)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self.fill(keys, slots)
        return await self.engine.put(keys, slots)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        """Get pages; compare the bytes of every HIT, and its header if the core would check it."""
        self.poison(slots)
        outcomes = await self.engine.get(keys, slots)
        assert len(outcomes) == len(keys), f"{len(outcomes)} outcomes for {len(keys)} keys"
        believed = self.engine.capabilities.checks and not self.engine.capabilities.shared
        for key, slot, outcome in zip(keys, slots, outcomes, strict=True):
            if outcome is not Outcome.HIT:
                continue
            assert self.holds(key, slot), f"other bytes for {key.text()}"
            assert believed or self.binding.check(slot, key) is Outcome.HIT, (
                f"{key.text()} came without its header: `put` must call binding.seal and store the header "
                "too, or `get` call binding.restore"
            )
        return outcomes


class _WatchedSelector(selectors.DefaultSelector):
    """Tells how long the thread of its loop waited elsewhere than here: gave up the processor by itself.

    Being preempted does not count, so the answer does not depend on the machine's speed or load.
    """

    def begin(self) -> None:
        self._waited = 0.0
        self._mark()

    def waited(self) -> float:
        """Seconds since `begin`."""
        self._count()
        return self._waited

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._count()
        try:
            return super().select(timeout)
        finally:
            self._mark()

    _waited = _clock = _used = 0.0
    _switches = 0

    def _mark(self) -> None:
        self._clock, self._used = time.monotonic(), time.thread_time()
        self._switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    def _count(self) -> None:
        if resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > self._switches:
            idle = (time.monotonic() - self._clock) - (time.thread_time() - self._used)
            self._waited += max(idle, 0.0)
        self._mark()


_CALLS = 10
"""Of each verb. A thread of the engine may have the interpreter's lock in some, not in all."""

OPTIONAL_CALLS: dict[str, Callable[[OptionalVerbs, list[ObjectKey]], Coroutine[Any, Any, object]]] = {
    "touch": lambda verbs, keys: verbs.touch(keys),
    "confirm": lambda verbs, keys: verbs.confirm(keys),
    "label": lambda verbs, keys: verbs.label(b"{}"),
    "claim": lambda verbs, keys: verbs.claim(keys, 5.0),
    "leaving": lambda verbs, keys: verbs.leaving(len(keys)),
}
"""A call of each optional verb, about the pages of some keys. Each also has a test of what it does."""

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
CORRUPT, REJECTED, CLAIMED = Outcome.CORRUPT, Outcome.REJECTED, Outcome.CLAIMED


class BackendConformance:
    """Tests of one backend. A subclass opens the backend.

    The tests cannot prove that an engine is `durable`. They look for pages after an orderly close in the same
    process, and so also find pages that were written only at close or that are only in the page cache. To
    test durability, kill the process during writes, and cut a recorded log of writes and syncs everywhere.

    Attributes:
        page_bytes: size of a stored page; not a multiple of 4,096, so that slots have padding.
        slots: host slots of a pool.
        many: keys of a large question; fewer where each is a request to a slow server, but more than are sent
            at once.
        sealed: False for an engine that trusts its medium (such as process memory) and seals nothing.
        bounded: True for a backend that evicts by order of use and implements `make_bounded`.
        seconds: time limit of one test.
    """

    page_bytes = 5000
    slots = 64
    many = 1000
    sealed = True
    bounded = False
    seconds = 300.0

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        """Open the backend. Opening the same folder again must find the same pages if they are durable."""
        raise TypeError(f"{type(self).__name__} must say how its backend is opened: make_backend")

    async def make_bounded(self, port: Port, tmp_path: Path, pages: int) -> StorageBackend:
        """Open the backend with room for exactly `pages` pages of one pool, in a separate folder."""
        raise TypeError(f"{type(self).__name__} is `bounded`, and must say how: make_bounded")

    @asynccontextmanager
    async def backend(self, tmp_path: Path, pages: int | None = None) -> AsyncIterator[StorageBackend]:
        """Open the backend, with `make_bounded` if `pages` is given; at the end, close it and its threads."""
        limit = asyncio.timeout(self.seconds)
        try:
            async with limit, AsyncExitStack() as stack:
                port = AsyncioPort(threads=4, seed=0)
                stack.push_async_callback(port.aclose)
                if pages is None:
                    backend = await self.make_backend(port, tmp_path)
                else:
                    backend = await self.make_bounded(port, tmp_path, pages)
                check_backend(f"what {type(self).__name__} opens", backend)
                stack.push_async_callback(backend.aclose)
                yield backend
        except TimeoutError:
            assert not limit.expired(), f"not done in {self.seconds} s: a call of the backend hangs"
            raise

    async def open(
        self, backend: StorageBackend, pool: str = "kv", *, weights: str = "w1", shard: str = ""
    ) -> PoolUnderTest:
        """Open a pool of the backend, with slots."""
        slab = slab_of(pool, self.page_bytes, self.slots)
        binding = TearingBinding(slab, fingerprint_of(weights), shard)
        return PoolUnderTest(await backend.open_pool(binding), binding)

    @asynccontextmanager
    async def opened(self, tmp_path: Path, pages: int | None = None) -> AsyncIterator[PoolUnderTest]:
        """Open the backend and a pool of it, as `backend` and `open`."""
        async with self.backend(tmp_path, pages) as backend:
            yield await self.open(backend)

    async def test_a_page_comes_back_into_any_slot(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(1, 2, 3)

            assert await bench.put(keys, [0, 1, 2]) == [STORED] * 3
            assert await bench.get(keys, [9, 4, 30]) == [HIT] * 3

    async def test_what_was_never_put_is_a_miss(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(1, 2)

            assert await bench.engine.exists(keys) == bytes(2)
            assert await bench.get(keys, [0, 1]) == [MISS] * 2

    async def test_one_answer_a_key_with_holes_between(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            await bench.put(bench.keys(1, 3, 4), [0, 1, 2])
            keys = bench.keys(0, 1, 2, 3, 4, 5)

            assert await bench.engine.exists(keys) == bytes([0, 1, 0, 1, 1, 0])
            assert await bench.get(keys, [15, 14, 13, 12, 11, 10]) == [MISS, HIT, MISS, HIT, HIT, MISS]

    async def test_exists_answers_for_many_keys(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            await bench.put(bench.keys(7, self.many - 3), [0, 1])

            found = await bench.engine.exists(bench.keys(*range(self.many)))

            assert [number for number, there in enumerate(found) if there] == [7, self.many - 3]

    async def test_a_key_that_exists_keeps_its_bytes(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(1, 2)
            await bench.put(keys[:1], [0])
            bench.poison([1])  # what stands there now is not the page, and must not take its place
            bench.fill(keys[1:], [2])

            again = await bench.engine.put(keys, [1, 2])

            assert again[0] in (EXISTS, STORED)  # not every medium tells whether it was there
            assert again[1] is STORED
            assert await bench.get(keys, [3, 4]) == [HIT] * 2

    async def test_a_key_twice_in_one_batch(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(1, 2, 1)

            assert set(await bench.put(keys, [0, 1, 2])) <= {STORED, EXISTS}
            assert await bench.get(keys, [3, 4, 5]) == [HIT] * 3

    async def test_an_empty_batch_is_nothing(self, tmp_path: Path) -> None:
        async with self.backend(tmp_path) as backend:
            engine = (await self.open(backend)).engine

            assert await engine.exists([]) == b""
            assert [await engine.get([], []), await engine.put([], []), await engine.delete([])] == [
                [],
                [],
                [],
            ]

    async def test_a_deleted_page_is_a_miss_and_may_come_again(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(1, 2)
            await bench.put(keys, [0, 1])

            assert await bench.engine.delete(bench.keys(1, 9)) == [HIT, MISS]
            assert await bench.get(keys, [2, 3]) == [MISS, HIT]
            assert await bench.put(keys[:1], [0]) == [STORED]
            assert await bench.get(keys, [2, 3]) == [HIT, HIT]

    async def test_the_slot_is_the_callers_again_after_put(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(1)
            await bench.put(keys, [0])
            assert bench.holds(keys[0], 0)

            bench.poison([0])

            assert await bench.get(keys, [1]) == [HIT]

    async def test_padding_does_not_count(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(1, 2)
            bench.poison([0, 1])

            assert await bench.put(keys, [0, 1]) == [STORED] * 2
            bench.poison([0, 1])
            assert await bench.get(keys, [1, 0]) == [HIT] * 2

    async def test_a_page_that_is_not_what_was_sealed_is_no_hit(self, tmp_path: Path) -> None:
        """If its capabilities say `checks`, the engine detects the damage; otherwise the core does, by the
        seal."""
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(1, 2)
            bench.tear(keys[:1])
            await bench.put(keys, [0, 1])
            if not self.sealed:
                return

            outcomes = await bench.engine.get(keys, [2, 3])

            checks = bench.engine.capabilities.checks
            seen = outcomes[0] if checks else bench.binding.check(2, keys[0])
            assert seen in (CORRUPT, MISS), (
                f"checks={checks}, and a damaged page is {seen}: call binding.check"
            )
            assert outcomes[1] is HIT

    async def test_an_immediate_engine_never_suspends(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            if not bench.engine.capabilities.immediate:
                return
            keys = bench.keys(1)
            bench.fill(keys, [0])

            assert run_immediate(bench.engine.put(keys, [0])) == [STORED]
            assert run_immediate(bench.engine.exists(keys)) == b"\1"
            assert run_immediate(bench.engine.get(keys, [1])) == [HIT]
            for ask in OPTIONAL_CALLS.values():
                run_immediate(ask(OptionalVerbs(bench.engine), keys))
            assert run_immediate(bench.engine.delete(keys)) == [HIT]

    async def test_no_call_blocks_the_loop(self, tmp_path: Path) -> None:
        """Waiting for a disk, a server, a lock or a sleep belongs into threads, or to asyncio.

        On a loop of its own, whose thread must not give up the processor by itself but in the selector. One
        call may meet a thread that has the interpreter's lock; an engine that waits does so in every call.
        """
        await asyncio.to_thread(self._run_watched, tmp_path)

    def _run_watched(self, tmp_path: Path) -> None:
        selector = _WatchedSelector()
        loop = partial(asyncio.SelectorEventLoop, selector)
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(self._watch(selector, tmp_path))

    async def _watch(self, selector: _WatchedSelector, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            waited: dict[str, list[float]] = {}
            for number in range(_CALLS):
                keys = bench.keys(number)
                bench.fill(keys, [0])
                calls: dict[str, Callable[[], Awaitable[object]]] = {
                    "put": partial(bench.engine.put, keys, [0]),
                    "exists": partial(bench.engine.exists, keys),
                    "get": partial(bench.engine.get, keys, [1]),
                }
                verbs = OptionalVerbs(bench.engine)
                calls |= {verb: partial(ask, verbs, keys) for verb, ask in OPTIONAL_CALLS.items()}
                calls["delete"] = partial(bench.engine.delete, keys)
                for verb, call in calls.items():
                    selector.begin()
                    await call()
                    waited.setdefault(verb, []).append(selector.waited())
            blocking = {verb: min(times) for verb, times in waited.items() if min(times) > 0}
            assert not blocking, (
                f"the thread of the loop waits in every call, for so many seconds at least: {blocking}"
            )

    async def test_a_touch_changes_no_page(self, tmp_path: Path) -> None:
        """An engine with `touch` accepts any keys, and creates none of them."""
        async with self.opened(tmp_path) as bench:
            await bench.put(bench.keys(1, 2), [0, 1])

            for keys in (bench.keys(2, 9, 1, 1), [], bench.keys(*range(self.many))):
                await OptionalVerbs(bench.engine).touch(keys)

            assert await bench.engine.exists(bench.keys(1, 2, 9)) == bytes([1, 1, 0])
            assert await bench.get(bench.keys(2, 9, 1), [2, 3, 4]) == [HIT, MISS, HIT]

    async def test_what_is_stored_is_confirmed_and_nothing_else(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            await bench.put(bench.keys(1, 2, 3), [0, 1, 2])
            await bench.engine.delete(bench.keys(2))
            confirm = OptionalVerbs(bench.engine).confirm

            assert await confirm(bench.keys(9, 3, 2, 1)) == bytes([0, 1, 0, 1])
            assert await confirm([]) == b""
            assert await confirm(bench.keys(*range(self.many))) == bytes([0, 1, 0, 1]) + bytes(self.many - 4)

    async def test_of_two_writers_one_is_told_to_send_a_page(self, tmp_path: Path) -> None:
        async with self.backend(tmp_path) as backend:
            bench = await self.open(backend)
            keys, later = bench.keys(*range(40)), bench.keys(*range(50, 54))
            claim = OptionalVerbs(bench.engine).claim
            if not has_verb(bench.engine, "claim"):
                assert await claim(keys, 60.0) == [MISS] * 40
                return
            await bench.put(keys[:2], [0, 1])
            async with self.backend(tmp_path) as another:
                other = await self.open(another)
                asks = OptionalVerbs(other.engine).claim

                assert await claim(keys, 60.0) == [EXISTS] * 2 + [MISS] * 38
                assert await asks(keys, 60.0) == [EXISTS] * 2 + [CLAIMED] * 38
                assert await asks(keys[20:22], 60.0) == [CLAIMED] * 2
                assert await bench.put(keys[2:], range(2, 40)) == [STORED] * 38
                assert await asks(keys, 60.0) == [EXISTS] * 40
                assert await claim(later, 0.05) == [MISS] * 4  # and then it dies
                while await asks(later, 60.0) != [MISS] * 4:  # noqa: ASYNC110 - time ends it, nobody tells
                    await asyncio.sleep(0.01)
                assert await asks([], 60.0) == []

    async def test_what_was_touched_last_is_evicted_last(self, tmp_path: Path) -> None:
        if not self.bounded:
            return
        async with self.opened(tmp_path, pages=8) as bench:
            assert has_verb(bench.engine, "touch"), "`bounded`, but the engine has no touch"
            for number in range(8):
                await bench.put(bench.keys(number), [0])
            await OptionalVerbs(bench.engine).touch(bench.keys(5, 4, 3, 2, 1, 0))

            assert await self._left(bench, range(8), new=range(20, 22)) == [0, 1, 2, 3, 4, 5]
            assert await self._left(bench, range(8), new=range(22, 27)) == [0]

    async def test_a_path_loses_its_end_first(self, tmp_path: Path) -> None:
        """The first key of a put or get is the beginning of a path, and counts as the most recently used."""
        if not self.bounded:
            return
        async with self.opened(tmp_path, pages=8) as bench:
            await bench.put(bench.keys(*range(4)), range(4))
            await bench.put(bench.keys(*range(10, 14)), range(4))
            await bench.get(bench.keys(*range(4)), range(4))

            assert await self._left(bench, range(10, 14), new=range(20, 23)) == [10]
            assert await self._left(bench, range(4), new=range(23, 26)) == [0, 1]

    async def test_no_put_evicts_its_own_pages(self, tmp_path: Path) -> None:
        if not self.bounded:
            return
        async with self.opened(tmp_path, pages=8) as bench:
            await bench.put(bench.keys(100, 0, 1, 2), range(4))

            outcomes = await bench.put(bench.keys(*range(12)), range(12))

            assert outcomes == [EXISTS] * 3 + [STORED] * 5 + [REJECTED] * 4
            assert await bench.get(bench.keys(*range(12)), range(12)) == [HIT] * 8 + [MISS] * 4

    async def test_a_label_is_no_page(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            await OptionalVerbs(bench.engine).label(b"first")
            await bench.put(bench.keys(1), [0])
            await OptionalVerbs(bench.engine).label(b"second")

            assert await bench.get(bench.keys(1, 2), [1, 2]) == [HIT, MISS]
            assert await bench.engine.clear() == 1

    async def test_what_leaves_next_is_what_is_evicted_next(self, tmp_path: Path) -> None:
        if not self.bounded:
            return
        async with self.opened(tmp_path, pages=8) as bench:
            await bench.put(bench.keys(*range(8)), range(8))
            assert await OptionalVerbs(bench.engine).leaving(0) == []

            leaving = await OptionalVerbs(bench.engine).leaving(2)

            left = await self._left(bench, range(8), new=[20, 21])
            assert {key for key in bench.keys(*range(8)) if key in leaving} >= {
                key for number, key in enumerate(bench.keys(*range(8))) if number not in left
            }
            assert leaving[:2] == bench.keys(7, 6)  # a path loses its end first

    async def _left(self, bench: PoolUnderTest, numbers: Sequence[int], *, new: Sequence[int]) -> list[int]:
        """Store new pages one by one; return which of the pages `numbers` are left."""
        for number in new:
            assert await bench.put(bench.keys(number), [0]) == [STORED]
        found = await bench.engine.exists(bench.keys(*numbers))
        return [number for number, there in zip(numbers, found, strict=True) if there]

    async def test_pools_shards_and_weights_are_apart(self, tmp_path: Path) -> None:
        async with self.backend(tmp_path) as backend:
            benches = [
                await self.open(backend),
                await self.open(backend, "mamba"),
                await self.open(backend, shard="1/2"),
                await self.open(backend, weights="w2"),
            ]
            await benches[0].put(benches[0].keys(1), [0])

            answers = [await bench.get(bench.keys(1), [1]) for bench in benches]

            assert answers == [[HIT], [MISS], [MISS], [MISS]]

    async def test_clear_forgets_one_pool_of_one_model_on_one_shard(self, tmp_path: Path) -> None:
        async with self.backend(tmp_path) as backend:
            mine = await self.open(backend)
            others = [
                await self.open(backend, "mamba"),
                await self.open(backend, shard="1/2"),
                await self.open(backend, weights="w2"),
            ]
            for bench in (mine, *others):
                assert await bench.put(bench.keys(1, 2), [0, 1]) == [STORED] * 2

            assert await mine.engine.clear() == 2

            assert await mine.get(mine.keys(1, 2), [2, 3]) == [MISS] * 2
            for bench in others:
                assert await bench.get(bench.keys(1, 2), [2, 3]) == [HIT] * 2
            assert await mine.put(mine.keys(1), [0]) == [STORED]
            assert await mine.get(mine.keys(1), [2]) == [HIT]

    async def test_opened_again_with_its_binding_it_is_the_same_engine(self, tmp_path: Path) -> None:
        async with self.backend(tmp_path) as backend:
            bench = await self.open(backend)

            assert await backend.open_pool(bench.binding) is bench.engine

    async def test_a_pool_may_be_opened_while_another_is_used(self, tmp_path: Path) -> None:
        async with self.backend(tmp_path) as backend:
            first = await self.open(backend)
            putting = asyncio.create_task(first.put(first.keys(1, 2), [0, 1]))
            second = await self.open(backend, "mamba")

            assert await second.put(second.keys(1), [0]) == [STORED]
            assert await putting == [STORED] * 2
            assert await second.get(second.keys(1), [1]) == [HIT]

    async def test_calls_side_by_side(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            groups = [list(range(start, start + 8)) for start in range(0, 32, 8)]
            putting = [bench.put(bench.keys(*group), group) for group in groups]
            assert await asyncio.gather(*putting) == [[STORED] * 8] * 4

            getting = [bench.get(bench.keys(*group), [slot + 32 for slot in group]) for group in groups]
            deleting = bench.engine.delete(bench.keys(100, 101))

            *answers, gone = await asyncio.gather(*getting, deleting)
            assert (answers, gone) == ([[HIT] * 8] * 4, [MISS] * 2)

    async def test_the_same_page_from_two_callers(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(*range(8))

            answers = await asyncio.gather(bench.put(keys, range(8)), bench.put(keys, range(8, 16)))

            assert {outcome for answer in answers for outcome in answer} <= {STORED, EXISTS}
            assert await bench.get(keys, range(16, 24)) == [HIT] * 8

    async def test_a_question_waits_for_no_page(self, tmp_path: Path) -> None:
        """Pages of other calls may be stuck, in any number: in threads, on connections, for permits."""
        async with self.opened(tmp_path) as bench:
            assert isinstance(bench.binding, TearingBinding)
            keys = bench.keys(*range(8))  # few pages, and many calls: a small store has room
            await bench.put(keys[:4], range(4))
            bench.fill(keys[4:], range(60, 64))
            bench.binding.flow.clear()
            try:
                moving = [asyncio.ensure_future(bench.engine.get([keys[n % 4]], [n])) for n in range(60)]
                moving += [asyncio.ensure_future(bench.engine.put([keys[n]], [56 + n])) for n in range(4, 8)]
                for _ in range(10):
                    await asyncio.sleep(0)  # they are on their way, and ask first for all that is limited

                assert await bench.engine.exists(bench.keys(0, 1, 900)) == bytes([1, 1, 0])
            finally:
                bench.binding.flow.set()
            assert await asyncio.gather(*moving) == [[HIT]] * 60 + [[STORED]] * 4

    async def test_a_cancelled_call_disturbs_no_other(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            keys = bench.keys(*range(8))
            await bench.put(keys[:4], range(4))
            for call in (bench.get(keys, range(8, 16)), bench.put(keys[4:], range(4, 8))):
                task = asyncio.create_task(call)
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])

            assert await bench.get(keys[:4], range(16, 20)) == [HIT] * 4
            assert set(await bench.put(keys[4:], range(24, 28))) <= {STORED, EXISTS}
            assert await bench.get(keys[4:], range(20, 24)) == [HIT] * 4

    async def test_closing_twice_and_opening_again(self, tmp_path: Path) -> None:
        async with self.backend(tmp_path) as backend:
            bench = await self.open(backend)
            await bench.put(bench.keys(1), [0])
            await asyncio.gather(bench.engine.aclose(), bench.engine.aclose())
            await bench.engine.aclose()

            again = await self.open(backend)

            assert await again.get(again.keys(1), [0]) == [HIT]
            await asyncio.gather(backend.aclose(), backend.aclose())
            await backend.aclose()

    async def test_durable_pages_are_there_after_reopening(self, tmp_path: Path) -> None:
        async with self.backend(tmp_path) as backend:
            bench = await self.open(backend)
            durable = bench.engine.capabilities.durable
            await bench.put(bench.keys(1, 2, 3), [0, 1, 2])
            await bench.engine.delete(bench.keys(2))
        if not durable:
            return
        async with self.backend(tmp_path) as backend:
            bench = await self.open(backend)

            assert await bench.get(bench.keys(1, 2, 3), [3, 4, 5]) == [HIT, MISS, HIT]
