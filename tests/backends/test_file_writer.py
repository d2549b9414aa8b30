"""What several calls have ready is written by one thread, and made durable by one barrier."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from asynchicache.backends.file import entries
from asynchicache.backends.file import writer as writer_module
from asynchicache.backends.file.commits import Commits
from asynchicache.backends.file.index import StoredPage
from asynchicache.backends.file.segments import ENTRY_BYTES, BlockFile, Segments
from asynchicache.backends.file.writer import GroupWriter, PageMove, SlotRun, WriteBatch
from storage.file_stores import SLOT_BYTES


class Crank:
    """A thread that runs when the test says so.

    Attributes:
        calls: that were submitted.
        submitted: released with each of them.
    """

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        self.submitted = threading.Semaphore(0)

    def submit(self, call: Callable[[], object]) -> None:
        self.calls.append(call)
        self.submitted.release()

    def close(self) -> None:
        assert not self.calls

    def turn(self) -> None:
        self.calls.pop(0)()


class Pool:
    """Files of one pool with slots, and their writer.

    Attributes:
        log: the first slot of each write, and how many; each barrier.
        most: slots that one write takes; None: more than one are refused.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments = Segments(folder, SLOT_BYTES, b"kv", read_only=False, direct=True)
        self.segments.grow(8, 8)
        monkeypatch.setattr(self.segments, "is_long", lambda count: True)
        self.commits = Commits(self.segments, 1)
        self.crank = Crank()
        self.log: list[object] = []
        self.most: int | None = 100
        self.written = threading.Event()
        self.writer = GroupWriter(self.segments, self.commits)
        self.writer._worker = self.crank
        self._threads = ThreadPoolExecutor(4)
        monkeypatch.setattr(self.segments, "write", partial(self._write, self.segments.write))
        monkeypatch.setattr(os, "fdatasync", partial(self._sync, os.fdatasync))

    def put(
        self,
        slot: int,
        move: Callable[[SlotRun], list[PageMove]] | None = None,
        seal: Callable[[], dict[int, StoredPage]] | None = None,
    ) -> Future[None]:
        """Let a thread write a page, and return once that is in the queue."""
        memory = memoryview(mmap.mmap(-1, SLOT_BYTES))
        memory[:] = bytes([slot]) * SLOT_BYTES
        run = SlotRun([PageMove(slot, 0)], [memory])
        page = StoredPage(bytes([slot]) * 40, slot, bytes(8))
        batch = WriteBatch(
            move or self._move, seal or (lambda: {slot: page}), [run], stamp=self.commits.reserve(1)
        )
        ended = self._threads.submit(self.writer.write, batch)
        assert self.crank.submitted.acquire()
        return ended

    def held(self) -> bytes:
        """The first byte of each slot that has an entry on the disk."""
        memory = memoryview(mmap.mmap(-1, SLOT_BYTES))
        found = bytearray()
        for slot in sorted(entry.slot for entry in entries.load_entries(self.segments).pages):
            self.segments.read(slot, [memory])
            found.append(memory[0])
        return bytes(found)

    def turn_in_a_thread(self) -> Future[None]:
        return self._threads.submit(self.crank.turn)

    def run_dry(self) -> None:
        """Let the writer do whatever it was asked for."""
        while self.crank.calls:
            self.crank.turn()

    def _move(self, run: SlotRun) -> list[PageMove]:
        self.segments.write(run.slot, run.views)
        return list(run.moves)

    def _write(self, real: Callable[..., int], slot: int, views: list[memoryview]) -> int:
        self.log.append((slot, len(views)))
        if self.most is None and len(views) > 1:
            raise OSError(5, "too much")
        try:
            return real(slot, views[: self.most or 1])
        finally:
            self.written.set()

    def _sync(self, real: Callable[[int], None], descriptor: int) -> None:
        self.log.append("barrier")
        real(descriptor)

    def close(self) -> None:
        self._threads.shutdown()
        self.writer.close()
        self.segments.close()


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    pool = Pool(tmp_path, monkeypatch)
    yield pool
    pool.close()


def test_what_has_queued_up_shares_a_barrier_and_neighbours_a_write(pool: Pool) -> None:
    calls = [pool.put(slot) for slot in (2, 4, 1)]
    assert not any(call.done() for call in calls)

    pool.crank.turn()
    for call in calls:
        call.result()
    assert pool.log == [(1, 2), (4, 1), "barrier"]
    assert pool.held() == b"\1\2\4"

    last = pool.put(3)
    pool.run_dry()  # three of the calls find nothing to do, or the last page
    last.result()
    assert pool.log == [(1, 2), (4, 1), "barrier", (3, 1), "barrier"]
    assert pool.held() == b"\1\2\3\4"


@pytest.mark.parametrize(("most", "groups"), [(2, [(1, 2), (3, 1)]), (0, [(1, 1), (2, 1), (3, 1)])])
def test_one_turn_takes_what_fits_and_one_call_at_least(
    pool: Pool, most: int, groups: list[tuple[int, int]]
) -> None:
    pool.segments.most_slots = most
    calls = [pool.put(slot) for slot in (1, 2, 3)]
    for number in range(len(groups)):
        pool.crank.turn()
        assert pool.log == [step for group in groups[: number + 1] for step in (group, "barrier")]
    for call in calls:
        call.result()
    pool.run_dry()
    assert pool.held() == b"\1\2\3"


def test_entries_of_neighbours_are_one_write_whichever_call_they_are_of(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []
    write = pool.segments.write_entries
    monkeypatch.setattr(
        pool.segments,
        "write_entries",
        lambda slot, data: written.append((slot, len(data) // ENTRY_BYTES)) or write(slot, data),
    )
    calls = [pool.put(slot) for slot in (2, 4, 1)]
    pool.run_dry()
    for call in calls:
        call.result()
    assert written == [(1, 2), (4, 1)]


def test_entries_of_two_files_are_two_writes() -> None:
    stored = {slot: bytes([slot]) * ENTRY_BYTES for slot in (65, 63, 64, 7)}
    assert entries.entry_blocks(stored, 64) == [
        (7, stored[7]),
        (63, stored[63]),
        (64, stored[64] + stored[65]),
    ]


@pytest.mark.parametrize("most", [1, None])
def test_neighbours_that_do_not_go_together_go_one_by_one(pool: Pool, most: int | None) -> None:
    pool.most = most
    calls = [pool.put(slot) for slot in (1, 2)]
    pool.run_dry()
    for call in calls:
        call.result()
    assert pool.log == [(1, 2), (1, 1), (2, 1), "barrier"]
    assert pool.held() == b"\1\2"


def test_a_page_that_was_not_written_is_not_named(pool: Pool) -> None:
    calls = [pool.put(1, lambda run: []), pool.put(3)]
    pool.run_dry()
    for call in calls:
        call.result()
    assert pool.held() == b"\3"


def test_a_call_that_raises_fails_alone(pool: Pool) -> None:
    def fail(run: SlotRun) -> list[PageMove]:
        raise ZeroDivisionError

    calls = [pool.put(1), pool.put(3, fail), pool.put(5)]
    pool.run_dry()
    with pytest.raises(ZeroDivisionError):
        calls[1].result()
    for call in (calls[0], calls[2]):
        call.result()
    assert pool.log == [(1, 1), (5, 1), "barrier"]
    assert pool.held() == b"\1\5"


def test_calls_end_whatever_becomes_of_the_thread(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    calls = [pool.put(slot) for slot in (1, 2)]
    with monkeypatch.context() as broken:
        broken.setattr(writer_module, "merge_runs", fail)
        pool.crank.turn()
    for call in calls:
        with pytest.raises(ZeroDivisionError):
            call.result()
    last = pool.put(3)
    pool.run_dry()
    last.result()
    assert pool.held() == b"\3"


def test_a_call_that_no_thread_was_told_of_is_not_written(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(call: Callable[[], object]) -> None:
        pool.crank.submitted.release()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(pool.crank, "submit", refuse)
        refused = pool.put(1)
    with pytest.raises(RuntimeError, match="new thread"):
        refused.result()
    call = pool.put(2)
    pool.run_dry()
    call.result()
    assert pool.log == [(2, 1), "barrier"]


def test_a_barrier_that_fails_fails_all_of_its_calls_and_those_after(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(5, "lost")

    calls = [pool.put(1), pool.put(2)]
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", refuse)
        pool.crank.turn()
    calls.append(pool.put(3))
    pool.run_dry()
    for call in calls:
        with pytest.raises(OSError, match=r"lost|failed before"):
            call.result()
    assert pool.commits.broken


def test_pages_are_written_before_they_are_sealed_and_named_after(pool: Pool) -> None:
    sealing, go_on = threading.Event(), threading.Event()

    def seal() -> dict[int, StoredPage]:
        sealing.set()
        assert go_on.wait(60)
        return {1: StoredPage(b"1" * 40, 1, bytes(8))}

    call = pool.put(1, seal=seal)
    turning = pool.turn_in_a_thread()
    sealing.wait()
    pool.written.wait()
    assert pool.log == [(1, 1)]
    go_on.set()
    for one in (call, turning):
        one.result()
    assert pool.log == [(1, 1), "barrier"]
    assert pool.held() == b"\1"


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_call_whose_pages_cannot_be_sealed_fails_alone_and_names_nothing(
    pool: Pool, error: type[BaseException]
) -> None:
    def fail() -> dict[int, StoredPage]:
        raise error

    calls = [pool.put(1, seal=fail), pool.put(2)]
    pool.run_dry()
    with pytest.raises(error):
        calls[0].result()
    calls[1].result()
    assert pool.held() == b"\2"


def losing_once(lost: list[int]) -> Callable[[int], None]:
    """Tells each descriptor that is in `lost` once of a write that was lost."""

    def sync(descriptor: int) -> None:
        if descriptor in lost:
            lost.remove(descriptor)
            raise OSError(5, "lost")

    return sync


def test_barriers_that_share_a_file_that_is_open_are_all_told_of_a_lost_write(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: BlockFile) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(BlockFile, "open_again", refuse)
    (segment,) = pool.segments._files
    with pool.segments.barrier([1]) as first, pool.segments.barrier([2]) as second:
        first()
        assert pool.log == ["barrier"]
        monkeypatch.setattr(os, "fdatasync", losing_once([segment._entries.fileno]))
        for barrier in (first, second, first):
            with pytest.raises(OSError, match=r"lost|failed before"):
                barrier()


def test_a_barrier_has_the_file_open_for_itself(pool: Pool) -> None:
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with pool.segments.barrier([1, 2]) as sync:
        assert len(list(Path("/proc/self/fd").iterdir())) == opened + 1
        sync()
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    assert pool.log == ["barrier"]
