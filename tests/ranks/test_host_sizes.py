"""Ranks on one host divide its memory; what they share lies there once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asynchicache import CacheConfig, RankError
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.pools.sizing import HOST_SHARE, FreeMemory, SizeOptions, plan_slots, slot_cost
from asynchicache.ranks.host_sizes import HostNeed, fitted, need_of
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache_lab.ranks.group import openings, seeded_group

GB = 1 << 30
FREE = 100 * GB
GPU = FreeMemory(80 * GB, FREE, shared=False)
LATENTS = need_of(
    replace(spec := synthetic_spec(64, ("kv",)), pools=(replace(spec.pools[0], replicated=True),)),
    SizeOptions(),
    GPU,
    engine=False,
)
HEADS = need_of(spec, SizeOptions(), GPU, engine=False)
COST = slot_cost(spec.pools[0], 64, host=True)
MOST = int(FREE * HOST_SHARE) // COST


def on(host: str, need: HostNeed, **changes: object) -> HostNeed:
    return HostNeed(
        **({name: getattr(need, name) for name in need.__struct_fields__} | {"host": host} | changes)
    )


def host_slots(needs: list[HostNeed], sharing: list[list[int]], slots: int = MOST) -> int:
    return fitted({"kv": (1000, slots)}, dict(enumerate(needs)), dict(enumerate(sharing)))["kv"][1]


def test_what_all_ranks_share_is_paid_once() -> None:
    everyone = list(range(8))
    assert host_slots([on("a", LATENTS)] * 8, [everyone] * 8) == MOST
    assert host_slots([on("a", LATENTS)] * 8, [[]] * 8) == pytest.approx(MOST / 8, abs=1), "nobody shares"
    assert host_slots([on("a", HEADS)] * 8, [everyone] * 8) == pytest.approx(MOST / 8, abs=1), "of each rank"


def test_hosts_have_memory_of_their_own() -> None:
    assert host_slots([on("a", HEADS), on("b", HEADS)], [[], []]) == MOST
    assert host_slots([on("", HEADS), on("", HEADS)], [[], []]) == MOST, "not known to be one"
    uneven = [on("a", HEADS), on("b", HEADS), on("b", HEADS)]
    assert host_slots(uneven, [[]] * 3) == pytest.approx(MOST / 2, abs=1), "the fullest host decides"


def test_what_fits_is_not_lowered() -> None:
    assert host_slots([on("a", HEADS)] * 4, [[]] * 4, slots=MOST // 5) == MOST // 5


def test_devices_of_a_cpu_take_host_memory_too() -> None:
    cpu = on("a", HEADS, device={"kv": COST})
    slots = fitted({"kv": (1000, MOST)}, {0: cpu, 1: cpu}, {})["kv"]
    assert slots == (1000, pytest.approx((FREE - 2000 * COST) * HOST_SHARE / 2 / COST, abs=1))


def test_what_was_chosen_stays_or_is_refused() -> None:
    chosen = on("a", HEADS, chosen=["kv"])
    assert host_slots([chosen, on("a", HEADS)], [[], []], slots=MOST // 2) == MOST // 2
    with pytest.raises(RankError, match=rf"ranks \[0, 1\] are on one host with {FREE} bytes of free memory"):
        host_slots([chosen] * 2, [[], []], slots=MOST // 2 + 2)


def test_bytes_are_chosen_as_slots_are() -> None:
    """Each rank was to have them: less is refused, not given."""
    assert need_of(spec, SizeOptions(host_bytes=1 << 20), GPU, engine=False).chosen == ["kv"]
    assert need_of(spec, SizeOptions(), GPU, engine=False).chosen == []


def test_a_window_that_no_longer_fits_has_no_slots() -> None:
    window = on("a", HEADS, least={"kv": MOST // 3})
    assert host_slots([window] * 2, [[], []]) == pytest.approx(MOST / 2, abs=1)
    assert host_slots([window] * 4, [[], []] * 2) == 0


@pytest.mark.parametrize(("replicated", "parts"), [(True, 1), (False, 3)])
def test_a_group_opens_with_sizes_that_its_host_has_memory_for(
    replicated: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = FreeMemory(1 << 20, 1 << 20, shared=False)
    for module in ("asynchicache.parts", "asynchicache.ranks.worker"):
        monkeypatch.setattr(f"{module}.free_memory", lambda device: free)
    whole = synthetic_spec(4, ("kv",))
    specs = [replace(whole, pools=(replace(whole.pools[0], replicated=replicated),))] * 3
    config = CacheConfig(host_ratio=100, weight_version="a")
    alone = plan_slots(specs[0], config, free)["kv"][1]

    async def main(world: SeededWorld) -> None:
        storage = [MemoryBackend(MemoryStore()) for _ in specs]
        async with seeded_group(world, openings(world, specs, config, storage)) as mirror:
            slots = mirror.cache._parts.planner.inventory.free_slots()
            host = next(found for (_, tier), found in slots.items() if tier.name == "HOST")
            assert len(host) == pytest.approx(alone / parts, abs=1)

    run_seeded(1, main)
