"""What a leader's engine says along with a step arrives on every rank, in order, and ends with the group."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine

import pytest

from asynchicache import CacheConfig, RankError, UsageError
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import RankLostError
from asynchicache.ranks.group import MAX_MESSAGE, RankGroup
from asynchicache.ranks.links import receive, send
from asynchicache.ranks.worker import RankWorker
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache_lab.ranks.group import openings, seeded_group

SPECS = [synthetic_spec(4, ("kv",))] * 3
CONFIG = CacheConfig(device_slots={"kv": 8}, host_slots={"kv": 8}, weight_version="a")

Steps = list[tuple[int, bytes]]
Part = Callable[[SeededWorld, RankGroup, list[RankWorker]], Coroutine[object, object, None]]


def in_a_group(part: Part) -> list[asyncio.Task[Steps]]:
    """Run `part` while each follower listens; what they heard."""
    listening: list[asyncio.Task[Steps]] = []

    async def main(world: SeededWorld) -> None:
        storage = [MemoryBackend(MemoryStore()) for _ in SPECS]
        async with seeded_group(world, openings(world, SPECS, CONFIG, storage)) as mirror:
            streams = [worker._follower._device.stream("engine") for worker in mirror.workers]
            listening.extend(
                asyncio.create_task(heard(worker, stream))
                for worker, stream in zip(mirror.workers, streams, strict=True)
            )
            await part(world, mirror.group, mirror.workers)
        await asyncio.wait(listening)

    run_seeded(5, main)
    return listening


async def heard(worker: RankWorker, stream: object) -> Steps:
    steps = []
    async for step, message in worker.steps():
        async with worker.forward(step, stream):  # type: ignore[arg-type]
            steps.append((step, message))
    return steps


def test_they_arrive_with_their_steps_in_order() -> None:
    """A step without a message is not among them: its engine has a channel of its own."""

    async def part(world: SeededWorld, group: RankGroup, workers: list[RankWorker]) -> None:
        assert [group.mark(b"one"), group.mark(), group.mark(b""), group.mark(b"four")] == [1, 2, 3, 4]
        await world.sleep(1)

    for listener in in_a_group(part):
        assert listener.result() == [(1, b"one"), (3, b""), (4, b"four")]


def test_a_message_is_bytes() -> None:
    async def part(world: SeededWorld, group: RankGroup, workers: list[RankWorker]) -> None:
        for wrong in ("text", 5, ["a"]):
            with pytest.raises(UsageError, match=f"must be bytes, not {type(wrong).__name__}"):
                group.mark(wrong)  # type: ignore[arg-type]
        group.mark(bytearray(b"one"))
        await world.sleep(1)
        assert group.failure is None

    for listener in in_a_group(part):
        assert listener.result() == [(1, b"one")]


def test_a_link_that_raises_is_a_lost_rank() -> None:
    """An engine's own: its error is named, and nobody waits for a deadline."""

    async def part(world: SeededWorld, group: RankGroup, workers: list[RankWorker]) -> None:
        link = group._links[1].link
        link.send = broken  # type: ignore[method-assign]
        group.mark(b"one")
        assert str(group.failure) == f"rank 1 is lost: {WHY}"
        with pytest.raises(RankLostError, match=re.escape(WHY)):
            send(link, b"")
        link.receive = broken  # type: ignore[method-assign]
        with pytest.raises(RankLostError, match=re.escape(WHY)):
            await receive(link)

    in_a_group(part)


WHY = "its connection failed: ConnectionResetError('of this test')"


def broken(*_: object) -> None:
    raise ConnectionResetError("of this test")


def test_a_listener_of_a_failed_group_is_told() -> None:
    async def part(world: SeededWorld, group: RankGroup, workers: list[RankWorker]) -> None:
        group.mark(b"one")
        await world.sleep(1)
        workers[0]._follower.fail(RankError("of this test"))
        await world.sleep(1)
        assert "of this test" in str(group.failure)

    first, second = in_a_group(part)
    with pytest.raises(RankError, match="of this test"):
        first.result()
    with pytest.raises(RankError, match=r"rank 0 is lost|this rank has left"):
        second.result()


def test_a_forward_that_fails_fails_the_group() -> None:
    """Its pages may be half written: the leader must not publish them."""

    async def part(world: SeededWorld, group: RankGroup, workers: list[RankWorker]) -> None:
        stream = workers[1]._follower._device.stream("engine")
        step = group.mark()
        with pytest.raises(ZeroDivisionError):
            async with workers[1].forward(step, stream):
                raise ZeroDivisionError("of this test")
        await world.sleep(1)
        assert f"rank 2 failed: forward {step} failed: ZeroDivisionError('of this test')" in str(
            group.failure
        )

    in_a_group(part)


def test_a_message_has_a_greatest_length() -> None:
    async def part(world: SeededWorld, group: RankGroup, workers: list[RankWorker]) -> None:
        assert group.mark(bytes(MAX_MESSAGE)) == 1
        with pytest.raises(UsageError, match=f"{MAX_MESSAGE + 1} bytes is longer than {MAX_MESSAGE}"):
            group.mark(bytes(MAX_MESSAGE + 1))
        assert group.mark(b"two") == 2, "no step was marked by what was refused"
        await world.sleep(10)

    for listener in in_a_group(part):
        assert [(step, len(message)) for step, message in listener.result()] == [(1, MAX_MESSAGE), (2, 3)]
