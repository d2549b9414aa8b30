"""How long a request waits for storage, and what is remembered of the answers that it was given."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asynchicache.controller.prefetcher import _KnownPresence
from asynchicache.controller.storage_pools import StoragePools, StoredPool, linger, worst_outcomes
from asynchicache.errors import ClosedError, ConfigError
from asynchicache.hashing import placed_pages
from asynchicache.planner.options import PrefetchOptions
from asynchicache.storage.limits import BatchResult
from asynchicache.types import Outcome, PrefetchPolicy


@pytest.mark.parametrize(
    ("options", "tokens", "seconds"),
    [
        ({}, 0, 2.0),
        ({}, 1024, 2.1),
        ({}, 10 * 1024, 3.0),
        ({}, 10_000_000, 30.0),
        ({"base_seconds": 1.0, "seconds_per_ki_token": 2.0}, 512, 2.0),
        ({"max_seconds": 0.5}, 0, 0.5),
        ({"policy": PrefetchPolicy.WAIT_COMPLETE}, 0, 30.0),
        ({"policy": PrefetchPolicy.WAIT_COMPLETE, "max_seconds": 7.0}, 1024, 7.0),
        ({"policy": PrefetchPolicy.BEST_EFFORT}, 1024, 2.1),
        ({"base_seconds": 0, "seconds_per_ki_token": 0}, 5000, 0),
        ({"max_seconds": 0}, 5000, 0),
    ],
)
def test_a_deadline_grows_with_the_tokens_up_to_its_bound(options: dict, tokens: int, seconds: float) -> None:
    assert PrefetchOptions(**options).deadline(tokens) == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["base_seconds", "seconds_per_ki_token", "max_seconds"])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_seconds_below_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"prefetch {name}"):
        PrefetchOptions(**{name: value})


def test_a_policy_is_one_of_its_kinds() -> None:
    with pytest.raises(ConfigError, match="prefetch policy 'later' must be one of 'best_effort', "):
        PrefetchOptions(policy="later")  # type: ignore[arg-type]


# Answers


def test_answers_are_put_together_by_page() -> None:
    known = _KnownPresence(["kv", "mamba"])
    known.learn(0, range(2, 4), b"\1\0")
    assert known.flags == {0: b"\0\0\1\0", 1: b""}
    known.learn(0, range(4, 6), b"\1\1")
    assert known.flags[0] == b"\0\0\1\0\1\1"
    known.learn(0, range(1, 3), b"\1\0")
    assert known.flags[0] == b"\0\1\0\0\1\1"


@pytest.mark.parametrize(
    ("flags", "here", "reach"),
    [
        (b"", 0, 0),
        (b"", 3, 3),
        (b"\0\0\1\1\0\1", 2, 4),
        (b"\0\0\1\1", 2, 4),
        (b"\0\0\0\1", 2, 2),
        (b"\1\0", 4, 4),
    ],
)
def test_full_pages_reach_as_far_as_there_is_no_gap(flags: bytes, here: int, reach: int) -> None:
    known = _KnownPresence(["kv"])
    if flags:
        known.learn(0, range(len(flags)), flags)
    assert known.reach(here) == reach


# Calls in slices


SLICES = 4096


async def in_slices(call: Any, digests: list[bytes], slots: Any) -> BatchResult:
    """A read of one pool, whose guarded engine answers with `call`."""
    pool = StoredPool(SimpleNamespace(get=call, object_pages=1), SimpleNamespace(key=lambda digest: digest))  # type: ignore[arg-type]
    pools = StoragePools(lambda component_id: ())
    pools._attachment = SimpleNamespace(pools={"kv": pool})  # type: ignore[assignment]
    return await pools.move("kv", placed_pages(digests, range(len(digests))), slots, put=False)


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [1, SLICES, SLICES + 1, 2 * SLICES, 2 * SLICES + 5])
async def test_a_long_call_is_made_in_slices_one_after_the_other(count: int) -> None:
    asked: list[tuple[int, int]] = []
    running = 0

    async def call(digests, slots) -> BatchResult:
        nonlocal running
        running += 1
        assert running == 1
        asked.append((digests[0][0], slots[0]))
        assert len(digests) == len(slots) <= SLICES
        await asyncio.sleep(0)
        running -= 1
        return BatchResult([Outcome.HIT if slot % 2 else Outcome.MISS for slot in slots])

    digests = [bytes([page // SLICES]) for page in range(count)]
    batch = await in_slices(call, digests, range(10, 10 + count))

    assert asked == [(number, 10 + number * SLICES) for number in range(-(-count // SLICES))]
    assert batch.outcomes == [Outcome.HIT if slot % 2 else Outcome.MISS for slot in range(10, 10 + count)]
    assert batch.lingering is None


@pytest.mark.asyncio
async def test_a_slice_that_lingers_is_waited_for_though_storage_was_detached_during_the_next() -> None:
    """The engine may still write to its slots: they must not be given to others."""
    late = asyncio.get_running_loop().create_future()
    answers = iter([BatchResult([Outcome.TIMEOUT] * SLICES, late)])

    async def call(digests, slots) -> BatchResult:
        for answer in answers:
            return answer
        raise ClosedError("detached")

    batch = await in_slices(call, [b"x"] * (SLICES + 3), range(SLICES + 3))

    assert batch.outcomes == [Outcome.TIMEOUT] * SLICES + [Outcome.FAILED] * 3
    assert batch.lingering is not None
    await asyncio.sleep(0)
    assert not batch.lingering.done()
    late.set_result(None)
    await batch.lingering


@pytest.mark.asyncio
@pytest.mark.parametrize("safe", [True, False])
async def test_slices_linger_until_the_last_of_them_has_ended(safe: bool) -> None:
    late = [asyncio.get_running_loop().create_future() for _ in range(2)]
    calls = iter([late[0], None, late[1]])

    async def call(digests, slots) -> BatchResult:
        return BatchResult([Outcome.TIMEOUT] * len(digests), next(calls))

    batch = await in_slices(call, [b""] * (3 * SLICES), range(3 * SLICES))
    assert batch.lingering is not None
    waiting = asyncio.create_task(linger([batch]))
    late[0].set_result(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    if safe:
        late[1].set_result(None)
    else:
        late[1].cancel()
    assert await waiting is safe


@pytest.mark.asyncio
async def test_nothing_lingers_where_nothing_is_late() -> None:
    assert await linger([])
    assert await linger([BatchResult([Outcome.HIT])])


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Outcome.HIT, Outcome.HIT, Outcome.HIT),
        (Outcome.HIT, Outcome.MISS, Outcome.MISS),
        (Outcome.MISS, Outcome.REJECTED, Outcome.REJECTED),
        (Outcome.REJECTED, Outcome.FAILED, Outcome.FAILED),
        (Outcome.FAILED, Outcome.CORRUPT, Outcome.CORRUPT),
        (Outcome.CORRUPT, Outcome.TIMEOUT, Outcome.TIMEOUT),
    ],
)
def test_of_pools_that_share_a_slot_the_worst_counts(one: Outcome, other: Outcome, both: Outcome) -> None:
    assert worst_outcomes([[one], [other]]) == worst_outcomes([[other], [one]]) == [both]
    assert worst_outcomes([[one, other]]) == [one, other]
