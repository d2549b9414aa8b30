"""What `durable` promises: storage was asked, it has the pages, and it keeps what is used longest."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from asynchicache import HybridCache, ModelSpec, Request
from asynchicache.backends.file.segments import SegmentShape
from asynchicache.backends.memory import MemoryBackend, MemoryEngine, MemoryStore
from asynchicache.controller import storage_writer
from asynchicache.controller.digests import DIGESTS_A_TURN
from asynchicache.hashing import ObjectKey
from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.storage.chain import ChainStage, StagePolicy, StorageChain
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import MissReason, Outcome, WritePolicy
from cache.engine import SPEC, Engine, config

PAGES_ONLY = synthetic_spec(4, ("kv",))
ROOMY = {"device_slots": {"kv": 256, "mamba": 64}, "host_slots": {"kv": 256, "mamba": 64}}
PLAIN = {"device_slots": {"kv": 256}, "host_slots": {"kv": 256}}
HEAD = list(range(32))
PROMPT = list(range(100, 140))


def conversation(number: int) -> list[int]:
    """Eight pages that all share, and eight of its own."""
    return [*HEAD, *range(1000 * number, 1000 * number + 32)]


async def published(cache: HybridCache, tokens: list[int]) -> bool:
    """Compute a prompt; whether it is durable."""
    engine = Engine(cache)
    async with cache.request(tokens) as request:
        await request.prefetch()
        await request.load()
        await engine.compute(request, len(tokens))
        return await request.durable()


async def restored(cache: HybridCache, tokens: list[int]) -> int:
    async with cache.request([*tokens, 7]) as request:
        await request.prefetch()
        await request.load()
        Engine(cache).check(request)
        return request.hit.tokens


async def newest_are_back(**options: object) -> list[int]:
    """Twenty conversations, one after the other; what a restart finds of each, the newest first."""
    options = {**PLAIN, **options}
    async with HybridCache.open(PAGES_ONLY, config(**options)) as cache:
        assert all([await published(cache, conversation(number)) for number in range(1, 21)])
    async with HybridCache.open(PAGES_ONLY, config(**options)) as cache:
        return [await restored(cache, conversation(number)) for number in range(20, 0, -1)]


@pytest.mark.asyncio
async def test_the_newest_conversations_that_fit_are_back_after_a_restart_in_memory() -> None:
    """Sixty-four pages are eight shared ones, and seven conversations' own."""
    bound = {"name": "promises", "capacity_bytes": 64 * _page_bytes(PAGES_ONLY)}
    found = await newest_are_back(storage="memory", storage_options=bound)
    assert found == [64] * 7 + [32] * 13


@pytest.mark.asyncio
async def test_the_newest_conversations_that_fit_are_back_after_a_restart_on_files(tmp_path: Path) -> None:
    bound = {"kv": SegmentShape.of(4096).pool_bytes(64)}
    options = {"path": str(tmp_path / "store"), "capacity_bytes": bound}
    found = await newest_are_back(storage="file", storage_options=options)
    assert found == [64] * 7 + [32] * 13


def _page_bytes(spec: ModelSpec) -> int:
    return SlotLayout.of(spec.pools[0], spec.page_size, HostLayout.PAGE_FIRST_DIRECT).page_bytes


def test_what_storage_lost_is_written_anew_before_it_is_called_durable() -> None:
    """FLUSHALL, a lifecycle rule, a restart without persistence: the marks in memory are void."""

    async def main(world: SeededWorld) -> None:
        store = MemoryStore()
        backend = Latency(MemoryBackend(store), 1e-3, sleep=world.sleep)
        async with world.open_cache(SPEC, config(**ROOMY), storage=backend) as cache:
            async with cache.request(PROMPT) as request:
                await request.load()
                await Engine(cache).compute(request, len(PROMPT))
                assert await request.durable()
                before = set(store)
                for lost in (list(store), list(store)[:1], list(store)[-3:]):
                    for key in lost:
                        store.drop(key)
                    assert await request.durable()
                    assert set(store) == before
            assert cache.verify() == []

    for seed in range(10):
        run_seeded(seed, main)


def test_a_storage_that_does_not_say_has_promised_nothing() -> None:
    async def main(world: SeededWorld) -> None:
        faults = Faulty(MemoryBackend(MemoryStore()), FaultRates(), world.random)
        async with world.open_cache(SPEC, config(**ROOMY), storage=faults) as cache:
            async with cache.request(PROMPT) as request:
                await request.load()
                await Engine(cache).compute(request, len(PROMPT))
                assert await request.durable()
                faults.rates = FaultRates(fail=1.0, calls=("exists",))
                assert not await request.durable()
                faults.rates = FaultRates()
                assert await request.durable()

    run_seeded(0, main)


def test_a_gap_that_a_question_finds_is_closed() -> None:
    """Storage lost what is in memory still. A longer prompt asks for what follows, and the end of it is not
    there: it is written again without anybody waiting for it."""

    async def main(world: SeededWorld) -> None:
        store = MemoryStore()
        async with world.open_cache(PAGES_ONLY, config(**PLAIN), storage=MemoryBackend(store)) as cache:
            await Engine(cache).serve(PROMPT)
            before = set(store)
            for key in list(store):
                store.drop(key)
            await restored(cache, [*PROMPT, *range(500, 540)])
            await cache.drain()
            assert set(store) == before
            assert cache.statistics().storage["kv"].put.outcomes[Outcome.STORED] == 2 * len(before)

    run_seeded(0, main)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_hot_in_memory_stays_in_a_bounded_store(seed: int) -> None:
    """One conversation is served from memory again and again, while others pass through the store."""

    async def main(world: SeededWorld) -> None:
        store = MemoryStore(64 * _page_bytes(PAGES_ONLY))
        backend = Latency(MemoryBackend(store), 1e-3, sleep=world.sleep)
        async with world.open_cache(PAGES_ONLY, config(**PLAIN), storage=backend) as cache:
            await published(cache, PROMPT)
            for number in range(1, 12):
                assert await restored(cache, PROMPT) == 40
                await published(cache, list(range(1000 * number, 1000 * number + 64)))
        async with world.open_cache(PAGES_ONLY, config(**PLAIN), storage=backend) as cache:
            assert await restored(cache, PROMPT) == 40

    run_seeded(seed, main)


def test_uses_are_told_in_batches_without_a_write() -> None:
    """Others fill a shared store, this cache only reads its memory: its pages are used all the same."""

    async def main(world: SeededWorld) -> None:
        store = MemoryStore(1 << 30)
        async with world.open_cache(SPEC, config(**ROOMY), storage=MemoryBackend(store)) as cache:
            await published(cache, PROMPT)
            await asyncio.sleep(10)
            calls = cache.statistics().storage["kv"].touch.calls
            for _ in range(100):
                await restored(cache, PROMPT)
                await asyncio.sleep(0.01)
            await asyncio.sleep(10)
            assert 1 <= cache.statistics().storage["kv"].touch.calls - calls <= 3
            assert [key.digest for key in store if key.pool == "kv"] == Engine(cache).digests(
                cache.request(PROMPT), None
            )[::-1], "the first page was used last"

    run_seeded(0, main)


@pytest.mark.parametrize("pools", [("kv", "swa"), ("kv", "mamba", "swa")])
@pytest.mark.parametrize("policy", WritePolicy)
def test_every_checkpoint_of_a_durable_request_is_back_after_a_restart(
    pools: tuple[str, ...], policy: WritePolicy
) -> None:
    """Each has a window of its own, also under write-back, where nothing goes to storage before it must."""

    async def main(world: SeededWorld) -> None:
        spec, store = synthetic_spec(4, pools, window_pages=2), MemoryStore()
        backend = MemoryBackend(store)
        size = dict.fromkeys(pools, 60)
        options = config(device_slots=size, host_slots=size, write_policy=policy)
        async with world.open_cache(spec, options, storage=backend) as cache:
            async with cache.request(PROMPT) as request:
                await request.load()
                for length in (12, 24, 40):
                    await Engine(cache).compute(request, length)
                assert await request.durable()
                before = set(store)
                for key in [key for key in store if key.pool == "swa"]:
                    store.drop(key)
                assert await request.durable(), "what storage lost of any window is written anew"
                assert set(store) == before
        for length in (12, 24, 40):
            async with world.open_cache(spec, options, storage=backend) as cache:
                assert await restored(cache, PROMPT[:length]) == length

    run_seeded(1, main)


def test_a_restart_says_how_far_attention_pages_reach_and_which_pool_ends_the_hit() -> None:
    """The second prompt of a family leaves a state where they part, whoever computed the first one."""
    shared, size = list(range(32)), {"kv": 60, "mamba": 60}

    async def main(world: SeededWorld) -> None:
        backend, hits = MemoryBackend(MemoryStore()), []
        for question in range(3):
            prompt = [*shared, *range(1000 * (question + 1), 1000 * (question + 1) + 8)]
            options = config(device_slots=size, host_slots=size)
            async with world.open_cache(SPEC, options, storage=backend) as cache:
                engine = Engine(cache)
                async with cache.request(prompt) as request:
                    await request.prefetch()
                    await request.load()
                    engine.check(request)
                    hits.append(request.hit)
                    for length in request.cuts:
                        await engine.compute(request, length)
                    assert await request.durable()
        first, second, third = hits
        assert (first.tokens, first.reason, first.full_tokens) == (0, MissReason.COLD, 0)
        assert (second.tokens, second.reason, second.full_tokens) == (0, MissReason.STATE, 32)
        assert (second.held_back_by, second.advice.split(":")[0]) == ("mamba", "publish 'mamba' at 32 tokens")
        assert (third.tokens, third.reason, third.full_tokens) == (32, MissReason.COLD, 32)

    run_seeded(1, main)


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_path_whose_digests_take_many_turns_is_durable_and_drained(policy: WritePolicy) -> None:
    pages = 3 * DIGESTS_A_TURN

    async def main(world: SeededWorld) -> None:
        spec, store = synthetic_spec(1, ("kv",)), MemoryStore()
        size = {"kv": pages}
        options = config(device_slots=size, host_slots=size, write_policy=policy)
        async with world.open_cache(spec, options, storage=MemoryBackend(store)) as cache:
            async with cache.request(range(pages)) as request:
                await request.load()
                request.extend(pages)
                await request.checkpoint(pages)
                if policy is WritePolicy.WRITE_THROUGH:
                    await cache.drain()
                    assert len(set(store)) == pages
                assert await request.durable()
                assert len(set(store)) == pages

    run_seeded(0, main)


@pytest.mark.parametrize("policy", WritePolicy)
def test_durable_ends_where_states_share_a_host_slot_and_windows_have_none(policy: WritePolicy) -> None:
    """Stored states that took each other's host slot looked like progress, and the wait had no end."""

    async def main(world: SeededWorld) -> None:
        spec = synthetic_spec(4, ("kv", "mamba", "swa"), window_pages=4)
        device, host = dict.fromkeys(("kv", "mamba", "swa"), 60), {"kv": 60, "mamba": 1, "swa": 0}
        options = config(device_slots=device, host_slots=host, write_policy=policy)
        async with world.open_cache(spec, options, storage=MemoryBackend(MemoryStore())) as cache:
            async with cache.request(PROMPT) as request:
                await request.load()
                for length in (12, 24, 40):
                    await Engine(cache).compute(request, length)
                async with asyncio.timeout(60.0):
                    assert not await request.durable(), "no window can get there"

    run_seeded(1, main)


# Whatever the request went through

MODELS = pytest.mark.parametrize("pools", [("kv",), ("kv", "mamba"), ("kv", "mamba", "swa")])
WHOLE = 40


async def _in_chunks(request: Request, engine: Engine) -> None:
    for length in (7, 12, 20, 33, WHOLE, WHOLE + 1):
        await engine.compute(request, length)


async def _suspended(request: Request, engine: Engine) -> None:
    await engine.compute(request, WHOLE)
    request.suspend(WHOLE + 1 if request.reserved > WHOLE else WHOLE)


async def _matched_again(request: Request, engine: Engine) -> None:
    await _suspended(request, engine)
    request.rematch()


async def _resumed(request: Request, engine: Engine) -> None:
    await engine.compute(request, 20)
    request.suspend(20)
    request.rematch()
    request.rest()
    request.rematch()
    await request.load()
    await engine.compute(request, WHOLE)
    request.suspend(WHOLE)


async def _evicted(request: Request, engine: Engine) -> None:
    await _suspended(request, engine)
    await engine.cache.flush()


LIVES = {
    "chunks": _in_chunks,
    "suspended": _suspended,
    "matched again": _matched_again,
    "resumed": _resumed,
    "evicted": _evicted,
}
SHORT: dict[str, dict[str, int]] = {
    "nothing": {},
    "nothing, and it is written back": {},
    "store": {},
    "host pages": {"kv": 4},
    "host states and windows": {"mamba": 0, "swa": 0},
    "late storage": {},
}


@MODELS
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("short", SHORT)
def test_durable_is_true_if_and_only_if_a_restart_restores_it(
    pools: tuple[str, ...], life: str, short: str
) -> None:
    dirty = short == "nothing, and it is written back"

    async def main(world: SeededWorld) -> None:
        spec, store = synthetic_spec(4, pools, window_pages=2), MemoryStore()
        policy = WritePolicy.WRITE_BACK if dirty else WritePolicy.WRITE_THROUGH
        size: dict[str, object] = {"device_slots": dict.fromkeys(pools, 60), "write_policy": policy}
        options = config(**size, host_slots={name: SHORT[short].get(name, 60) for name in pools})
        faults = Faulty(MemoryBackend(store), FaultRates(), world.random)
        if short == "store":
            faults.rates = FaultRates(fail=1.0, calls=("put",))
        attached = None if short == "late storage" else faults
        async with world.open_cache(spec, options, storage=attached) as cache:
            async with cache.request([*PROMPT, 7]) as request:
                await request.load()
                await LIVES[life](request, Engine(cache))
                if short == "late storage":
                    assert not await request.durable()
                    await cache.attach_storage(faults)
                told = await request.durable()
            assert cache.verify() == []
            # Before the first one closes, which writes what it can.
            async with world.open_cache(spec, config(**size), storage=MemoryBackend(store)) as other:
                assert told is (await restored(other, PROMPT) == WHOLE)
        gone = life == "evicted" and (dirty or short == "late storage")
        fits = short not in ("store", "host pages") and not set(pools).intersection(SHORT[short])
        assert told is (fits and not gone)

    run_seeded(1, main)


@pytest.mark.parametrize("final", [False, True])
def test_a_state_that_found_no_slot_is_not_durable(final: bool) -> None:
    """Another request holds the only other one, so that this checkpoint keeps pages alone."""

    async def main(world: SeededWorld) -> None:
        options = config(device_slots={"kv": 40, "mamba": 2}, host_slots={"kv": 40, "mamba": 9})
        async with world.open_cache(SPEC, options, storage=MemoryBackend(MemoryStore())) as cache:
            async with cache.request([1] * 8) as other, cache.request(PROMPT) as request:
                await other.load()
                await other.reserve(8)
                await request.load()
                await Engine(cache).compute(request, 20)
                assert not await request.durable()
                if final:  # hands its own state over
                    request.extend(20)
                    Engine(cache).write(request, 20, 40)
                    await request.checkpoint(40, final=True)
                    assert await request.durable()
                    return
                request.extend(21)
                request.append([7])
                await request.snapshot(40)  # no slot either
                request.suspend(41)
                assert not await request.durable()

    run_seeded(1, main)


def test_what_rests_was_matched_and_storage_is_asked_for_it() -> None:
    async def main(world: SeededWorld) -> None:
        faults = Faulty(MemoryBackend(MemoryStore()), FaultRates(fail=1.0, calls=("put",)), world.random)
        async with world.open_cache(SPEC, config(**ROOMY), storage=faults) as cache:
            assert not await published(cache, PROMPT)
            async with cache.request([*PROMPT, 7]) as request:
                request.rest()
                assert not await request.durable()
                await asyncio.sleep(60)
                faults.rates = FaultRates()
                assert await request.durable()
                assert cache.verify() == []
                assert request.rematch().tokens == WHOLE

    run_seeded(1, main)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _replace(folder: Path) -> None:
    _move(folder)
    shutil.copytree(folder.with_name("elsewhere"), folder)
    for path in folder.rglob("*.pages"):
        path.unlink()


def _cut(folder: Path, size: int) -> None:
    for path in folder.rglob("*.pages"):
        os.truncate(path, size)


def _unmark(folder: Path) -> None:
    (folder / "FORMAT").unlink()


@pytest.mark.parametrize("damage", [shutil.rmtree, _empty, _move, _replace, _unmark])
@pytest.mark.asyncio
async def test_what_lies_in_a_folder_that_is_gone_is_not_durable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    folder, more = tmp_path / "store", list(range(200, 240))
    options = config(**ROOMY, storage="file", storage_options={"path": str(folder)})
    async with HybridCache.open(SPEC, options) as cache:
        assert await published(cache, PROMPT)
        damage(folder)
        assert not await published(cache, PROMPT), "its pages were stored before"
        assert not await published(cache, more)
        for pool in ("kv", "mamba"):
            told = [one for one in caplog.records if f"pool {pool}: the files in" in one.message]
            assert [one.levelno for one in told] == [logging.ERROR], "once"
        if damage is _move:
            folder.with_name("elsewhere").rename(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            assert await cache.detach_storage()
            await cache.attach_storage("file", {"path": str(folder)})
        assert await published(cache, PROMPT)
        assert await published(cache, more)
    async with HybridCache.open(SPEC, options) as cache:
        assert [await restored(cache, PROMPT), await restored(cache, more)] == [WHOLE, WHOLE]


@pytest.mark.parametrize("kept", [0, 100_000])
@pytest.mark.asyncio
async def test_what_a_cut_file_lost_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
    options = config(**ROOMY, storage="file", storage_options={"path": str(tmp_path)})
    async with HybridCache.open(SPEC, options) as cache:
        for prompt in (PROMPT, list(range(200, 240))):
            assert await published(cache, prompt)
            _cut(tmp_path, kept)
        assert await published(cache, PROMPT)
        assert await published(cache, list(range(200, 240)))
        assert "were cut, and" in caplog.text
    async with HybridCache.open(SPEC, options) as cache:
        assert [await restored(cache, prompt) for prompt in (PROMPT, list(range(200, 240)))] == [WHOLE] * 2


def emptied(store: MemoryStore) -> set[ObjectKey]:
    """What a store had that is emptied beside a running cache: it came back without its pages."""
    before = set(store)
    for key in before:
        store.drop(key)
    return before


@pytest.mark.parametrize("options", [{}, {"write_policy": "write_back"}])
def test_sync_writes_what_storage_has_lost(options: dict[str, object]) -> None:
    """Nobody has asked for it meanwhile, and every page in memory is marked stored."""

    async def main(world: SeededWorld) -> None:
        store = MemoryStore()
        faults = Faulty(MemoryBackend(store), FaultRates(), world.random)
        async with world.open_cache(SPEC, config(**ROOMY, **options), storage=faults) as cache:
            for tenant in range(3):
                await Engine(cache).serve([*PROMPT, tenant])
            assert await cache.sync()
            before = emptied(store)
            assert before
            assert await cache.sync()
            assert set(store) == before
            store.drop(min(before))
            faults.rates = FaultRates(fail=1.0, calls=("exists",))
            assert not await cache.sync(), "storage does not say what it has"
            faults.rates = FaultRates()
            assert await cache.sync()
            assert set(store) == before

    for seed in range(5):
        run_seeded(seed, main)


def test_sync_waits_for_writes_in_flight() -> None:
    """They are marked stored from their beginning on, and storage refuses them in the end."""

    async def main(world: SeededWorld) -> None:
        refuses = Faulty(MemoryBackend(MemoryStore()), FaultRates(fail=1.0, calls=("put",)), world.random)
        hangs = Faulty(refuses, FaultRates(hang=1.0, calls=("put",)), world.random)
        async with world.open_cache(SPEC, config(**ROOMY), storage=hangs) as cache:
            async with cache.request(PROMPT) as request:
                await request.load()
                await Engine(cache).compute(request, len(PROMPT))
            while not cache.statistics().storing_bytes:
                await world.sleep(0.01)
            syncing = asyncio.ensure_future(cache.sync())
            await world.sleep(1.0)
            assert not syncing.done()
            hangs.rates = FaultRates()
            hangs.release()
            assert not await syncing

    run_seeded(0, main)


def test_a_match_finds_that_storage_was_emptied() -> None:
    """Prompts that memory has whole ask storage for nothing but whether it still has their beginning."""

    async def main(world: SeededWorld) -> None:
        store = MemoryStore(capacity_bytes=1 << 20)
        async with world.open_cache(SPEC, config(**ROOMY), storage=MemoryBackend(store)) as cache:
            await Engine(cache).serve(PROMPT)
            await cache.drain()
            before = emptied(store)
            await restored(cache, PROMPT)
            await world.sleep(5.0)
            await cache.drain()
            assert set(store) == before

    for seed in range(5):
        run_seeded(seed, main)


def a_chain(world: SeededWorld, *stores: MemoryStore, durable: Sequence[bool | None]) -> StorageChain:
    """Stages that all get every page."""
    stages = [
        ChainStage(f"s{number}", partial(MemoryBackend, store), StagePolicy(durable=promises))
        for number, (store, promises) in enumerate(zip(stores, durable, strict=True))
    ]
    return StorageChain(stages, world.port)


@pytest.mark.parametrize("found", ["by a match", "by a longer one", "by sync"])
@pytest.mark.parametrize(("durable", "which"), [((True, False), 1), ((None, None), 1), ((None, None), 0)])
def test_a_stage_that_forgot_everything_gets_it_again(
    monkeypatch: pytest.MonkeyPatch, durable: tuple[bool | None, bool | None], which: int, found: str
) -> None:
    """FLUSHALL of a Redis behind a file store, which answers every read."""
    labels = list[MemoryStore]()

    async def label(engine: MemoryEngine, _: bytes) -> None:
        labels.append(engine._store)

    monkeypatch.setattr(MemoryEngine, "label", label, raising=False)

    async def main(world: SeededWorld) -> None:
        stores = MemoryStore(1 << 20), MemoryStore(1 << 20)
        chain = a_chain(world, *stores, durable=durable)
        async with world.open_cache(SPEC, config(**ROOMY), storage=chain) as cache:
            await Engine(cache).serve(PROMPT)
            await cache.drain()
            before = emptied(stores[which])
            labels.clear()
            if found == "by sync":
                assert await cache.sync()
            else:
                await restored(cache, PROMPT + [3] * 8 * (found == "by a longer one"))
                await asyncio.sleep(5.0)
            await cache.drain()
            assert before <= set(stores[0])
            assert before <= set(stores[1])
            assert stores[which] in labels
            assert cache.verify() == []

    for seed in range(3):
        run_seeded(seed, main)


def test_a_promise_holds_while_a_stage_without_one_has_lost_all() -> None:
    async def main(world: SeededWorld) -> None:
        stores = MemoryStore(), MemoryStore()
        chain = a_chain(world, *stores, durable=(True, False))
        async with world.open_cache(SPEC, config(**ROOMY), storage=chain) as cache:
            async with cache.request(PROMPT) as request:
                await request.load()
                await Engine(cache).compute(request, len(PROMPT))
                assert await request.durable()
                emptied(stores[1])
                sent = cache.statistics().traffic.stored
                assert await request.durable()
                assert cache.statistics().traffic.stored == sent
            assert not set(stores[1])

    run_seeded(0, main)


@pytest.mark.parametrize("near_keeps", [True, False])
def test_a_stage_that_keeps_nothing_is_sent_the_same_once_per_use(near_keeps: bool) -> None:
    async def main(world: SeededWorld) -> None:
        drops = Faulty(MemoryBackend(MemoryStore(1 << 20)), FaultRates(drop=1.0), world.random)
        keeps = MemoryBackend(MemoryStore(1 << 20))
        near, far = (keeps, drops) if near_keeps else (drops, keeps)
        stages = [
            ChainStage("near", lambda: near, StagePolicy(durable=near_keeps)),
            ChainStage("far", lambda: far, StagePolicy(durable=not near_keeps)),
        ]
        async with world.open_cache(SPEC, config(**ROOMY), storage=StorageChain(stages, world.port)) as cache:
            await Engine(cache).serve(PROMPT)
            await asyncio.sleep(10.0)
            await cache.drain()
            sent = [cache.statistics().traffic.stored]
            for _ in range(3):
                await restored(cache, PROMPT)
                await asyncio.sleep(10.0)
                await cache.drain()
                sent.append(cache.statistics().traffic.stored)
                await asyncio.sleep(100.0)
                await cache.drain()
                assert cache.statistics().traffic.stored == sent[-1]
            assert await cache.sync()
            again = {after - before for before, after in pairwise(sent)}
            assert again == ({sent[0]} if near_keeps else {0}), (
                "what a nearer one evicts is read from the next"
            )

    run_seeded(0, main)


def test_a_storage_that_keeps_nothing_is_not_sent_the_same_for_ever() -> None:
    async def main(world: SeededWorld) -> None:
        drops = Faulty(MemoryBackend(MemoryStore(1 << 20)), FaultRates(drop=1.0), world.random)
        async with world.open_cache(SPEC, config(**ROOMY), storage=drops) as cache:
            await Engine(cache).serve(PROMPT)
            await restored(cache, PROMPT)
            await world.sleep(10.0)
            await cache.drain()
            sent = cache.statistics().traffic.stored
            assert sent
            await world.sleep(100.0)
            await cache.drain()
            assert cache.statistics().traffic.stored == sent

    run_seeded(0, main)


def test_what_is_evicted_while_sync_asks_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_writer, "SLICE_PAGES", 1)

    async def main(world: SeededWorld) -> None:
        backend = Latency(MemoryBackend(MemoryStore()), 0.1, sleep=world.sleep)
        async with world.open_cache(PAGES_ONLY, config(**PLAIN), storage=backend) as cache:
            for number in range(3):
                await Engine(cache).serve(conversation(number))
            syncing = asyncio.ensure_future(cache.sync())
            await world.sleep(0.05)
            await cache.flush()
            assert not syncing.done()
            assert await syncing

    run_seeded(0, main)


def test_of_what_is_evicted_while_its_use_is_told_storage_is_asked_nothing() -> None:
    async def main(world: SeededWorld) -> None:
        rates = FaultRates(hang=1.0, calls={"touch"})
        hangs = Faulty(MemoryBackend(MemoryStore(1 << 20)), rates, world.random)
        room = {"device_slots": {"kv": 11}, "host_slots": {"kv": 11}}
        async with world.open_cache(PAGES_ONLY, config(**room), storage=hangs) as cache:
            engine = Engine(cache)
            await engine.serve(PROMPT)
            await restored(cache, PROMPT)
            asked = cache.statistics().storage["kv"].exists.calls
            while not hangs.hanging:
                await world.sleep(0.01)
            await engine.serve([*range(44)], prefetch=False)
            hangs.release()
            await world.sleep(0.5)
            assert cache.statistics().storage["kv"].exists.calls == asked

    run_seeded(0, main)
