"""The index of a file's slots against a simple model: no slot has two owners, none is lost."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from asynchicache.backends.file.index import PageIndex, StoredPage

DIGESTS = st.integers(0, 3).map(lambda number: bytes([number]) * 32)


class IndexMachine(RuleBasedStateMachine):
    """Writers take slots and commit or give up; readers pin; pages come, are evicted and damaged."""

    taken = Bundle("taken")
    pinned = Bundle("pinned")

    def __init__(self) -> None:
        super().__init__()
        self.index = PageIndex()
        self.pages: dict[bytes, int] = {}
        self.writing: set[int] = set()
        self.reading: list[int] = []
        self.checksums: dict[int, bytes] = {}
        self.stored = 0

    @rule(count=st.integers(1, 4))
    def grow(self, count: int) -> None:
        self.index.grow(count)

    @rule(target=taken, count=st.integers(1, 5))
    def take(self, count: int) -> object:
        free = self.index.free
        slots = self.index.take(count)

        assert len(slots) == min(free, count)
        assert slots == sorted(slots)
        assert not set(slots) & (self.writing | set(self.reading) | set(self.pages.values()))
        self.writing |= set(slots)
        return multiple(*slots)

    @rule(target=taken, count=st.integers(-1, 3), keep=st.frozensets(DIGESTS))
    def evict(self, count: int, keep: frozenset[bytes]) -> object:
        idle = [
            digest
            for digest in self.index.digests()
            if self.pages[digest] not in self.reading and digest not in keep
        ]
        self.index.take_removed()
        slots = self.index.evict(count, keep)

        assert slots == [self.pages[digest] for digest in idle[: max(0, count)]]
        assert self.index.take_removed() == idle[: max(0, count)]
        self.pages = {digest: slot for digest, slot in self.pages.items() if slot not in slots}
        self.writing |= set(slots)
        return multiple(*slots)

    @rule(target=taken)
    def clear(self) -> object:
        slots = self.index.clear()

        assert sorted(slots) == sorted(self.pages.values())
        self.pages.clear()
        self.writing |= set(slots)
        return multiple(*slots)

    @rule(count=st.integers(1, 3))
    def truncate(self, count: int) -> None:
        slots = max(0, self.index.slots - count)
        busy = any(slot >= slots for slot in self.writing | set(self.reading))

        assert self.index.truncate(slots) == (not busy)
        if not busy:
            self.pages = {digest: slot for digest, slot in self.pages.items() if slot < slots}

    @rule(slot=consumes(taken), digest=DIGESTS)
    def add(self, slot: int, digest: bytes) -> None:
        self.stored += 1
        page = StoredPage(digest, slot, self.stored.to_bytes(8))
        held = self.index.add(page)
        assert held == (digest not in self.pages)
        if held:
            self.pages[digest] = slot
            self.checksums[slot] = page.checksum
        else:
            self.index.release(slot)
        self.writing.remove(slot)

    @rule(slot=consumes(taken))
    def give_up(self, slot: int) -> None:
        self.index.release(slot)
        self.writing.remove(slot)

    @rule(target=pinned, digest=DIGESTS)
    def pin(self, digest: bytes) -> object:
        page, slot = self.index.pin(digest), self.pages.get(digest)
        if slot is None:
            assert page is None
            return multiple()
        assert page == (digest, slot, self.checksums[slot])
        self.reading.append(slot)
        return (digest, slot)

    @rule(pin=consumes(pinned))
    def unpin(self, pin: tuple[bytes, int]) -> None:
        self.index.unpin(pin[1])
        self.reading.remove(pin[1])

    @rule(pin=consumes(pinned))
    def find_damaged(self, pin: tuple[bytes, int]) -> None:
        digest, slot = pin
        assert self.index.forget(digest, slot) == (self.pages.get(digest) == slot)
        if self.pages.get(digest) == slot:
            del self.pages[digest]
            self.index.release(slot)
        self.unpin(pin)

    @rule(digest=DIGESTS)
    def delete(self, digest: bytes) -> None:
        slot = self.index.remove(digest)
        assert slot == self.pages.pop(digest, None)
        if slot is not None:
            self.index.release(slot)

    @rule(digest=DIGESTS)
    def touch(self, digest: bytes) -> None:
        assert self.index.touch(digest) == (digest in self.pages)
        assert digest not in self.pages or self.index.digests()[-1] == digest

    @rule(digests=st.lists(DIGESTS, unique=True))
    def demote(self, digests: list[bytes]) -> None:
        self.index.demote(digests)
        there = [digest for digest in digests if digest in self.pages]
        assert self.index.digests()[: len(there)] == there

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        held = (
            self.writing | set(self.reading) | set(self.pages.values())
        )  # a slot being read may be all three

        assert self.index.free == self.index.slots - len(held)
        assert len(self.index) == len(self.pages)


TestIndex = IndexMachine.TestCase


def page(name: bytes, slot: int) -> StoredPage:
    return StoredPage(name, slot, name * 8)


def test_a_scan_fills_it() -> None:
    index, pages = PageIndex(), [page(b"a", 4), page(b"b", 3)]
    index.load(pages, 6)

    assert index.in_order() == pages
    assert not index.order_changed
    assert [index.pin(b"a"), index.pin(b"b")] == pages
    assert index.order_changed
    assert index.take(9) == [0, 1, 2, 5]


def test_the_least_recently_used_page_goes_first() -> None:
    index = PageIndex()
    index.load([page(b"a", 0), page(b"b", 1), page(b"c", 2), page(b"d", 3)], 4)
    index.pin(b"a")
    index.touch(b"b")

    assert index.evict(2) == [2, 3]
    assert index.evict(2) == [1]
    assert b"a" in index
    assert index.evicted == 3


def test_a_slot_that_is_read_is_free_only_after_the_last_reader() -> None:
    index = PageIndex()
    index.load([page(b"a", 0)], 1)
    index.pin(b"a")
    index.pin(b"a")
    index.release(index.remove(b"a") or 0)

    assert index.take(1) == []
    index.unpin(0)
    assert index.take(1) == []
    index.unpin(0)
    assert index.take(1) == [0]
