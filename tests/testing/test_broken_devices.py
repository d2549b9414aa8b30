"""The whole cache on devices that fail, or whose notifications get lost."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import pytest

from asynchicache import CacheConfig, HybridCache, MissReason
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.pools.allocator import SlotAllocator
from asynchicache.testing.devices import LossyDevice, break_device
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.plan import CacheOperation
from asynchicache.types import WritePolicy
from testing.compute import CONFIG, PAGE, PROMPTS, SPEC, Engine, clients

SWEEP = 0.05


class Poison:
    """Follows which slots failed copies may still write to, and that nobody is given one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slots: dict[str, set[int]] = defaultdict(set)
        self.handed_out: list[tuple[str, int]] = []
        submit, allocate = LocalTransfers.submit, SlotAllocator.allocate

        def watched_submit(transfers, operation, *, done, **others):
            def told(error):
                if error is not None:
                    self._note(operation)
                done(error)

            return submit(transfers, operation, done=told, **others)

        def watched_allocate(allocator, count):
            slots = allocate(allocator, count)
            self._check(allocator.name, slots)
            return slots

        monkeypatch.setattr(LocalTransfers, "submit", watched_submit)
        monkeypatch.setattr(SlotAllocator, "allocate", watched_allocate)

    def _note(self, operation: CacheOperation) -> None:
        tier = operation.direction.destination.name.lower()
        for transfer in operation.transfers:
            self.slots[f"{transfer.pool} {tier} slots"] |= set(transfer.destinations)

    def _check(self, name: str, slots: Iterable[int]) -> None:
        self.handed_out += [(name, slot) for slot in slots if slot in self.slots[name]]


async def failing(world: SeededWorld) -> tuple[Engine, int]:
    """Clients on a device that fails in their midst; the engine, and how many slots are quarantined."""
    device = world.device()
    async with world.open_cache(SPEC, CONFIG, device=device) as cache:
        engine = Engine(world, cache)
        serving = asyncio.create_task(clients(world, engine))
        await world.sleep(2e-3)
        break_device(device)
        await serving
        await cache.drain()
        while device.error is None:  # it had its turn after everyone else
            await world.sleep(1e-4)
        served = len(engine.hits)
        assert await engine.serve([*PROMPTS[0], 1]) is MissReason.TRANSFER_FAILED
        assert engine.hits[served:] == [0]
        await cache.drain()
        assert cache.verify() == []
        quarantined = sum(o.quarantined for tiers in cache.statistics().occupancy.values() for o in tiers)
    assert len(asyncio.all_tasks()) == 1
    return engine, quarantined


def test_after_a_device_error_everyone_knows_and_no_poisoned_page_comes_back(monkeypatch) -> None:
    quarantined = failures = 0
    for seed in range(60):
        poison = Poison(monkeypatch)
        engine, held_back = run_seeded(seed, failing)
        monkeypatch.undo()
        assert engine.wrong == 0, f"seed {seed}"
        assert poison.handed_out == [], f"seed {seed}"
        quarantined += held_back
        failures += bool(poison.slots)
    assert failures > 30
    assert quarantined > 100


def test_quarantine_is_what_keeps_poisoned_pages_back(monkeypatch) -> None:
    """The test before this one notices when failed slots are simply released."""
    found = []
    for seed in range(60):
        poison = Poison(monkeypatch)
        monkeypatch.setattr(SlotAllocator, "quarantine", SlotAllocator.release)
        run_seeded(seed, failing)
        monkeypatch.undo()
        found += poison.handed_out
    assert found


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_with_notifications_lost_everything_completes_within_one_sweep(share: float) -> None:
    async def main(world: SeededWorld) -> float:
        device = LossyDevice(world.device(), lambda: world.random.random() < share)
        async with world.open_cache(SPEC, CONFIG, device=device) as cache:
            engine = Engine(world, cache)
            await clients(world, engine)
            await cache.drain()
            assert cache.verify() == []
            # Nothing is under way, so the next copy has the device to itself.
            async with cache.request([*PROMPTS[0], 1]) as request:
                started = world.port.now()
                await request.load()
                waited = world.port.now() - started
            assert engine.wrong == 0
            assert any(engine.hits)
        return waited

    for seed in range(15):
        assert run_seeded(seed, main) < SWEEP + 0.01


def test_a_failed_load_is_seen_before_outputs_are_published() -> None:
    """Also by an engine that never awaits the load, and before the loop is told of the failure."""

    async def main(world: SeededWorld) -> None:
        inner = world.device()
        device = LossyDevice(inner)
        async with world.open_cache(SPEC, CONFIG, device=device) as cache:
            engine = Engine(world, cache)
            await engine.serve([*PROMPTS[0], 1])
            await cache.drain()
            compute = device.stream("forward")
            async with cache.request([*PROMPTS[0], *PROMPTS[1]]) as request:
                ticket = request.load()
                await ticket.submitted()
                assert ticket.ok
                assert request.hit.tokens > 0
                break_device(inner)
                for layer in range(SPEC.layers):
                    ticket.fence(layer).wait_on(compute)  # lets through: the forward must not hang
                request.extend(40 - request.reserved)
                end = device.event()
                compute.record(end)
                while inner.error is None:
                    await world.sleep(1e-5)
                assert not ticket.ok
                before = cache.statistics().transfers.operations
                request.checkpoint(40, after=compute)
                request.close(after=compute)
            assert cache.statistics().transfers.operations == before, "nothing goes to the host"
            await cache.drain()
            async with cache.request([*PROMPTS[0], *PROMPTS[1], 1]) as request:
                assert request.hit.tokens <= len(PROMPTS[0]), "the second half was never published"
                request.load()
                assert request.hit.tokens == 0
            await cache.drain()
            assert cache.verify() == []

    for seed in range(20):
        run_seeded(seed, main)


async def publish(cache: HybridCache, tokens: list[int], length: int) -> None:
    """Publish the first `length` tokens, without bytes."""
    async with cache.request(tokens) as request:
        await request.load()
        await request.reserve(length - request.reserved)
        await request.checkpoint(length)


def test_who_waits_for_room_when_the_device_fails_is_served_without_the_cache() -> None:
    """Also one whose match is gone: read from storage below pages whose way to the host failed."""

    async def main(world: SeededWorld) -> bool:
        store, prompt, spec = MemoryStore(), [*PROMPTS[0], 1], synthetic_spec(PAGE, ("kv",))
        config = CacheConfig(device_slots={"kv": 24}, host_slots={"kv": 24}, weight_version="1")
        async with world.open_cache(spec, config, storage=MemoryBackend(store)) as cache:
            await publish(cache, prompt, 20)
            await cache.drain()
        config = msgspec.structs.replace(config, write_policy=WritePolicy.WRITE_BACK)
        device = world.device(mean_seconds=1e-2)
        async with world.open_cache(spec, config, storage=MemoryBackend(store), device=device) as cache:
            await publish(cache, prompt, 8)
            async with cache.request(prompt) as request:
                await request.prefetch()
                assert request.hit.tokens == 20
                node = request._state.lease.node
                break_device(device)
                while device.error is None or cache._parts.executor.in_flight():
                    await world.sleep(1e-3)
                await request.admit()
                await request.load()
                assert (request.hit.tokens, request.hit.reason) == (0, MissReason.TRANSFER_FAILED)
        return node.parent is None

    assert any(run_seeded(seed, main) for seed in range(10))
