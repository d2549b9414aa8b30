"""A ticket for pages of engines of a group tells of all ranks."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache.errors import TransferError
from asynchicache.ranks.frames import FrameWriter
from asynchicache.ranks.group_work import GroupTransfers
from asynchicache.ranks.leader import RankLeader
from asynchicache.ranks.messages import EndAnswer
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.ticket import Ticket, done_ticket
from asynchicache.types import PoolTransfer


class CopiedHere:
    """Copies of this rank, which end at once."""

    audit = None

    def submit(self, operation, *, done, **_):  # type: ignore[no-untyped-def]
        done(None)
        return done_ticket(2)


def submitted(direction: Direction, ended: list[BaseException | None]) -> tuple[RankLeader, Ticket]:
    leader = RankLeader([1], 7, lambda: 0.0)
    copies = GroupTransfers(leader, CopiedHere(), seconds=1.0, engine_layers=2)  # type: ignore[arg-type]
    operation = CacheOperation(direction, (PoolTransfer("kv", [1], [2]),))
    return leader, copies.submit(operation, done=ended.append)


def answer(leader: RankLeader, error: str) -> None:
    writer: FrameWriter[EndAnswer] = FrameWriter(7)
    writer.add(EndAnswer(1, error))
    leader.feed(1, writer.take())


@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.BACKUP])
def test_it_is_done_when_all_ranks_have_copied(direction: Direction) -> None:
    async def part() -> None:
        ended: list[BaseException | None] = []
        leader, ticket = submitted(direction, ended)
        assert (ticket.done, ended) == (False, [])
        waiting = asyncio.ensure_future(landed(ticket))
        await asyncio.sleep(0)
        assert not waiting.done()

        answer(leader, "")
        await waiting
        assert (ticket.done, ticket.ok, ended) == (True, True, [None])

    asyncio.run(part())


@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.BACKUP])
def test_what_fails_on_another_rank_has_failed(direction: Direction) -> None:
    async def part() -> None:
        ended: list[BaseException | None] = []
        leader, ticket = submitted(direction, ended)
        answer(leader, "no such slot")

        assert (ticket.done, ticket.ok) == (True, False)
        assert len(ended) == 1
        assert ended[0] is not None
        with pytest.raises(TransferError, match="no such slot"):
            await ticket

    asyncio.run(part())


async def landed(ticket: Ticket) -> None:
    await ticket
