"""Forwards on a stream of their own, and the cache's copies: fences keep bytes right, and each is needed.

Fences between copies are not among these: the tree keeps slots of a copy under way from others. That the
engine, which knows of no trees, needs them is shown in `tests/transfer/test_fences_of_transfers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynchicache import CacheConfig
from asynchicache.controller.executor import Executor
from asynchicache.controller.request import Request
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.transfer.fences import Fence
from asynchicache.transfer.schedule import Scheduler
from testing.compute import SPEC, Engine, clients

SEEDS = range(40)
TIGHT = CacheConfig(device_slots={"kv": 18, "mamba": 8})
"""Less than what the prompts need, so that slots go from hand to hand."""


async def crowd(world: SeededWorld) -> tuple[int, int]:
    """Pages and states that were wrong where a forward read them, and tokens restored."""
    async with world.open_cache(SPEC, TIGHT) as cache:
        engine = Engine(world, cache)
        await clients(world, engine)
        await cache.drain()
        assert cache.verify() == []
    return engine.wrong, sum(engine.hits)


def wrong() -> Iterator[int]:
    return (run_seeded(seed, crowd)[0] for seed in SEEDS)


def test_forwards_get_the_right_bytes() -> None:
    assert not any(wrong())
    assert all(run_seeded(seed, crowd)[1] for seed in range(5))


def _close_at_once(self: Request, after: object = None) -> None:
    if self._state is not None:
        self._state.streams.clear()
    ORIGINAL_CLOSE(self)


ORIGINAL_CLOSE = Request.close
FENCES = {
    "copies behind the forward that writes their source": (
        Executor,
        "order_after",
        lambda self, stream: None,
    ),
    "the next owner behind the forward that reads a slot": (
        Request,
        "close",
        _close_at_once,
    ),
    "a forward behind its tickets": (Fence, "wait_on", lambda self, stream: None),
    "a forward behind what others bring": (Scheduler, "_writers", lambda *_: iter(())),
}


@pytest.mark.parametrize("kind", FENCES)
def test_without_any_kind_of_fence_a_forward_reads_wrong_bytes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, mutant = FENCES[kind]
    monkeypatch.setattr(owner, name, mutant)

    assert any(wrong())
