"""The leader's log and the answers to it: every operation ends once, with the worst of all ranks."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache.errors import RankError, RankLostError, RankProtocolError
from asynchicache.ranks.frames import FrameWriter
from asynchicache.ranks.group_work import GroupStorage
from asynchicache.ranks.leader import RankLeader
from asynchicache.ranks.messages import (
    EndAnswer,
    FollowerAnswer,
    HeartbeatAnswer,
    LateAnswer,
    OutcomesAnswer,
    pack_outcomes,
)
from asynchicache.storage.limits import BatchResult
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.types import Outcome, PoolTransfer

COPY = CacheOperation(Direction.LOAD, (PoolTransfer("kv", [1, 2], [3, 4]),))


class Rig:
    """A leader of two followers, and what they send."""

    def __init__(self) -> None:
        self.now = 0.0
        self.leader = RankLeader((1, 2), 5, lambda: self.now)
        self.failures: list[RankError] = []
        self.leader.on_failure = self.failures.append
        self._writers: dict[int, FrameWriter[FollowerAnswer]] = {1: FrameWriter(5), 2: FrameWriter(5)}

    def answers(self, rank: int, answer: FollowerAnswer) -> None:
        self._writers[rank].add(answer)
        self.leader.feed(rank, self._writers[rank].take())

    def copy(self, seconds: float = 10.0) -> list[BaseException | None]:
        ended: list[BaseException | None] = []
        self.leader.copy(COPY, seconds, ended.append)
        return ended


def test_a_copy_has_ended_when_all_ranks_say_so() -> None:
    rig = Rig()
    ended = rig.copy()
    rig.answers(2, EndAnswer(1))
    assert (ended, len(rig.leader)) == ([], 1)
    rig.answers(1, EndAnswer(1))
    assert (ended, len(rig.leader)) == ([None], 0)


def test_statistics_tell_how_long_each_rank_takes_and_which_one_is_lost() -> None:
    rig = Rig()
    rig.copy()
    rig.leader.mark()
    rig.now = 0.002
    rig.answers(1, EndAnswer(1))
    found = rig.leader.statistics()
    assert (found.open_operations, found.steps, found.log_bytes) == (1, 1, 0)
    assert (found.ranks[1].lag.count, found.ranks[1].lag.total) == (1, pytest.approx(0.002))
    assert found.ranks[2].lag.count == 0
    sent = rig.leader.take() + rig.leader.take()
    assert rig.leader.statistics().log_bytes == len(sent) > 0

    assert not found.failed
    rig.leader.lost(2, "gone")
    found = rig.leader.statistics()
    assert (found.failed, found.ranks[1].lost, found.ranks[2].lost) == (True, False, True)


def test_a_group_that_is_closed_has_lost_nobody() -> None:
    rig = Rig()
    rig.leader.close()
    found = rig.leader.statistics()
    assert not found.failed
    assert not any(one.lost for one in found.ranks.values())


def test_the_error_of_one_rank_is_the_operations() -> None:
    rig = Rig()
    ended = rig.copy()
    rig.answers(2, EndAnswer(1, "no memory"))
    rig.answers(1, EndAnswer(1))
    assert str(ended[0]) == "rank 2: no memory"
    assert rig.leader.failure is None, "the cache decides what a failed copy means"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (EndAnswer(9), "rank 1: rank 1 answered operation 9, which it does not owe"),
        (LateAnswer(1, safe=True), "operation 1 was not late"),
    ],
)
def test_answers_that_do_not_fit_fail_the_group(answer: FollowerAnswer, words: str) -> None:
    rig = Rig()
    ended = rig.copy()
    rig.answers(1, answer)
    assert isinstance(rig.leader.failure, RankProtocolError)
    assert words in str(rig.leader.failure)
    assert ended == [rig.leader.failure]
    assert rig.failures == [rig.leader.failure]


def test_an_answer_is_given_once() -> None:
    rig = Rig()
    rig.copy()
    rig.answers(1, EndAnswer(1))
    rig.answers(1, EndAnswer(1))
    assert isinstance(rig.leader.failure, RankProtocolError)


@pytest.mark.parametrize(
    ("after", "words"), [(11.0, "rank 2 is lost: it has not answered operation 1"), (4.0, "")]
)
def test_a_deadline_names_the_rank(after: float, words: str) -> None:
    rig = Rig()
    ended = rig.copy(seconds=10.0)
    rig.answers(1, EndAnswer(1))
    rig.now = after
    rig.leader.check(silence=100.0)
    assert bool(words) == isinstance(rig.leader.failure, RankLostError)
    assert words in str(rig.leader.failure)
    assert len(ended) == bool(words)


def test_silence_names_the_rank() -> None:
    rig = Rig()
    rig.now = 5.0
    rig.answers(1, HeartbeatAnswer())
    rig.leader.check(silence=4.0)
    assert "rank 2 is lost: it was silent for 5.0 s" in str(rig.leader.failure)


def test_a_failed_group_sends_nothing_more() -> None:
    rig = Rig()
    rig.leader.lost(2, "gone")
    rig.leader.take()
    rig.leader.mark()
    rig.leader.touch([])
    assert rig.leader.take() == b""
    rig.leader.lost(1, "gone too")
    assert len(rig.failures) == 1


async def merged(rig: Rig, *outcomes: Outcome, late: bool = False) -> BatchResult:
    """What one page of a write is, if it is STORED on the leader and `outcomes` on the followers."""
    storage = GroupStorage(lambda component_id: ("kv",), rig.leader, seconds=1.0)
    asking = asyncio.ensure_future(rig.leader.write([], 1.0))
    await asyncio.sleep(0)
    for rank, outcome in enumerate(outcomes, 1):
        rig.answers(rank, OutcomesAnswer(1, [pack_outcomes([outcome])], late and rank == 2))
    return storage._merged(BatchResult([Outcome.STORED]), 0, await asking)


@pytest.mark.asyncio
async def test_the_worst_outcome_counts() -> None:
    assert (await merged(Rig(), Outcome.EXISTS, Outcome.STORED)).outcomes == [Outcome.STORED]
    assert (await merged(Rig(), Outcome.STORED, Outcome.REJECTED)).outcomes == [Outcome.REJECTED]
    assert (await merged(Rig(), Outcome.TIMEOUT, Outcome.FAILED)).outcomes == [Outcome.TIMEOUT]


@pytest.mark.asyncio
@pytest.mark.parametrize("safe", [True, False])
async def test_slots_that_a_late_engine_of_a_follower_uses_are_kept(safe: bool) -> None:
    rig = Rig()
    batch = await merged(rig, Outcome.STORED, Outcome.TIMEOUT, late=True)
    assert batch.lingering is not None
    await asyncio.sleep(0)
    assert not batch.lingering.done()
    rig.answers(2, LateAnswer(1, safe))
    await asyncio.wait([batch.lingering])
    assert batch.lingering.cancelled() != safe


@pytest.mark.asyncio
async def test_outcomes_for_other_pages_fail_the_group() -> None:
    rig = Rig()
    storage = GroupStorage(lambda component_id: ("kv",), rig.leader, seconds=1.0)
    asking = asyncio.ensure_future(rig.leader.write([], 1.0))
    await asyncio.sleep(0)
    rig.answers(1, OutcomesAnswer(1, [pack_outcomes([Outcome.STORED] * 2)]))
    rig.answers(2, OutcomesAnswer(1, []))
    assert storage._merged(BatchResult([Outcome.STORED]), 0, await asking).outcomes == [Outcome.FAILED]
    assert "rank 1 answered" in str(rig.leader.failure)


@pytest.mark.asyncio
async def test_a_failed_group_has_no_pages() -> None:
    rig = Rig()
    asking = asyncio.ensure_future(rig.leader.read([], 1.0))
    await asyncio.sleep(0)
    rig.leader.lost(1, "gone")
    assert await asking == {}
    assert await rig.leader.read([], 1.0) == {}


def test_steps_are_numbered() -> None:
    rig = Rig()
    assert [rig.leader.mark() for _ in range(3)] == [1, 2, 3]
