"""Copies that are handed out: orders, results, failures, and the end of the cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import pytest_asyncio

from asynchicache import EngineCache, HybridCache, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ConfigError, TransferError, UsageError
from asynchicache.hashing import ObjectKey
from asynchicache.storage.protocol import EngineWrapper, PoolBinding, PoolEngine
from asynchicache.transfer.remote import CopyResult, RemoteCopies
from asynchicache.types import Direction, Outcome
from cache.paged_engine import PAGES, SPEC, config

PROMPT = list(range(22))
TABLE = {"kv": [9, 8, 7, 6, 5], "mamba": [3]}


def handing_out(workers: int = 1) -> RemoteCopies:
    return RemoteCopies({name: PAGES[name] for name in ("kv", "mamba")}, workers=workers)


@pytest_asyncio.fixture
async def remote() -> RemoteCopies:
    return handing_out()


@pytest_asyncio.fixture
async def opened(remote: RemoteCopies) -> AsyncIterator[EngineCache]:
    async with HybridCache.open(SPEC, config(close_seconds=0.01), engine=remote) as cache:
        yield cache


async def publish(cache: EngineCache, remote: RemoteCopies, *, error: str = "") -> None:
    async with cache.request(PROMPT) as request:
        ticket = request.checkpoint(20, pages=TABLE)
        remote.finish([CopyResult(order.id, error) for order in remote.take()])
        if error:
            with pytest.raises(TransferError, match=error):
                await ticket
        else:
            await ticket


@pytest.mark.asyncio
async def test_an_order_names_host_slots_and_the_engines_pages(
    opened: EngineCache, remote: RemoteCopies
) -> None:
    async with opened.request(PROMPT) as request:
        ticket = request.checkpoint(20, pages=TABLE)
        await remote.wait()
        (order,) = remote.take()
        assert order.direction is Direction.BACKUP
        assert [(pool, sources) for pool, sources, _ in order.transfers] == list(TABLE.items())
        assert remote.take() == []
        assert not ticket.done
        assert request.hit.tokens == 0
        remote.finish([CopyResult(order.id)])
        await ticket
        backed_up = {pool: slots for pool, _, slots in order.transfers}
    async with opened.request(PROMPT) as request:
        ticket = request.load(into={"kv": [1, None, 2], "mamba": [4]})
        (order,) = remote.take()
        assert order.direction is Direction.LOAD
        assert {pool: (sources, pages) for pool, sources, pages in order.transfers} == {
            "kv": ([backed_up["kv"][2], backed_up["kv"][4]], [1, 2]),
            "mamba": (backed_up["mamba"], [4]),
        }
        remote.finish([CopyResult(order.id)])
        await ticket
        assert ticket.ok
    assert opened.verify(idle=True) == []
    assert opened.statistics().transfers.nbytes[Direction.BACKUP] > 0


@pytest.mark.asyncio
async def test_pages_are_found_only_once_their_bytes_have_arrived(
    opened: EngineCache, remote: RemoteCopies
) -> None:
    async with opened.request(PROMPT) as first, opened.request(PROMPT) as second:
        first.checkpoint(20, pages=TABLE)
        assert second.rematch().tokens == 0
        second.checkpoint(20, pages=TABLE)
        orders = remote.take()
        assert len(orders) == 1  # pages in flight are not copied twice
        remote.finish([CopyResult(orders[0].id)])
        assert second.rematch().tokens == 20


@pytest.mark.asyncio
async def test_a_backup_that_fails_is_not_found_and_fails_alone(
    opened: EngineCache, remote: RemoteCopies
) -> None:
    await publish(opened, remote, error="bus error")
    async with opened.request(PROMPT) as request:
        assert request.hit.tokens == 0
    assert opened.verify(idle=True) == []  # its slots are free again, not in quarantine
    await publish(opened, remote)
    async with opened.request(PROMPT) as request:
        assert request.hit.by_tier == {Tier.HOST: 20}


@pytest.mark.asyncio
async def test_pages_on_top_of_a_failed_backup_go_with_it(opened: EngineCache, remote: RemoteCopies) -> None:
    """Results may come in any order: the second copy's pages have arrived when the first one fails."""
    async with opened.request(PROMPT) as request:
        below = request.checkpoint(8, pages={"kv": [9, 8]})
        above = request.checkpoint(20, pages=TABLE)
        first, second = remote.take()
        remote.finish([CopyResult(second.id)])
        await above
        assert request.rematch().tokens == 0  # nothing is found above pages that have not arrived
        assert opened.verify() == []
        remote.finish([CopyResult(first.id, "bus error")])
        with pytest.raises(TransferError):
            await below
        assert request.rematch().tokens == 0
    assert opened.verify(idle=True) == []


@pytest.mark.asyncio
async def test_pages_on_top_of_a_failed_backup_that_storage_is_reading_are_not_used_again(
    remote: RemoteCopies,
) -> None:
    reading, go_on = asyncio.Event(), asyncio.Event()
    read: set[tuple[str, int]] = set()

    class Slow(EngineWrapper):
        async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
            read.update((key.pool, slot) for key, slot in zip(keys, slots, strict=True))
            reading.set()
            await go_on.wait()
            return await super().put(keys, slots)

    class SlowBackend(MemoryBackend):
        async def open_pool(self, binding: PoolBinding) -> PoolEngine:
            engine = Slow(await super().open_pool(binding))
            engine.capabilities = replace(engine.capabilities, immediate=False)
            return engine

    options = config(close_seconds=0.01, weight_version="one")
    async with HybridCache.open(SPEC, options, engine=remote, storage=SlowBackend(MemoryStore())) as cache:
        async with cache.request(PROMPT) as request:
            below = request.checkpoint(8, pages={"kv": [9, 8]})
            above = request.checkpoint(20, pages=TABLE)
            first, second = remote.take()
            remote.finish([CopyResult(second.id)])
            await above
            await reading.wait()  # storage reads the pages above
            remote.finish([CopyResult(first.id, "bus error")])
            with pytest.raises(TransferError):
                await below
            free = cache.inspect().planner.inventory.free_slots()
            assert not [(pool, slot) for pool, slot in read if slot in free[pool, Tier.HOST]]
        go_on.set()


@pytest.mark.asyncio
async def test_a_load_that_fails_tells_its_own_request_only(
    opened: EngineCache, remote: RemoteCopies
) -> None:
    await publish(opened, remote)
    async with opened.request(PROMPT) as request:
        ticket = request.load(into={"kv": [1]})
        remote.finish([CopyResult(order.id, "bus error") for order in remote.take()])
        with pytest.raises(TransferError, match="bus error"):
            await ticket
    async with opened.request(PROMPT) as request:
        assert request.hit.tokens == 20
        ticket = request.load(into={"kv": [1]})  # the page may be written again
        remote.finish([CopyResult(order.id) for order in remote.take()])
        await ticket
    assert opened.verify(idle=True) == []


@pytest.mark.asyncio
async def test_host_pages_of_a_load_stay_until_it_has_ended(remote: RemoteCopies) -> None:
    small = config(host_slots={"kv": 5, "mamba": 1})
    async with HybridCache.open(SPEC, small, engine=remote) as cache:
        await publish(cache, remote)
        async with cache.request(PROMPT) as request:
            ticket = request.load(into={"kv": [1, 2, 3, 4, 5]})
            (order,) = remote.take()
        async with cache.request([7] * 22) as other:  # the first request is closed, its copy runs
            other.checkpoint(20, pages=TABLE)
            assert remote.take() == []  # no room: every slot is being read
            remote.finish([CopyResult(order.id)])
            await ticket
            other.checkpoint(20, pages=TABLE)
            remote.finish([CopyResult(one.id) for one in remote.take()])
            assert other.rematch().tokens == 20


@pytest.mark.asyncio
async def test_every_worker_has_to_report() -> None:
    remote = handing_out(workers=2)
    async with HybridCache.open(SPEC, config(), engine=remote) as cache, cache.request(PROMPT) as request:
        ticket = request.checkpoint(20, pages=TABLE)
        (order,) = remote.take()
        remote.finish([CopyResult(order.id), CopyResult(order.id)], worker=0)
        assert (ticket.done, remote.stray) == (False, 1)
        remote.finish([CopyResult(order.id, "one GPU is lost")], worker=1)
        with pytest.raises(TransferError, match="one GPU is lost"):
            await ticket
        with pytest.raises(UsageError, match="worker 2 is none of 2"):
            remote.finish([], worker=2)


@pytest.mark.asyncio
async def test_results_of_nobody_are_counted(opened: EngineCache, remote: RemoteCopies) -> None:
    async with opened.request(PROMPT) as request:
        ticket = request.checkpoint(20, pages=TABLE)
        remote.finish([CopyResult(1), CopyResult(99)])  # nobody has taken it
        assert (remote.stray, ticket.done) == (2, False)
        (order,) = remote.take()
        remote.finish([CopyResult(order.id)])
        await ticket


@pytest.mark.asyncio
async def test_workers_that_are_gone_fail_what_they_had(opened: EngineCache, remote: RemoteCopies) -> None:
    async with opened.request(PROMPT) as request:
        ticket = request.checkpoint(20, pages=TABLE)
        remote.take()
        remote.abandon("the worker was killed")
        with pytest.raises(TransferError, match="the worker was killed"):
            await ticket
    assert opened.verify(idle=True) == []


@pytest.mark.asyncio
async def test_closing_fails_what_nobody_took_and_waits_for_the_rest(remote: RemoteCopies) -> None:
    opened = await HybridCache.open(SPEC, config(), engine=remote)
    async with opened.request(PROMPT) as request:
        taken = request.checkpoint(8, pages={"kv": [9, 8]})
        (order,) = remote.take()
        left = request.checkpoint(20, pages=TABLE)
    closing = asyncio.create_task(opened.aclose())
    with pytest.raises(TransferError, match="before it was taken"):
        await left
    assert not closing.done()
    remote.finish([CopyResult(order.id)])
    await taken
    await closing


@pytest.mark.asyncio
async def test_closing_gives_up_on_a_worker_that_never_reports(remote: RemoteCopies) -> None:
    opened = await HybridCache.open(SPEC, config(close_seconds=0.01), engine=remote)
    async with opened.request(PROMPT) as request:
        ticket = request.checkpoint(20, pages=TABLE)
        remote.take()
    await opened.aclose()
    with pytest.raises(TransferError, match="given up after"):
        await ticket


@pytest.mark.asyncio
async def test_misuse_is_refused(opened: EngineCache, remote: RemoteCopies) -> None:
    with pytest.raises(UsageError, match="belong to a cache already"):
        await HybridCache.open(SPEC, config(), engine=remote)
    with pytest.raises(UsageError, match="once the cache is open"):
        _ = handing_out().host
    with pytest.raises(ConfigError, match="pools with slots of their own"):
        await HybridCache.open(SPEC, config(), engine=RemoteCopies({"kv": 4}))
    for pages, workers in (({"kv": 0}, 1), ({"kv": True}, 1), ({"kv": 1}, 0)):
        with pytest.raises(ConfigError):
            RemoteCopies(pages, workers=workers)
    stream = opened.device.stream("compute")
    with pytest.raises(UsageError, match="no stream is known"):
        opened.request(PROMPT, stream=stream)
    async with opened.request(PROMPT) as request:
        with pytest.raises(UsageError, match="run elsewhere"):
            request.checkpoint(20, pages=TABLE, after=stream)
