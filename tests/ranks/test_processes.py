"""Ranks as processes over a Unix socket: served alike, killed, stopped, and refused."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from asynchicache import HybridCache
from asynchicache.errors import CacheError, ConfigError, RankError, RankLostError, TransferError
from asynchicache.integrations.metrics import FAMILIES
from asynchicache.ranks.group import RankGroup
from asynchicache.ranks.options import RankLimits
from asynchicache.ranks.worker import RankWorker
from ranks.processes import SPEC, TOKEN, ProcessGroup, config, processes
from soaking import first

METRICS = {family.name: family for family in FAMILIES if family.name.startswith("rank")}
PROMPT = list(range(40))

pytestmark = pytest.mark.asyncio


async def lost(group: ProcessGroup) -> str:
    while group.group.failure is None:  # noqa: ASYNC110  a bound is the test's own timeout
        await asyncio.sleep(0.01)
    assert isinstance(group.group.failure, RankLostError)
    return str(group.group.failure)


async def test_followers_serve_what_the_leader_decides(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as group:
        assert await group.serve(PROMPT) == 0
        assert await group.serve([*PROMPT, 1, 2, 3]) == 40
        assert sorted(group.group.lag_seconds()) == [1, 2]
        for follower in group.followers:
            assert follower.stdin is not None
            follower.stdin.close()
        assert [await follower.wait() for follower in group.followers] == [0, 0]


async def test_a_killed_rank_makes_the_group_cold(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as group:
        await group.serve(PROMPT)
        await group.cache.drain()  # each rank has answered once: its lag is counted
        group.followers[1].send_signal(signal.SIGKILL)
        assert await lost(group) == "rank 2 is lost: its connection ended"
        found = group.cache.statistics().group
        assert found is not None
        assert [rank for rank, one in found.ranks.items() if one.lost] == [2]
        assert found.failed
        values = {name: dict(family.samples(group.cache.statistics())) for name, family in METRICS.items()}
        assert values["rank_lost"] == {("1",): 0, ("2",): 1}
        assert values["rank_lag_seconds"][("1",)].count > 0
        assert values["ranks_log_bytes_total"][()] > 0
        for _ in range(3):
            assert await group.serve(PROMPT) == 0, "no page of a dead group is served"
        await group.cache.drain()


async def test_engines_with_memory_of_their_own_serve_alike(tmp_path: Path) -> None:
    """Their pages are used again for other prompts: what is restored comes from the host of each rank."""
    async with processes(tmp_path, 3, paged=True) as group:
        for seed in range(4):
            assert await group.serve_paged([seed, *PROMPT]) == 0
        for seed in range(4):
            assert await group.serve_paged([seed, *PROMPT, 1, 2, 3]) == 40
        assert await group.cache.verify_ranks() == []


@pytest.mark.parametrize("delay", first(2, [0.002, 0.05, 0.0, 0.01]))
async def test_a_killed_rank_ends_every_copy_of_engines(tmp_path: Path, delay: float) -> None:
    """At any moment: a ticket ends, pages may be used again, and no page of the dead group is served."""
    async with processes(tmp_path, 3, paged=True) as group:
        await group.serve_paged(PROMPT)

        async def kill() -> None:
            await asyncio.sleep(delay)  # a moment of the run, not a wait for something
            group.followers[0].send_signal(signal.SIGKILL)

        killing = asyncio.create_task(kill())
        async with asyncio.timeout(60):
            for seed in range(200):
                try:
                    await group.serve_paged([seed, *PROMPT])
                except CacheError as error:
                    assert "rank 1" in str(error) or "rank 1" in str(error.__cause__)  # noqa: PT017
                if group.group.failure is not None:
                    break
            await killing
            assert await lost(group) == "rank 1 is lost: its connection ended"
            for _ in range(3):
                assert await group.serve_paged(PROMPT) == 0
            await group.cache.drain()
        assert group.cache.verify() == []


async def test_a_stopped_rank_of_engines_is_lost_after_its_deadline(tmp_path: Path) -> None:
    """Tickets wait for all ranks, so the deadline is what ends them."""
    async with processes(tmp_path, 2, paged=True, heartbeat=0.1, silence=1.0) as group:
        await group.serve_paged(PROMPT)
        group.followers[0].send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60), group.cache.request([*PROMPT, 1]) as request:
            with pytest.raises(TransferError, match="rank 1"):
                await request.load(into={"kv": list(range(10))})
        assert "rank 1 is lost: it was silent for" in await lost(group)
        group.followers[0].send_signal(signal.SIGCONT)


async def test_a_stopped_rank_is_lost_after_its_deadline(tmp_path: Path) -> None:
    async with processes(tmp_path, 2, heartbeat=0.1, silence=1.0) as group:
        group.followers[0].send_signal(signal.SIGSTOP)
        assert "rank 1 is lost: it was silent for" in await lost(group)
        assert await group.serve(PROMPT) == 0
        group.followers[0].send_signal(signal.SIGCONT)


async def test_a_follower_whose_leader_is_gone_says_so(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'group'}"
    follower = asyncio.create_task(_follow(address))
    async with RankGroup.listen(address, TOKEN) as group, HybridCache.open(SPEC, config(0, 2), group=group):
        worker, stop = await follower
        for hand in group._links.values():
            await hand.link.aclose()
        await worker.ended()
        assert str(worker.failure) == "rank 0 is lost: its connection ended"
        with pytest.raises(RankError, match="the group has failed: rank 0 is lost"):
            await worker.forward(1, _stream(worker)).__aenter__()
        stop.set()


async def _follow(address: str) -> tuple[RankWorker, asyncio.Event]:
    joined: asyncio.Future[RankWorker] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def run() -> None:
        async with RankWorker.join(SPEC, config(1, 2), address, TOKEN) as worker:
            joined.set_result(worker)
            await stop.wait()

    task = asyncio.create_task(run())
    task.add_done_callback(lambda done: done.exception())
    return await joined, stop


def _stream(worker: RankWorker):  # type: ignore[no-untyped-def]
    return worker._follower._device.stream("compute")


async def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    async with RankGroup.listen(f"unix:{tmp_path / 'group'}", TOKEN, RankLimits(joining=0.2)) as group:
        with pytest.raises(RankError, match=r"ranks \[1, 2\] did not join within 0.2 s"):
            async with HybridCache.open(SPEC, config(0, 3), group=group):
                pass


async def test_a_wrong_token_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'group'}"

    async def guess() -> None:
        with pytest.raises(RankError, match="the leader refuses rank 1: the token is wrong"):
            async with RankWorker.join(SPEC, config(1, 2), address, "a guess"):
                pass

    async with RankGroup.listen(address, TOKEN) as group:
        guessing = asyncio.create_task(guess())
        follower = asyncio.create_task(_after(guessing, address))
        async with HybridCache.open(SPEC, config(0, 2), group=group):
            _, stop = await follower
            stop.set()


async def _after(first: asyncio.Task[None], address: str) -> tuple[RankWorker, asyncio.Event]:
    await first
    return await _follow(address)


async def test_a_late_rank_is_told_so(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'group'}"
    follower = asyncio.create_task(_follow(address))
    async with RankGroup.listen(address, TOKEN) as group, HybridCache.open(SPEC, config(0, 2), group=group):
        _, stop = await follower
        with pytest.raises(RankError, match="rank 1 is late: the group is complete"):
            async with RankWorker.join(SPEC, config(1, 2), address, TOKEN):
                pass
        stop.set()


async def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    async with RankGroup.listen("127.0.0.1:0", TOKEN):
        pass
    async with RankGroup.listen(f"unix:{tmp_path / 'group'}", TOKEN):
        with pytest.raises(ConfigError, match="rank group cannot listen at unix:"):
            async with RankGroup.listen(f"unix:{tmp_path / 'group'}", TOKEN):
                pass


@pytest.mark.parametrize("address", ["", "unix:", "host", "host:port", ":1", "host:70000"])
async def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be unix:PATH or HOST:PORT"):
        async with RankGroup.listen(address, TOKEN):
            pass


async def test_a_socket_that_a_killed_leader_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "group"
    server = await asyncio.start_unix_server(lambda reader, writer: None, str(path))
    server.close()
    async with RankGroup.listen(f"unix:{path}", TOKEN):
        assert path.stat().st_mode & 0o777 == 0o600
