"""Writes to storage, what is told of uses, and what storage is asked to confirm: counts, bytes and order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from asynchicache.controller import storage_writer
from asynchicache.controller.presence_queries import PresenceQueries
from asynchicache.controller.storage_pools import Presence
from asynchicache.controller.storage_writer import StorageWriter, WriteCounters
from asynchicache.errors import StorageError, UsageError
from asynchicache.hashing import PlacedPage, page_digests
from asynchicache.planner.actions import StorageWrite
from asynchicache.storage.limits import BatchResult
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.tree.node import FULL, FULL_HOST, Node
from asynchicache.types import MissReason, Outcome, ShedReason, WritePolicy, token_array
from controller.simulation import Simulation

PAGE_BYTES = {"kv": 100, "mamba": 7}
HEAD = [1, 2, 3, 4]
LONG = [*HEAD, 5, 6, 7, 8]


def digests(tokens: list[int]) -> list[bytes]:
    return page_digests(token_array(tokens), 2, b"")


class Storage:
    """Stands for the pools of a cache in storage; what is not told otherwise works."""

    def __init__(self) -> None:
        self.there = True
        self.touchable = True
        self.touched: list[dict[int, list[bytes]]] = []
        self.put_pages: list[dict[str, int]] = []
        self.outcomes: list[list[Outcome]] = []
        self.lingering: asyncio.Future[None] | None = None
        self.gate: asyncio.Event | None = None
        self.lost: set[bytes] = set()
        self.reason = MissReason.NONE
        self.asked: list[tuple[int, list[bytes], bool]] = []
        self.failing = False

    def __bool__(self) -> bool:
        return self.there

    def page_sizes(self, work: StorageWrite) -> list[int]:
        return [PAGE_BYTES[pool] for pool in work.pages]

    async def touch(self, uses: Mapping[int, Sequence[PlacedPage]]) -> None:
        self.touched.append({number: [page.digest for page in some] for number, some in uses.items()})

    async def put(self, work: StorageWrite) -> list[BatchResult]:
        self.put_pages.append({pool: len(slots) for pool, (_, slots) in work.pages.items()})
        if self.gate is not None:
            await self.gate.wait()
        outcomes = self.outcomes or [[Outcome.STORED] * len(slots) for _, slots in work.pages.values()]
        return [BatchResult(some, self.lingering if Outcome.TIMEOUT in some else None) for some in outcomes]

    async def exists(
        self, number: int, pages: Sequence[PlacedPage], *, fresh: bool = False, everywhere: bool = False
    ) -> Presence:
        some = [page.digest for page in pages]
        self.asked.append((number, some, fresh or everywhere))
        if self.gate is not None:
            await self.gate.wait()
        return Presence(bytes(digest not in self.lost for digest in some), self.reason)

    async def clear(self) -> int:
        if self.failing:
            raise StorageError("planted")
        return 5

    def detach(self) -> Storage | None:
        was, self.there = self.there, False
        return self if was else None

    async def aclose(self) -> None:
        assert self.gate is not None
        await self.gate.wait()


class Rig:
    """A storer with a planner that is driven by hand."""

    def __init__(self, limit: int = 10_000, *, states: bool = True) -> None:
        slots = {"kv": (64, 64)} | ({"mamba": (8, 8)} if states else {})
        self.sim = Simulation(random.Random(0), states=states, slots=slots, policy=WritePolicy.WRITE_BACK)
        self.writer = self.sim.planner.backups
        self.storage = Storage()
        self.tasks: list[tuple[asyncio.Task[None], int | None]] = []
        self.late: list[asyncio.Task[None]] = []
        self.moves = 0
        self.stopped = False
        stored: Any = self.storage
        executor: Any = self
        self.storage_writer = StorageWriter(
            self.sim.planner, executor, stored, PresenceQueries(stored, executor), limit_bytes=limit
        )

    @property
    def calls(self) -> set[asyncio.Task[None]]:
        return {task for task, _ in self.tasks}

    def call(self, work: Coroutine[object, object, None], period: int | None = None) -> asyncio.Task[None]:
        """As the executor's."""
        task = asyncio.create_task(work)
        self.tasks.append((task, period))
        return task

    def call_late(self, work: Coroutine[object, object, None]) -> None:
        self.late.append(asyncio.ensure_future(work))

    def notify(self) -> None:
        self.moves += 1

    def hosted(self, tokens: list[int]) -> Node:
        """Compute a prompt, publish it and copy it to the host."""
        sequence = self.sim.open(tokens)
        self.sim.load(sequence)
        assert self.sim.compute(sequence, len(tokens))
        node = sequence.lease.node
        self.sim.close(sequence)
        for copy in self.writer.backup(node):
            self.sim.planner.copy_finished(copy, None)
        return node

    async def ended(self) -> None:
        await asyncio.gather(*(task for task, _ in self.tasks))

    def evictable(self, node: Node) -> bool:
        return not node.locks[FULL_HOST]


def run(main: Callable[[SeededWorld], Coroutine[Any, Any, None]]) -> None:
    run_seeded(0, main)


# Writes


def test_a_write_counts_its_bytes_until_it_has_ended() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        node = rig.hosted(LONG)
        rig.storage.gate = asyncio.Event()
        rig.storage_writer.store(node, period=3)
        assert rig.storage_writer.storing_bytes == 4 * 100 + 7
        assert [period for _, period in rig.tasks] == [3]
        await world.sleep(0.1)
        assert rig.storage.put_pages == [{"kv": 4, "mamba": 1}]
        assert not rig.evictable(node)
        rig.storage.gate.set()
        await rig.ended()
        assert rig.storage_writer.storing_bytes == 0
        assert rig.storage_writer.traffic == WriteCounters(stored=5)
        assert rig.evictable(node)
        assert rig.late == []
        assert node.stored == 0b11
        rig.storage_writer.store(node)
        assert len(rig.tasks) == 1, "nothing is left to write"
        rig.storage_writer.stop()

    run(main)


def test_without_storage_nothing_is_written() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        node = rig.hosted(HEAD)
        rig.storage.there = False
        rig.storage_writer.store(node)
        assert (rig.tasks, node.stored) == ([], 0)

    run(main)


def test_beyond_the_limit_a_write_is_shed_or_waits_for_its_turn() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig(limit=420)
        first, second, third = rig.hosted(LONG), rig.hosted([9, 9]), rig.hosted([8, 8])
        rig.storage.gate = asyncio.Event()
        rig.storage_writer.store(first)
        rig.storage_writer.store(second)
        assert rig.storage_writer.traffic.shed == {ShedReason.BUDGET: 2}
        assert second.stored == 0
        assert len(rig.tasks) == 1

        rig.storage_writer.store(third, wait=True)
        await world.sleep(0.1)
        assert rig.storage.put_pages == [{"kv": 4, "mamba": 1}]
        assert rig.storage_writer.storing_bytes == 407
        rig.storage.gate.set()
        await rig.ended()
        assert rig.storage.put_pages == [{"kv": 4, "mamba": 1}, {"kv": 1, "mamba": 1}]
        assert rig.storage_writer.traffic == WriteCounters(stored=7, shed=rig.storage_writer.traffic.shed)
        assert rig.storage_writer.traffic.shed == {ShedReason.BUDGET: 2}
        assert rig.storage_writer.storing_bytes == 0
        rig.storage_writer.stop()

    run(main)


@pytest.mark.parametrize(
    ("outcomes", "traffic", "bits"),
    [
        ([[Outcome.EXISTS] * 2, [Outcome.STORED]], WriteCounters(stored=3), 0b11),
        (
            [[Outcome.STORED, Outcome.REJECTED], [Outcome.FAILED]],
            WriteCounters(stored=1, shed={ShedReason.REJECTED: 1, ShedReason.FAILED: 1}),  # type: ignore[arg-type]
            0,
        ),
        (
            [[Outcome.STORED, Outcome.FAILED], [Outcome.STORED]],
            WriteCounters(stored=2, shed={ShedReason.FAILED: 1}),
            0,
        ),  # type: ignore[arg-type]
    ],
)
def test_what_became_of_a_write_is_counted(
    outcomes: list[list[Outcome]], traffic: WriteCounters, bits: int
) -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        node = rig.hosted(HEAD)
        rig.storage.outcomes = outcomes
        rig.storage_writer.store(node)
        await rig.ended()
        assert rig.storage_writer.traffic == traffic
        assert node.stored == bits
        assert not rig.late
        copy = rig.storage_writer.traffic.copy()
        rig.storage_writer.traffic.shed[ShedReason.FAILED] += 1
        assert copy == traffic
        rig.storage_writer.stop()

    run(main)


@pytest.mark.parametrize("safe", [True, False])
def test_slots_of_a_late_write_are_kept_until_the_engine_lets_go(safe: bool) -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        node = rig.hosted(HEAD)
        rig.storage.outcomes = [[Outcome.STORED, Outcome.TIMEOUT], [Outcome.STORED]]
        rig.storage.lingering = asyncio.get_running_loop().create_future()
        rig.storage_writer.store(node)
        await rig.ended()
        assert rig.storage_writer.traffic.shed == {ShedReason.TIMEOUT: 1}
        assert rig.storage_writer.storing_bytes == 100, "of the page that is late"
        assert node.stored == 0
        assert not rig.evictable(node)
        assert len(rig.late) == 1

        if safe:
            rig.storage.lingering.set_result(None)
        else:
            rig.storage.lingering.cancel()
        await asyncio.gather(*rig.late)
        assert rig.storage_writer.storing_bytes == 0
        assert rig.evictable(node) == safe, "what nobody knows the end of is never lent again"
        rig.storage_writer.stop()

    run(main)


@pytest.mark.parametrize("evicted", [False, True])
def test_a_long_path_is_written_once_its_digests_are_known_if_it_is_there_still(
    evicted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_writer, "SLICE_PAGES", 3)

    async def main(world: SeededWorld) -> None:
        rig = Rig()
        short, long = rig.hosted([9, 9, 9, 9, 9, 9]), rig.hosted(LONG)
        rig.storage_writer.store(short, period=1)
        assert rig.storage_writer.storing_bytes == 307, "three pages are begun at once"
        rig.storage_writer.store(long, period=2)
        assert rig.storage_writer.storing_bytes == 307
        assert [period for _, period in rig.tasks] == [1, 2]
        if evicted:
            rig.sim.planner.flush()
        while any(not task.done() for task, _ in rig.tasks):
            await rig.ended()
        assert sorted(pages["kv"] for pages in rig.storage.put_pages) == ([3] if evicted else [3, 4])
        assert rig.evictable(long), "it was kept for as long as that took"
        rig.storage_writer.stop()

    run(main)


# Uses


def test_uses_are_told_together_after_a_while_and_once() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig(states=False)
        one, other = rig.hosted([1, 2]), rig.hosted([3, 4])
        one.stored = other.stored = 1
        rig.storage_writer.use(one)
        await asyncio.sleep(0.6)
        rig.storage_writer.use(other)
        rig.storage_writer.use(one)
        await asyncio.sleep(0.39)
        assert rig.storage.touched == []
        await asyncio.sleep(0.02)
        await rig.ended()
        assert rig.storage.touched == [{FULL: [*digests([3, 4]), *digests([1, 2])]}]
        await asyncio.sleep(5)
        assert (len(rig.storage.touched), len(rig.tasks)) == (1, 2), (
            "told once, and asked once for the beginnings"
        )

        rig.storage_writer.use(one)
        await asyncio.sleep(1.01)
        await rig.ended()
        assert rig.storage.touched[1:] == [{FULL: digests([1, 2])}]

    run(main)


def test_the_more_there_is_to_tell_the_rarer_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_writer, "_USES_A_SECOND", 2)

    async def main(world: SeededWorld) -> None:
        rig = Rig(states=False)
        node = rig.hosted([*LONG, 9, 10])
        node.stored = 1
        for pause in (1.0, 2.5, 2.5):  # five pages
            told = len(rig.storage.touched)
            rig.storage_writer.use(node)
            await asyncio.sleep(pause - 0.01)
            assert len(rig.storage.touched) == told
            await asyncio.sleep(0.02)
            await rig.ended()
            assert len(rig.storage.touched) == told + 1

    run(main)


def test_nothing_is_told_that_nobody_wants_to_know() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig(states=False)
        node = rig.hosted(HEAD)
        node.stored = 1
        rig.storage.touchable = False
        rig.storage_writer.use(node)
        rig.storage.touchable = True
        root = node.parent
        assert root is not None
        rig.storage_writer.use(root)
        await rig.storage_writer.flush_touches()
        await asyncio.sleep(5)
        assert (rig.tasks, rig.storage.touched) == ([], [])

        rig.storage_writer.use(node)
        rig.storage_writer.stop()
        await asyncio.sleep(5)
        await rig.storage_writer.flush_touches()
        assert (rig.tasks, rig.storage.touched) == ([], [])

    run(main)


def test_storage_is_told_before_it_must_make_room_and_of_what_a_write_stands_on_after_it() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig(states=False)
        one, other = rig.hosted([1, 2]), rig.hosted([3, 4])
        one.stored = 1
        rig.storage_writer.use(one)
        rig.storage_writer.store(other)
        await rig.ended()
        assert rig.storage.touched == [{FULL: digests([1, 2])}]
        await asyncio.sleep(1.01)
        await rig.ended()
        assert rig.storage.touched[1:] == [{FULL: digests([3, 4])}]

    run(main)


# What storage says it has


def test_storage_is_asked_afresh_for_all_that_is_marked() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        upper, lower = rig.hosted(HEAD), rig.hosted(LONG)
        for node in (upper, lower):
            node.stored = 0b11
        chain = digests(LONG)

        assert await rig.storage_writer.confirm(lower) is True
        assert rig.storage.asked == [(0, chain, True), (1, [chain[1], chain[3]], True)]
        rig.storage.lost = {chain[3]}
        assert await rig.storage_writer.confirm(upper) is True
        assert await rig.storage_writer.confirm(lower) is False
        assert (upper.stored, lower.stored) == (0b11, 0)

    run(main)


def test_who_does_not_answer_has_neither_confirmed_nor_lost() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        node = rig.hosted(HEAD)
        node.stored = 0b11
        rig.storage.reason, rig.storage.lost = MissReason.DEADLINE, set(digests(HEAD))
        assert await rig.storage_writer.confirm(node) is None
        assert node.stored == 0b11

    run(main)


@pytest.mark.parametrize("forgotten", [False, True])
def test_marks_that_were_taken_back_meanwhile_confirm_nothing(forgotten: bool) -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        node = rig.hosted(HEAD)
        node.stored = 0b11
        rig.storage.gate = asyncio.Event()
        asking = asyncio.create_task(rig.storage_writer.confirm(node))
        await world.sleep(0.1)
        if forgotten:
            rig.writer.forget_stored()
        rig.storage.gate.set()
        assert await asking is not forgotten

    run(main)


# Storage that comes and goes


def test_storage_is_attached_where_there_is_none() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        with pytest.raises(UsageError, match="the cache has storage already"):
            rig.storage_writer.check_none()
        rig.storage.there = False
        rig.storage_writer.check_none()
        assert not await rig.storage_writer.detach()
        assert rig.moves == 0

    run(main)


@pytest.mark.parametrize("failing", [False, True])
def test_after_a_clear_nothing_is_known_to_be_stored(failing: bool) -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        node = rig.hosted(HEAD)
        node.stored = 0b11
        rig.storage.failing = failing
        if failing:
            with pytest.raises(StorageError, match="planted"):
                await rig.storage_writer.clear()
        else:
            assert await rig.storage_writer.clear() == 5
        assert (node.stored, rig.storage_writer.clearing, rig.moves) == (0, 0, 1)

    run(main)


def test_a_write_that_is_given_up_before_its_turn_takes_no_room() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig(limit=420)
        first, second = rig.hosted(LONG), rig.hosted([9, 9])
        rig.storage.gate = asyncio.Event()
        rig.storage_writer.store(first)
        rig.storage_writer.store(second, wait=True)
        await world.sleep(0.1)
        rig.tasks[1][0].cancel()
        await asyncio.wait([rig.tasks[1][0]])
        assert (rig.storage_writer.storing_bytes, second.stored) == (407, 0)
        assert rig.evictable(second)
        rig.storage.gate.set()
        await asyncio.wait([rig.tasks[0][0]])
        assert rig.storage_writer.storing_bytes == 0
        rig.storage_writer.stop()

    run(main)


def test_while_storage_is_detached_there_is_none_and_none_can_be_attached() -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig()
        node, other = rig.hosted(LONG), rig.hosted([9, 9])
        other.stored = 0b11
        rig.storage.gate = asyncio.Event()
        rig.storage_writer.store(node)
        await world.sleep(0.1)
        detaching = asyncio.create_task(rig.storage_writer.detach())
        await world.sleep(0.1)
        with pytest.raises(UsageError, match="storage is being detached; wait for that"):
            rig.storage_writer.check_none()
        assert not detaching.done()
        assert rig.moves == 0
        rig.storage.gate.set()
        assert await detaching
        assert rig.tasks[0][0].done(), "a write that was under way has ended"
        assert (node.stored, other.stored, rig.moves) == (0, 0, 1)
        rig.storage_writer.check_none()
        rig.storage_writer.stop()

    run(main)


def test_a_use_after_the_end_starts_no_timer() -> None:
    """A write may end after the cache has closed, and its tasks are gone when a touch would be due."""

    async def main(world: SeededWorld) -> None:
        rig = Rig()
        node = rig.hosted(HEAD)
        rig.storage_writer.stop()
        rig.storage_writer.use(node)
        await world.sleep(10.0)
        assert (rig.tasks, rig.storage.touched) == ([], [])

    run(main)
