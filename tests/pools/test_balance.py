"""The warning about a pool that is too small for the others, and its figures."""

from __future__ import annotations

import logging

import pytest

from asynchicache import CacheConfig, HybridCache
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.pools.balance import UndersizedPool, advise_split, find_few_slots, find_undersized_pools
from asynchicache.pools.sizing import FreeMemory, SizeOptions, plan_slots
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import trailing_pages

KV = PoolSpec("kv", (TensorSpec("keys", (0,), (2, 8), "bfloat16"),))
STATE = PoolSpec(
    "mamba", (TensorSpec("recurrent", (1,), (4, 16), "float32"),), trailing_pages(1), per_token=False
)
WINDOW = PoolSpec("swa", (TensorSpec("keys", (2,), (2, 8), "bfloat16"),), trailing_pages(4))
SPEC = ModelSpec("m", 64, 3, (KV, WINDOW, STATE))
TURN = 1024


def test_pools_in_proportion_are_silent():
    assert find_undersized_pools(SPEC, {"kv": (160, 320), "swa": (40, 80), "mamba": (10, 20)}, TURN) == []
    assert find_undersized_pools(SPEC, {"kv": (160, 320), "swa": (25, 50), "mamba": (5, 10)}, TURN) == []


def test_few_states_are_named_with_the_number_they_should_be():
    """40 states against 20,000 pages: 40,960 tokens of 1,280,000."""
    (found,) = find_undersized_pools(
        SPEC, {"kv": (10_000, 20_000), "swa": (2500, 5000), "mamba": (20, 40)}, TURN
    )

    assert found == UndersizedPool("mamba", 40_960, "kv", 1_280_000, 40, 1250, "host_slots")
    assert str(found) == (
        "pool 'mamba' can serve about 40,960 tokens with 40 slots, 'kv' 1,280,000: most of what 'kv' holds "
        "will be no hit. Raise host_slots['mamba'] to 1,250"
    )


def test_the_wanted_number_is_enough():
    slots = {"kv": (1000, 0), "swa": (20, 0), "mamba": (3, 0)}
    for found in find_undersized_pools(SPEC, slots, TURN):
        assert found.option == "device_slots"
        slots[found.pool] = (found.wanted, 0)

    assert find_undersized_pools(SPEC, slots, TURN) == []


def test_turns_may_be_longer():
    slots = {"kv": (1000, 0), "swa": (100, 0), "mamba": (10, 0)}

    assert [found.pool for found in find_undersized_pools(SPEC, slots, TURN)] == ["swa", "mamba"]
    assert find_undersized_pools(SPEC, slots, 100 * 64) == []


def test_states_without_pages_to_stand_on():
    (found,) = find_undersized_pools(SPEC, {"kv": (10, 20), "swa": (10, 20), "mamba": (100, 0)}, TURN)

    assert (found.pool, found.against, found.wanted, found.option) == ("kv", "mamba", 100, "device_slots")


def test_pools_sized_together_are_in_proportion():
    for device_bytes in (1 << 18, 1 << 20, 1 << 26):
        slots = plan_slots(
            SPEC, SizeOptions(device_bytes=device_bytes), FreeMemory(1 << 34, 1 << 34, shared=False)
        )
        assert find_undersized_pools(SPEC, slots) == []


def test_the_split_that_the_traffic_asks_for_is_named_with_the_option_that_gives_it():
    slots = {"kv": (1000, 0), "swa": (20, 0), "mamba": (100, 0)}
    sized = SizeOptions()
    assert advise_split(SPEC, slots, 640, sized) is None, "one state for 640 tokens is what there is"
    assert advise_split(SPEC, slots, 0, sized) is None
    nothing = dict.fromkeys(slots, (0, 0))
    assert advise_split(SPEC, nothing, 8000, sized) is None, "nothing has a split to choose"
    words = "the traffic asks for one state for 8,000 tokens, and the pools have one for 640: set "
    assert advise_split(SPEC, slots, 8000, sized) == f"{words}tokens_per_state=8000"
    on_host = {name: (1, device) for name, (device, _) in slots.items()}
    for chosen, tier, cure in (
        (SizeOptions(device_slots={"mamba": 100}), slots, "device_slots['mamba'] to 8"),
        (SizeOptions(device_slots={"kv": 1000}), slots, "device_slots['mamba'] to 8"),
        (SizeOptions(host_slots={"kv": 1000}), on_host, "host_slots['mamba'] to 8"),
        (SizeOptions(host_slots={"kv": 1000}), slots, "tokens_per_state=8000"),
    ):
        assert advise_split(SPEC, tier, 8000, chosen) == words + cure


def test_few_states_and_windows_on_the_device_are_said_with_the_option():
    """If their number was chosen, one state alone: it keeps nothing."""
    device = {"kv": 463, "swa": 19, "mamba": 1}
    states, windows = (
        f"device_bytes leaves pool {name!r} {words} requests at a time and hardly a hit beside them: raise "
        f"device_bytes, or set device_slots[{name!r}]"
        for name, words in (("mamba", "1 states, enough for 1"), ("swa", "19 window pages, enough for 3"))
    )
    assert find_few_slots(SPEC, SizeOptions(), device) == [windows, states]
    said, chosen = find_few_slots(SPEC, SizeOptions(device_slots={"mamba": 1}), device)
    assert said == windows
    assert "device_slots['mamba'] is 1" in chosen
    assert find_few_slots(SPEC, SizeOptions(device_slots={"mamba": 2}), {**device, "mamba": 2}) == [windows]
    assert find_few_slots(SPEC, SizeOptions(), {"kv": 463, "swa": 20, "mamba": 4}) == []


@pytest.mark.asyncio
async def test_closing_logs_the_split_that_the_traffic_asked_for(caplog: pytest.LogCaptureFixture):
    """Prompts of four pages with a state each, on a device with a state for each page."""
    spec = ModelSpec("m", 64, 3, (KV, STATE))
    config = CacheConfig(device_slots={"kv": 8, "mamba": 8}, host_ratio=0, inline=True, tokens_per_state=64)
    with caplog.at_level(logging.INFO, logger="asynchicache.cache"):
        async with HybridCache.open(spec, config) as cache:
            for first in range(0, 3000, 1000):
                async with cache.request(range(first, first + 257)) as request:
                    await request.load().submitted()
                    request.extend(257)
                    request.checkpoint(256, final=True)
            await cache.drain()
            assert cache.statistics().tokens_per_end == 256

    assert [record.message for record in caplog.records] == [
        "the traffic asks for one state for 256 tokens, and the pools have one for 64: "
        "set device_slots['mamba'] to 2"
    ]


@pytest.mark.asyncio
async def test_opening_warns(caplog: pytest.LogCaptureFixture):
    spec = ModelSpec("m", 64, 3, (KV, STATE))
    small = CacheConfig(
        device_slots={"kv": 100, "mamba": 2}, tokens_per_state=1024, host_slots={"kv": 200, "mamba": 0}
    )
    with caplog.at_level(logging.WARNING, logger="asynchicache"):
        async with HybridCache.open(spec, small):
            pass

    (record,) = caplog.records
    assert "pool 'mamba' can serve about 2,048 tokens with 2 slots, 'kv' 12,800" in record.message
    assert "Raise host_slots['mamba'] to 13" in record.message


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("sizes", "pools"),
    [
        ({"host_ratio": 0}, ["kv", "mamba"]),
        ({"host_slots": {"kv": 0}}, ["kv"]),
        ({"host_slots": {"mamba": 0}}, ["mamba"]),
        ({}, []),
    ],
)
async def test_storage_that_can_never_be_used_is_said_at_opening_and_at_attaching(
    sizes: dict[str, object], pools: list[str], caplog: pytest.LogCaptureFixture
):
    spec = ModelSpec("m", 64, 3, (KV, STATE))
    config = CacheConfig(device_slots={"kv": 8, "mamba": 8}, weight_version="1", **sizes)

    def said() -> list[str]:
        found = [record.message for record in caplog.records if "storage will never" in record.message]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING, logger="asynchicache"):
        async with HybridCache.open(spec, config) as cache:
            assert said() == []
            await cache.attach_storage("memory")
            attached = said()
        async with HybridCache.open(spec, config, storage=MemoryBackend(MemoryStore())):
            opened = said()

    assert attached == opened
    assert [words.partition("pools ")[2].partition(" have")[0] for words in opened] == (
        [f"{pools}"] if pools else []
    )
