"""What the core makes of engines that are slow, wrong, broken, or hang.

More than 900 lines: the broken engines stand beside the tests that they break.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest

from asynchicache.errors import ClosedError, ConfigError, StorageError, UsageError
from asynchicache.hashing import ObjectKey, placed_pages
from asynchicache.ports import AsyncioPort, Port
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.guard import GuardedPool
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.storage.protocol import Capabilities
from asynchicache.testing.backends import fingerprint_of, slab_of
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.types import Outcome

SOON = 0.02
"""A deadline for calls that never end."""

NEVER = 60.0


class ManualPort(AsyncioPort):
    """The real port, but for a clock that stands still until it is moved."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


Answer = Callable[[int], Awaitable[Sequence[object]]]


class ScriptedEngine:
    """Answers every call with what the test says, and remembers what it was asked."""

    def __init__(self, **capabilities: object) -> None:
        self.capabilities = Capabilities(
            **{"durable": False, "checks": True, "batch_pages": 4, "concurrency": 2, **capabilities}
        )
        self.batches: list[int] = []
        self.running = 0
        self.most = 0
        self.closed = False
        self._entries = asyncio.Semaphore(0)
        self.gate = asyncio.Event()
        self.gate.set()
        self.answer: Answer = self.good
        self.outcome = Outcome.HIT
        self.degraded = False

    async def entered(self, calls: int) -> None:
        """Wait until so many calls, that nobody waited for yet, have reached the engine."""
        for _ in range(calls):
            await self._entries.acquire()

    async def good(self, pages: int) -> list[Outcome]:
        return [self.outcome] * pages

    async def _call(self, pages: int) -> list[Outcome]:
        self.batches.append(pages)
        self.running += 1
        self._entries.release()
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            return await self.answer(pages)  # type: ignore[return-value]
        finally:
            self.running -= 1

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        return bytearray([outcome is Outcome.HIT for outcome in await self._call(len(keys))])

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._call(len(keys))

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._call(len(keys))

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return await self._call(len(keys))

    async def clear(self) -> int:
        await self._call(0)
        if self.closed:
            raise StorageError("cleared while it is closed")
        return 0

    async def aclose(self) -> None:
        self.closed = True


class Scene:
    """A guarded engine, its port, and keys."""

    def __init__(self, engine: ScriptedEngine, port: Port, limits: PoolLimits) -> None:
        self.engine = engine
        self.port = port
        self.binding = SlotBinding(slab_of("kv", 5000, 32), fingerprint_of("w"))
        self.pool = GuardedPool(engine, self.binding, port, limits)

    def keys(self, count: int) -> list[ObjectKey]:
        return [self.binding.key(bytes([number]) * 40) for number in range(count)]

    async def get(self, count: int, first: int = 0) -> BatchResult:
        return await self.pool.get(self.keys(count), range(first, first + count))


@asynccontextmanager
async def scene(engine: ScriptedEngine | None = None, **limits: float) -> AsyncIterator[Scene]:
    port = ManualPort(threads=1, seed=1)
    made = Scene(engine or ScriptedEngine(), port, PoolLimits(**{"deadline": NEVER, **limits}))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.engine.gate.set()
        await made.pool.aclose()
        await port.aclose()


async def raising(pages: int) -> list[Outcome]:
    raise RuntimeError("engine on fire")


@pytest.mark.asyncio
async def test_calls_are_cut_into_batches_and_taken_in_turns() -> None:
    async with scene() as s:
        s.engine.gate.clear()
        call = asyncio.create_task(s.get(11))
        await s.engine.entered(2)
        s.engine.gate.set()

        assert (await call).outcomes == [Outcome.HIT] * 11
        assert (s.engine.batches, s.engine.most) == ([4, 4, 3], 2)


@pytest.mark.asyncio
@pytest.mark.parametrize(("concurrency", "order"), [(2, [4, 1]), (1, [4, 1, 4, 4])])
async def test_puts_do_not_keep_others_waiting_behind_all_of_them(concurrency: int, order: list[int]) -> None:
    async with scene(ScriptedEngine(concurrency=concurrency), retries=0) as s:
        s.engine.outcome = Outcome.STORED
        s.engine.gate.clear()
        putting = asyncio.create_task(s.pool.put(s.keys(12), range(12)))
        await s.engine.entered(1)
        reading = asyncio.create_task(s.get(1, 20))
        if concurrency > 1:
            await s.engine.entered(1)  # before any put has ended
            assert s.engine.batches == order
        await asyncio.sleep(0)
        s.engine.gate.set()

        await reading
        assert (await putting).outcomes == [Outcome.STORED] * 12
        assert s.engine.batches[: len(order)] == order
        assert s.engine.most == concurrency


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("first", "count", "batches"),
    [
        (0, 3, [3]),
        (0, 20, [9, 8, 3]),  # objects of a path: pages 0 to 4, 5 to 8, 9 to 12, ...
        (2, 10, [7, 3]),
        (63, 10, [6, 4]),  # a group ends with page 64
        (30, 11, [7, 4]),
    ],
)
async def test_a_call_ends_where_an_object_ends(first: int, count: int, batches: list[int]) -> None:
    engine = ScriptedEngine(object_pages=4, batch_pages=9 if count > 11 else 8, concurrency=1)
    engine.outcome = Outcome.STORED
    async with scene(engine) as s:
        digests = [bytes([page]) * 40 for page in range(100)]
        keys = list(map(s.binding.placed_key, placed_pages(digests, range(first, first + count))))
        assert (await s.pool.put(keys, range(count))).outcomes == [Outcome.STORED] * count
    assert s.engine.batches == batches


@pytest.mark.asyncio
async def test_an_object_larger_than_a_call_is_put_by_several() -> None:
    engine = ScriptedEngine(object_pages=32, batch_pages=8, concurrency=1)
    engine.outcome = Outcome.STORED
    async with scene(engine) as s:
        pages = placed_pages([bytes([page]) * 40 for page in range(40)], range(40))
        await s.pool.put(list(map(s.binding.placed_key, pages)), range(40))
    assert s.engine.batches == [8] * 5


@pytest.mark.asyncio
async def test_answers_keep_their_places_over_batches() -> None:
    async with scene() as s:
        numbers = iter([Outcome.HIT, Outcome.MISS, Outcome.CORRUPT])

        async def by_batch(pages: int) -> list[Outcome]:
            return [next(numbers)] * pages

        s.engine.answer = by_batch
        batch = await s.get(10)

        assert batch.outcomes == [Outcome.HIT] * 4 + [Outcome.MISS] * 4 + [Outcome.CORRUPT] * 2
        assert batch.present == bytes([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])


@pytest.mark.asyncio
async def test_every_kind_of_call() -> None:
    async with scene() as s:
        keys = s.keys(2)
        assert (await s.pool.exists(keys)).present == b"\1\1"
        assert (await s.pool.delete(keys)).outcomes == [Outcome.HIT] * 2
        s.engine.outcome = Outcome.STORED
        assert (await s.pool.put(keys, [0, 1])).outcomes == [Outcome.STORED] * 2
        assert (await s.pool.get([], [])).outcomes == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(raising, id="raises"),
        pytest.param(lambda pages: asyncio.sleep(0, [Outcome.HIT] * (pages - 1)), id="too-few"),
        pytest.param(lambda pages: asyncio.sleep(0, [Outcome.HIT] * (pages + 1)), id="too-many"),
        pytest.param(lambda pages: asyncio.sleep(0, [Outcome.STORED] * pages), id="no-answer-to-a-get"),
        pytest.param(lambda pages: asyncio.sleep(0, [True] * pages), id="no-outcomes"),
        pytest.param(lambda pages: asyncio.sleep(0, None), id="nothing"),
    ],
)
async def test_nonsense_is_failed(answer: Answer) -> None:
    async with scene() as s:
        s.engine.answer = answer
        batch = await s.get(3)

        assert batch == BatchResult([Outcome.FAILED] * 3, None)
        assert s.pool.statistics().get.outcomes == {Outcome.FAILED: 3}


@pytest.mark.asyncio
async def test_pages_that_an_engine_could_not_store_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that answers FAILED, and does not raise, may say nothing itself."""
    async with scene() as s:
        s.engine.answer = lambda pages: asyncio.sleep(0, [Outcome.FAILED, *[Outcome.STORED] * (pages - 1)])
        for _ in range(3):
            await s.pool.put(s.keys(3), range(3))
    assert [record.getMessage() for record in caplog.records] == [
        "pool kv: put of 1 pages failed, of 3: the engine answers 'failed', its log may say why"
    ]


@pytest.mark.asyncio
async def test_an_engine_that_cancels_itself_has_failed() -> None:
    async with scene() as s:

        async def cancelling(pages: int) -> list[Outcome]:
            raise asyncio.CancelledError

        s.engine.answer = cancelling

        assert await s.get(1) == BatchResult([Outcome.FAILED], None)


class Panic(BaseException):
    """What PyO3 makes of a panic in Rust."""


def raising_this(error: BaseException) -> Answer:
    async def raise_it(pages: int) -> list[Outcome]:
        raise error

    return raise_it


STRANGE_ERRORS = pytest.mark.parametrize(
    "error",
    [Panic("!"), BaseExceptionGroup("many", [Panic("!")]), asyncio.CancelledError(), GeneratorExit()],
    ids=lambda error: type(error).__name__,
)


@pytest.mark.asyncio
@pytest.mark.parametrize("immediate", [False, True], ids=["task", "immediate"])
@STRANGE_ERRORS
async def test_what_is_no_exception_is_failed_too(error: BaseException, immediate: bool) -> None:
    """Nobody answered the caller of a call that ended so, and its deadline was called off."""
    async with scene(ScriptedEngine(immediate=immediate), retries=0) as s:
        s.engine.answer = raising_this(error)
        async with asyncio.timeout(NEVER):
            assert await s.get(2) == BatchResult([Outcome.FAILED] * 2, None)
            assert (await s.pool.exists(s.keys(2))).outcomes == [Outcome.FAILED] * 2

        counted = s.pool.statistics()
        assert (counted.get.errors, counted.exists.errors, counted.running) == (1, 1, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer", [[Outcome.MISS] * 2, bytearray(b"\1\3"), ["yes", "no"], bytearray(1)], ids=repr
)
async def test_what_is_no_bit_is_no_answer_to_exists(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outcome is true, whichever it is."""
    async with scene() as s:
        monkeypatch.setattr(s.engine, "exists", lambda keys: asyncio.sleep(0, answer))
        assert (await s.pool.exists(s.keys(2))).outcomes == [Outcome.FAILED] * 2
        monkeypatch.setattr(s.engine, "exists", lambda keys: asyncio.sleep(0, [True, False]))
        assert (await s.pool.exists(s.keys(2))).outcomes == [Outcome.HIT, Outcome.MISS]
        monkeypatch.setattr(s.engine, "exists", lambda keys: asyncio.sleep(0, bytearray(b"\1\2")))
        assert (await s.pool.exists(s.keys(2))).outcomes == [Outcome.HIT, Outcome.FAILED]


@pytest.mark.asyncio
@pytest.mark.parametrize("answer", [None, -1, "all"])
async def test_what_is_no_count_is_no_answer_to_clear(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene() as s:
        monkeypatch.setattr(s.engine, "clear", lambda: asyncio.sleep(0, answer))
        with pytest.raises(StorageError, match=f"{answer!r} is no answer to clear"):
            await s.pool.clear()


@pytest.mark.asyncio
async def test_deletes_that_are_refused_open_no_breaker() -> None:
    async with scene() as s:
        s.engine.outcome = Outcome.REJECTED
        for _ in range(10):
            assert (await s.pool.delete(s.keys(1))).outcomes == [Outcome.REJECTED]
        s.engine.outcome = Outcome.HIT
        assert (await s.get(1)).outcomes == [Outcome.HIT]


@pytest.mark.asyncio
@STRANGE_ERRORS
async def test_what_is_no_exception_is_no_clear_either(error: BaseException) -> None:
    async with scene() as s:
        s.engine.answer = raising_this(error)
        words = "cancelled itself" if isinstance(error, asyncio.CancelledError) else type(error).__name__
        with pytest.raises(StorageError, match=f"could not be cleared.*{words}"):
            await s.pool.clear()


@pytest.mark.asyncio
async def test_an_engine_that_panics_as_it_closes_does_not_keep_us_open() -> None:
    async with scene() as s:

        async def panics() -> None:
            raise Panic("!")

        s.engine.aclose = panics  # type: ignore[method-assign]
        assert await s.pool.aclose() == frozenset()


def test_a_signal_that_ends_the_program_in_an_engine_ends_it_and_leaves_nobody_waiting() -> None:
    """A handler that calls `sys.exit` runs wherever the main thread happens to be."""
    answers: list[BatchResult] = []

    async def life() -> None:
        async with scene() as s:
            s.engine.answer = raising_this(SystemExit(3))
            try:
                answers.append(await s.get(1))
            except asyncio.CancelledError:  # the runner ends every task
                answers.append(await s.pool.get([], []))
                raise

    with pytest.raises(SystemExit):
        asyncio.run(life())
    assert len(answers) == 1


@pytest.mark.asyncio
async def test_a_late_read_that_fails_is_not_tried_again() -> None:
    async with scene(deadline=5.0) as s:

        async def slowly(pages: int) -> list[Outcome]:
            s.port.seconds += 5
            return [Outcome.FAILED] * pages

        s.engine.answer = slowly
        assert (await s.get(1)).outcomes == [Outcome.FAILED]
        assert s.engine.batches == [1]


@pytest.mark.asyncio
async def test_a_call_that_hangs_times_out_and_keeps_its_slots() -> None:
    async with scene(deadline=SOON) as s:
        s.engine.gate.clear()
        batch = await s.get(2)

        assert batch.outcomes == [Outcome.TIMEOUT] * 2
        assert batch.lingering is not None
        assert not batch.lingering.done()
        assert s.pool.statistics().lingering == 1
        assert s.pool.lingering([5, 6]) is None

        s.engine.gate.set()
        await batch.lingering
        assert s.engine.running == 0
        assert s.pool.lingering([0, 1]) is None
        assert s.pool.statistics().get.outcomes == {Outcome.TIMEOUT: 2}


@pytest.mark.asyncio
async def test_a_call_that_ends_in_the_turn_in_which_the_pool_is_closed_keeps_no_slot() -> None:
    async with scene(deadline=SOON) as s:
        s.engine.gate.clear()
        batch = await s.get(2)
        assert batch.lingering is not None
        turn = asyncio.Event()
        closing = asyncio.create_task(_close_after(turn, s.pool))
        await asyncio.sleep(0)

        s.engine.gate.set()
        turn.set()  # right behind the engine's end, and before anybody is told of that
        assert await closing == frozenset()
        assert not batch.lingering.cancelled()
        assert s.pool.statistics().get.outcomes == {Outcome.TIMEOUT: 2}


async def _close_after(turn: asyncio.Event, pool: GuardedPool) -> frozenset[int]:
    await turn.wait()
    return await pool.aclose()


@pytest.mark.asyncio
async def test_only_the_late_batch_of_a_call_lingers() -> None:
    async with scene(ScriptedEngine(concurrency=1), deadline=SOON) as s:
        stuck = asyncio.Event()

        async def second_hangs(pages: int) -> list[Outcome]:
            if len(s.engine.batches) == 2:
                await stuck.wait()
            return [Outcome.HIT] * pages

        s.engine.answer = second_hangs
        batch = await s.get(6)

        assert batch.outcomes == [Outcome.HIT] * 4 + [Outcome.TIMEOUT] * 2
        assert s.pool.lingering([0, 1, 2, 3]) is None
        assert s.pool.lingering([5]) is not None
        stuck.set()
        assert batch.lingering is not None
        await batch.lingering


@pytest.mark.asyncio
async def test_a_cancelled_caller_learns_when_its_slots_are_free() -> None:
    async with scene() as s:
        s.engine.gate.clear()
        call = asyncio.create_task(s.get(2))
        await s.engine.entered(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

        free = s.pool.lingering([1])
        assert free is not None
        assert s.engine.running == 1
        s.engine.gate.set()
        await free
        assert s.engine.running == 0


async def cancelled(engine: ScriptedEngine, *calls: Awaitable[BatchResult]) -> None:
    """Begin calls, and cancel their callers once the engine has them all."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await engine.entered(len(tasks))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)


@pytest.mark.asyncio
async def test_a_healthy_engine_whose_callers_were_cancelled_answers_the_next_ones_in_their_turn() -> None:
    async with scene() as s:
        s.engine.gate.clear()
        await cancelled(s.engine, s.get(1, 0), s.get(1, 1))
        waiting = [asyncio.create_task(s.get(1, slot)) for slot in (2, 3)]
        for _ in range(5):
            await asyncio.sleep(0)

        assert not any(call.done() for call in waiting)
        statistics = s.pool.statistics()
        assert (s.engine.running, statistics.running, statistics.lingering) == (2, 2, 2)
        s.engine.gate.set()
        assert await asyncio.gather(*waiting) == [BatchResult([Outcome.HIT])] * 2
        assert s.engine.most == 2


@pytest.mark.asyncio
async def test_a_put_whose_caller_was_cancelled_keeps_the_turn_of_puts_and_no_other() -> None:
    async with scene() as s:
        s.engine.outcome = Outcome.STORED
        s.engine.gate.clear()
        await cancelled(s.engine, s.pool.put(s.keys(3), range(3)))
        putting = asyncio.create_task(s.pool.put(s.keys(2), [5, 6]))
        asking = asyncio.create_task(s.pool.exists(s.keys(1)))
        await s.engine.entered(1)
        assert s.engine.batches == [3, 1]
        s.engine.gate.set()

        assert (await putting).outcomes == [Outcome.STORED] * 2
        await asking
        assert s.engine.batches == [3, 1, 2]


@pytest.mark.asyncio
async def test_calls_that_hang_count_once_they_are_late_though_their_callers_were_cancelled() -> None:
    async with scene(deadline=SOON, failures=100) as s:
        s.engine.gate.clear()
        await cancelled(s.engine, s.get(1, 0), s.get(1, 1))
        await s.get(1, 2)  # refused, unless it has waited as long as they, by a hair

        assert (await s.get(1, 2)).outcomes == [Outcome.FAILED]
        assert (s.engine.running, s.pool.statistics().get.late) == (2, 2)
        s.engine.gate.set()
        free = s.pool.lingering([0, 1])
        assert free is not None
        await free
        assert (await s.get(1, 2)).outcomes == [Outcome.HIT]


@pytest.mark.asyncio
async def test_closing_refuses_those_who_wait_behind_a_cancelled_caller() -> None:
    async with scene(closing=SOON) as s:
        s.engine.gate.clear()
        await cancelled(s.engine, s.get(1, 0), s.get(1, 1))
        waiting = asyncio.create_task(s.get(1, 2))
        await asyncio.sleep(0)

        assert await s.pool.aclose() == {0, 1}
        assert (await waiting).outcomes == [Outcome.FAILED]


@pytest.mark.asyncio
async def test_an_engine_that_hangs_in_all_its_calls_is_not_given_more() -> None:
    async with scene(deadline=SOON, failures=100) as s:
        s.engine.gate.clear()
        await asyncio.gather(s.get(1, 0), s.get(1, 1))
        refused = await asyncio.gather(*(s.get(1, slot) for slot in range(2, 10)))

        assert [batch.outcomes for batch in refused] == [[Outcome.FAILED]] * 8
        assert s.engine.running == 2


@pytest.mark.asyncio
async def test_waiters_are_answered_when_the_calls_before_them_hang() -> None:
    async with scene(deadline=SOON, failures=100) as s:
        s.engine.gate.clear()
        batches = await asyncio.gather(*(s.get(1, slot) for slot in range(20)))

        outcomes = [batch.outcomes[0] for batch in batches]
        assert set(outcomes) <= {Outcome.TIMEOUT, Outcome.FAILED}
        assert s.engine.most <= 2 * s.engine.capabilities.concurrency


@asynccontextmanager
async def busy(world: SeededWorld, call_seconds: float, **limits: float) -> AsyncIterator[Scene]:
    """An engine that is well, and does one call at a time, slowly."""
    engine = ScriptedEngine(concurrency=1)

    async def slowly(pages: int) -> list[Outcome]:
        await asyncio.sleep(call_seconds)
        return [engine.outcome] * pages

    engine.answer = slowly
    made = Scene(engine, world.port, PoolLimits(**{"deadline": 2.0, "failures": 1, **limits}))  # type: ignore[arg-type]
    yield made
    await made.pool.aclose()


def test_who_waits_for_a_turn_longer_than_the_deadline_is_told_so_and_the_engine_is_not_blamed() -> None:
    async def life(world: SeededWorld) -> None:
        async with busy(world, 1.9) as s:
            first = asyncio.create_task(s.get(12))
            await s.engine.entered(1)
            started = world.loop.time()

            assert await s.get(12, 20) == BatchResult([Outcome.TIMEOUT] * 12)
            assert world.loop.time() - started == pytest.approx(2.0, abs=0.01)
            assert (await first).outcomes == [Outcome.HIT] * 12  # its last part waited 3.8 s
            assert s.engine.batches == [4, 4, 4]
            statistics = s.pool.statistics()
            assert (statistics.breaker, statistics.get.late) == (BreakerState.CLOSED, 0)
            assert statistics.get.calls == 3
            assert statistics.get.outcomes == {Outcome.HIT: 12, Outcome.TIMEOUT: 12}
            assert (await s.get(4)).outcomes == [Outcome.HIT] * 4  # no turn was lost

    run_seeded(0, life)


@pytest.mark.parametrize("seconds", [1.9, 2.1, 1000.0])
def test_a_question_waits_for_no_page(seconds: float) -> None:
    """Whatever is on the wire: pages that come slowly, too late, or never."""

    async def life(world: SeededWorld) -> None:
        async with busy(world, seconds) as s:
            slow = s.engine.answer
            moving: list[asyncio.Task[BatchResult]] = []
            for _ in range(world.random.randint(1, 4)):
                moving.append(asyncio.create_task(s.get(12)))
                moving.append(asyncio.create_task(s.pool.put(s.keys(12), range(12, 24))))
            await asyncio.sleep(world.random.uniform(0, 3))
            s.engine.answer = s.engine.good  # of calls from here on: those of questions, for a moment
            started = world.loop.time()
            for _ in range(3):
                asked = await s.pool.exists(s.keys(9))
                closed = s.pool.statistics().breaker is BreakerState.CLOSED
                assert asked.outcomes == [Outcome.HIT if closed else Outcome.FAILED] * 9
            assert world.loop.time() - started < 0.01
            s.engine.answer = slow
            for task in moving:
                task.cancel()
            await asyncio.wait(moving)

    for seed in range(20):
        run_seeded(seed, life)


def test_puts_wait_for_their_turns_as_long_as_it_takes() -> None:
    async def life(world: SeededWorld) -> None:
        async with busy(world, 1.9) as s:
            s.engine.outcome = Outcome.STORED
            slots = [range(first, first + 4) for first in range(0, 20, 4)]
            batches = await asyncio.gather(*(s.pool.put(s.keys(4), four) for four in slots))
            assert batches == [BatchResult([Outcome.STORED] * 4)] * 5

    run_seeded(0, life)


@pytest.mark.asyncio
async def test_the_breaker_opens_and_lets_one_call_try() -> None:
    async with scene(failures=2, cooldown=10) as s:
        s.engine.answer = raising
        await s.get(1)
        await s.get(1)
        asked = len(s.engine.batches)
        keys = s.keys(2)

        assert s.pool.statistics().breaker is BreakerState.OPEN
        assert (await s.get(2)).outcomes == [Outcome.FAILED] * 2
        assert (await s.pool.put(keys, [0, 1])).outcomes == [Outcome.REJECTED] * 2
        assert (await s.pool.exists(keys)).present == bytes(2)
        assert (await s.pool.delete(keys)).outcomes == [Outcome.FAILED] * 2
        assert len(s.engine.batches) == asked

        s.port.seconds += 10
        s.engine.answer = s.engine.good
        await s.engine.entered(asked)
        s.engine.gate.clear()
        trying = asyncio.create_task(s.get(1))
        await s.engine.entered(1)
        assert s.pool.statistics().breaker is BreakerState.HALF_OPEN
        assert (await s.get(1, 1)).outcomes == [Outcome.FAILED]
        s.engine.gate.set()
        assert (await trying).outcomes == [Outcome.HIT]
        assert s.pool.statistics().breaker is BreakerState.CLOSED
        assert (await s.get(2)).outcomes == [Outcome.HIT] * 2


@pytest.mark.asyncio
async def test_late_calls_open_the_breaker_too_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with scene(deadline=SOON, failures=1) as s:
        s.engine.gate.clear()
        await s.get(1)

        assert s.pool.statistics().breaker is BreakerState.OPEN
        assert [record.getMessage() for record in caplog.records] == [
            "pool kv: storage is not asked now, its breaker is open: "
            f"get of 1 pages took longer than {SOON:g} s; tried in 5 s"
        ]
        s.engine.gate.set()


@pytest.mark.asyncio
async def test_the_log_has_an_opening_and_its_end_and_not_more_than_one_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scene(failures=1, cooldown=10) as s:
        for _ in range(3):
            s.engine.answer = lambda pages: asyncio.sleep(0, [Outcome.FAILED] * pages)
            for _ in range(3):  # the second and the third are failed trials
                await s.get(1)
                s.port.seconds += 10
            s.engine.answer = s.engine.good
            await s.get(1)
            await s.get(1)
            assert s.pool.statistics().breaker is BreakerState.CLOSED

    assert [record.getMessage() for record in caplog.records if "asked" in record.getMessage()] == [
        "pool kv: storage is not asked now, its breaker is open: get of 1 pages failed; tried in 10 s",
        "pool kv: storage answers, and is asked again",
    ]


@pytest.mark.asyncio
async def test_pages_with_other_bytes_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with scene() as s:
        s.engine.answer = lambda pages: asyncio.sleep(0, [Outcome.CORRUPT] * 2 + [Outcome.HIT] * (pages - 2))
        for _ in range(3):
            await s.get(3)
    assert [record.getMessage() for record in caplog.records] == [
        "pool kv: 2 of 3 pages came back with other bytes than were written; they are not used"
    ]


@pytest.mark.asyncio
async def test_pages_that_fail_among_others_are_no_failure_of_the_engine() -> None:
    async with scene(failures=1) as s:
        s.engine.answer = lambda pages: asyncio.sleep(0, [Outcome.FAILED] + [Outcome.HIT] * (pages - 1))
        await s.get(2)

        assert s.pool.statistics().breaker is BreakerState.CLOSED


@pytest.mark.asyncio
async def test_calls_for_a_part_that_is_away_say_nothing_of_the_rest() -> None:
    async with scene(failures=1) as s:
        s.engine.answer, s.engine.degraded = raising, True
        assert (await s.get(1)).outcomes == [Outcome.FAILED]
        assert s.pool.statistics().breaker is BreakerState.CLOSED

        s.engine.degraded = False
        await s.get(1)
        assert s.pool.statistics().breaker is BreakerState.OPEN


@pytest.mark.asyncio
async def test_the_core_checks_what_the_engine_does_not() -> None:
    async with scene(ScriptedEngine(checks=False)) as s:
        keys = s.keys(3)
        for slot, key in enumerate(keys):
            s.binding.seal(slot, key)
        s.binding.page(1)[0] ^= 1

        assert (await s.get(3)).outcomes == [Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]


@pytest.mark.asyncio
@pytest.mark.parametrize("shared", [False, True])
async def test_an_engine_that_checks_is_believed_bytes_and_if_it_is_shared_no_names(shared: bool) -> None:
    """To hash every page again would cost as much as the engine's own check."""
    async with scene(ScriptedEngine(checks=True, shared=shared)) as s:
        one, other, damaged = s.keys(3)
        for slot, key in enumerate((one, one, damaged)):  # the second is another one's page
            s.binding.seal(slot, key)
        s.binding.page(2)[0] ^= 1

        seen = Outcome.CORRUPT if shared else Outcome.HIT
        batch = await s.pool.get([one, other, damaged], range(3))
        assert batch.outcomes == [Outcome.HIT, seen, Outcome.HIT]
        s.binding.header(0)[0] ^= 1
        assert (await s.get(1)).outcomes == [seen]


@pytest.mark.asyncio
async def test_an_immediate_engine_is_called_without_a_task_and_the_loop_gets_its_turn() -> None:
    async with scene(ScriptedEngine(immediate=True)) as s:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(others())
        tasks = len(asyncio.all_tasks())
        assert (await s.get(12)).outcomes == [Outcome.HIT] * 12
        assert (turns >= 2, len(asyncio.all_tasks())) == (True, tasks)
        running.cancel()

        asked = len(s.engine.batches)
        s.engine.answer = raising
        for _ in range(10):
            assert (await s.get(2)).outcomes == [Outcome.FAILED] * 2
        limits = PoolLimits()
        assert len(s.engine.batches) - asked == limits.failures * (1 + limits.retries)


@pytest.mark.asyncio
async def test_statistics_add_up() -> None:
    async with scene() as s:

        async def slowly(pages: int) -> list[Outcome]:
            s.port.seconds += 0.5
            return [Outcome.HIT] * (pages - 1) + [Outcome.MISS]

        s.engine.answer = slowly
        await s.get(6)
        await s.pool.exists(s.keys(3))
        statistics = s.pool.statistics()

        assert (statistics.get.calls, statistics.get.pages, statistics.get.bytes) == (2, 6, 4 * 5000)
        assert statistics.get.outcomes == {Outcome.HIT: 4, Outcome.MISS: 2}
        assert statistics.get.seconds >= 1.0
        assert (statistics.exists.pages, statistics.exists.bytes) == (3, 0)
        assert (statistics.running, statistics.lingering, statistics.opened) == (0, 0, 0)
        assert repr(s.pool) == "<GuardedPool kv: 0 running, 0 lingering, breaker closed>"


@pytest.mark.asyncio
async def test_closing_waits_for_running_calls() -> None:
    async with scene() as s:
        s.engine.gate.clear()
        call = asyncio.create_task(s.get(2))
        await s.engine.entered(1)
        closing = asyncio.create_task(s.pool.aclose())
        await asyncio.sleep(0)
        assert not s.engine.closed
        s.engine.gate.set()

        assert await closing == frozenset()
        assert (await call).outcomes == [Outcome.HIT] * 2
        assert s.engine.closed
        assert await s.pool.aclose() == frozenset()


@pytest.mark.asyncio
async def test_who_clears_a_pool_that_is_closed_meanwhile_is_told_so() -> None:
    async with scene() as s:
        s.engine.gate.clear()
        clearing = asyncio.create_task(s.pool.clear())
        await s.engine.entered(1)
        await s.pool.aclose()
        s.engine.gate.set()

        with pytest.raises(ClosedError, match="storage of pool 'kv' was closed"):
            await clearing


@pytest.mark.asyncio
async def test_closing_gives_up_on_a_call_and_names_its_slots() -> None:
    async with scene(deadline=SOON, closing=SOON) as s:
        s.engine.gate.clear()
        late = await s.get(2)

        assert await s.pool.aclose() == {0, 1}
        assert late.lingering is not None
        assert late.lingering.cancelled()
        again = s.pool.lingering([1])
        assert again is not None
        assert again.cancelled()
        assert s.engine.closed


@pytest.mark.asyncio
async def test_a_call_that_ignores_its_cancellation_keeps_its_slots_and_keeps_nobody() -> None:
    async with scene(deadline=SOON, closing=SOON) as s:
        stubborn = asyncio.Event()

        async def stay(pages: int) -> list[Outcome]:
            while not stubborn.is_set():
                with suppress(asyncio.CancelledError):
                    await stubborn.wait()
            return [Outcome.HIT] * pages

        s.engine.answer = stay
        await s.get(2)

        assert await s.pool.aclose() == {0, 1}
        assert s.engine.closed
        assert s.pool.statistics().running == 1
        stubborn.set()


@pytest.mark.asyncio
async def test_a_call_that_is_late_while_the_pool_closes_gives_its_slots_back_when_it_ends() -> None:
    async with scene(deadline=SOON, closing=NEVER) as s:
        s.engine.gate.clear()
        call = asyncio.create_task(s.get(2))
        await s.engine.entered(1)
        closing = asyncio.create_task(s.pool.aclose())
        batch = await call  # its deadline came first
        assert batch.outcomes == [Outcome.TIMEOUT] * 2
        assert batch.lingering is not None
        assert not batch.lingering.done()
        s.engine.gate.set()

        await batch.lingering
        assert await closing == frozenset()


@pytest.mark.asyncio
async def test_a_caller_that_still_waits_is_told_when_closing_gives_up() -> None:
    async with scene(closing=SOON) as s:
        s.engine.gate.clear()
        call = asyncio.create_task(s.get(2))
        await s.engine.entered(1)

        assert await s.pool.aclose() == {0, 1}
        batch = await call
        assert batch.outcomes == [Outcome.TIMEOUT] * 2
        assert batch.lingering is not None
        assert batch.lingering.cancelled()


@pytest.mark.asyncio
async def test_an_engine_that_cannot_close_does_not_keep_us_open() -> None:
    async with scene(closing=SOON) as s:

        async def hang() -> None:
            await asyncio.Event().wait()

        s.engine.aclose = hang  # type: ignore[method-assign]

        assert await s.pool.aclose() == frozenset()


@pytest.mark.asyncio
async def test_misuse_raises() -> None:
    async with scene() as s:
        stranger = s.keys(1)[0]._replace(pool="swa")
        with pytest.raises(UsageError, match="no page of pool 'kv'"):
            await s.pool.exists([stranger])
        with pytest.raises(UsageError, match="2 keys for 1 slots"):
            await s.pool.put(s.keys(2), [0])
        await s.pool.aclose()
        with pytest.raises(ClosedError):
            await s.get(1)
    with pytest.raises(ConfigError, match="cooldown 0"):
        PoolLimits(cooldown=0)
    with pytest.raises(ConfigError, match="deadline 1000"):
        PoolLimits(deadline=10**400)


@pytest.mark.asyncio
async def test_any_mixture_of_ends_leaves_nothing_behind() -> None:
    """Calls that answer, raise, hang past their deadline, or lose their caller, in a seeded order."""
    chance = Random(7)
    async with scene(deadline=SOON, failures=1000) as s:

        async def by_chance(pages: int) -> list[Outcome]:
            match chance.randrange(4):
                case 0:
                    raise OSError("disk on fire")
                case 1:
                    await asyncio.sleep(2 * SOON)
                case 2:
                    await asyncio.sleep(0)
            return [Outcome.HIT] * pages

        s.engine.answer = by_chance
        for round_ in range(10):
            calls = [asyncio.create_task(s.get(2, 2 * number)) for number in range(6)]
            await asyncio.sleep(0)
            calls[round_ % 6].cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            late = [
                batch.lingering for batch in results if isinstance(batch, BatchResult) and batch.lingering
            ]
            cancelled = s.pool.lingering(range(12))
            await asyncio.gather(*late, *([cancelled] if cancelled else []))

            assert (s.engine.running, s.pool.statistics().running) == (0, 0)
        assert s.engine.most <= 2 * s.engine.capabilities.concurrency
