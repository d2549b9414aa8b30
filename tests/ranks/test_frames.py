"""Frames keep the order of messages: what is damaged, cut, lost, repeated or foreign is refused."""

from __future__ import annotations

import random

import pytest

from asynchicache.errors import RankProtocolError
from asynchicache.hashing import placed_pages
from asynchicache.ranks.frames import MAX_FRAME, FrameReader, FrameWriter
from asynchicache.ranks.messages import (
    CopyEntry,
    FollowerAnswer,
    LogEntry,
    MarkEntry,
    TransferRuns,
    pack_outcomes,
    pack_pages,
    pack_slots,
    unpack_outcomes,
    unpack_pages,
    unpack_slots,
)
from asynchicache.types import Direction, Outcome


def frames(count: int, incarnation: int = 7) -> list[bytes]:
    writer: FrameWriter[LogEntry] = FrameWriter(incarnation)
    found = []
    for step in range(count):
        writer.add(MarkEntry(step))
        writer.add(CopyEntry(step, Direction.LOAD, [TransferRuns("kv", [step, 2], [5, 2])]))
        found.append(writer.take())
    return found


def read(data: bytes, incarnation: int = 7) -> list[LogEntry]:
    reader: FrameReader[LogEntry] = FrameReader(incarnation, LogEntry)
    return list(reader.feed(data))


def test_messages_arrive_in_any_portions() -> None:
    data, chance = b"".join(frames(20)), random.Random(1)
    reader: FrameReader[LogEntry] = FrameReader(7, LogEntry)
    found: list[LogEntry] = []
    while data:
        cut = chance.randrange(1, 40)
        found += reader.feed(data[:cut])
        data = data[cut:]
    assert [one.step for one in found if isinstance(one, MarkEntry)] == list(range(20))
    assert len(found) == 40


@pytest.mark.parametrize("what", ["lost", "repeated", "overtaken", "damaged", "of another group"])
def test_a_gap_is_refused(what: str) -> None:
    parts = frames(4)
    match what:
        case "lost":
            del parts[1]
        case "repeated":
            parts.insert(1, parts[1])
        case "overtaken":
            parts[1], parts[2] = parts[2], parts[1]
        case "damaged":
            parts[1] = parts[1][:-1] + bytes([parts[1][-1] ^ 1])
    with pytest.raises(RankProtocolError, match="damaged, missing, repeated, or of another group"):
        read(b"".join(parts), 8 if what == "of another group" else 7)


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(RankProtocolError, match=f"longer than {MAX_FRAME}"):
        read((MAX_FRAME + 1).to_bytes(4, "little") + bytes(4))


def test_messages_of_another_kind_are_refused() -> None:
    with pytest.raises(RankProtocolError, match="no valid messages"):
        list(FrameReader[FollowerAnswer](7, FollowerAnswer).feed(frames(1)[0]))


def test_a_batch_of_many_bytes_becomes_several_frames() -> None:
    writer: FrameWriter[LogEntry] = FrameWriter(7)
    for _ in range(3):
        writer.add(CopyEntry(1, Direction.LOAD, [TransferRuns("k" * (MAX_FRAME // 3), [], [])]))
    assert len(read(writer.take())) == 3


@pytest.mark.parametrize("slots", [[], [3], [1, 2, 3], [3, 2, 1], [1, 2, 9, 10, 11, 4]])
def test_slots_come_back(slots: list[int]) -> None:
    assert unpack_slots(pack_slots(slots)) == slots


@pytest.mark.parametrize("runs", [[1], [1, 0], [-1, 2]])
def test_runs_that_are_none_are_refused(runs: list[int]) -> None:
    with pytest.raises(RankProtocolError, match="pairs of a slot and a positive length"):
        unpack_slots(runs)


def test_pages_and_outcomes_are_checked() -> None:
    pages = placed_pages([bytes([page]) * 40 for page in range(130)], range(130))
    assert unpack_pages(pack_pages(pages)) == pages
    assert unpack_outcomes(pack_outcomes(Outcome)) == list(Outcome)
    with pytest.raises(RankProtocolError, match="stands for no outcome"):
        unpack_outcomes(b"\xff")
    with pytest.raises(RankProtocolError, match="are not pages"):
        unpack_pages(bytes(33))
