"""Run turns through a planner alone, with a stamp in place of each page's bytes.

The tree, the allocators, eviction and all decisions are the library's. The controller's work (copies, storage
calls, waiting) happens immediately and in order. So the same turns give the same figures on every machine, at
thousands of turns per second.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from asynchicache.hashing import DIGEST_BYTES
from asynchicache.planner.actions import Copy, StorageWrite
from asynchicache.planner.planner import Planner
from asynchicache.planner.readings import StorageRead
from asynchicache.planner.request_state import RequestState
from asynchicache.replay.instant import InstantCache
from asynchicache.tree.node import FULL, Node
from asynchicache.types import Direction, Outcome, Tier
from asynchicache_lab.bench.synthetic import Transcript

WHOLE = 1 << 40
"""Prompts are computed at once, but where windows must move on in between."""

_ENDS = {
    Direction.LOAD: (Tier.HOST, Tier.DEVICE),
    Direction.BACKUP: (Tier.DEVICE, Tier.HOST),
    Direction.FORK: (Tier.DEVICE, Tier.DEVICE),
}


class TurnHits(NamedTuple):
    """One turn.

    Attributes:
        prompt_tokens, hit_tokens: length of the prompt, and tokens of it that the cache served.
        by_tier: served tokens, by the farthest tier that any of their pools came from.
        verified, wrong: number of pages and states compared byte by byte, and of those that differed.
    """

    prompt_tokens: int
    hit_tokens: int
    by_tier: Mapping[Tier, int]
    verified: int
    wrong: int


class VirtualCache(InstantCache):
    """Copies move stamps, and storage is a dictionary.

    A slot holds a stamp of its page, or of its state's prefix, which is enough to detect stale, swapped or
    unwritten slots. A subclass may queue copies and writes, to end them in another order.

    Attributes:
        memory: by pool and tier, the stamp of each slot.
        storage: stamps by pool and digest; unbounded.
    """

    def __init__(self, planner: Planner, slots: Mapping[str, tuple[int, int]]) -> None:
        """`slots`: device and host slots by pool, as of the planner."""
        super().__init__(planner)
        self.memory = {
            (name, tier): [b""] * slots[name][tier] for name in slots for tier in (Tier.DEVICE, Tier.HOST)
        }
        self.storage: dict[tuple[str, bytes], bytes] = {}

    def move(self, copy: Copy) -> None:
        source, destination = _ENDS[copy.direction]
        for pool, taken, given in copy.transfers:
            read, written = self.memory[pool, source], self.memory[pool, destination]
            for origin, target in zip(taken, given, strict=True):
                written[target] = read[origin]

    def store(self, node: Node) -> None:
        work = self.planner.backups.store(node)
        if work is not None:
            self.write(work)

    def write(self, work: StorageWrite, *, stored: bool = True) -> None:
        for pool, (pages, slots) in work.pages.items() if stored else ():
            host = self.memory[pool, Tier.HOST]
            for page, slot in zip(pages, slots, strict=True):
                self.storage[pool, page.digest] = host[slot]
        self.planner.backups.write_finished(work, stored=stored)

    def prefetch(self, request: RequestState) -> None:
        """Read the prefix's stored pages to the host."""
        reader, names = self.planner.prefetches, self.planner.inventory.names
        query = reader.make_query(request.tokens, request.seed)
        if query is None:
            return
        present = {
            number: self._present(name, query.digests, query.matched_pages if number else query.memory_pages)
            for number, name in enumerate(names)
            if reader.can_read(number)
        }
        choice = reader.choose(query, present)
        self.carry_out(choice.backups)
        if choice.reading is None:
            reader.release(query)
            return
        while (read := reader.next_read()) is not None:
            for result in reader.deliver(read, self.read(read)):
                self.carry_out(result.backups)
        for result in reader.abandon(choice.reading):  # there was no room for the rest
            self.carry_out(result.backups)
        self.planner.rematch(request)

    def _present(self, pool: str, digests: Sequence[bytes], first: int) -> bytes:
        """For each page from number `first` on, a byte: 1 if storage has it."""
        return bytes(first) + bytes([(pool, digest) in self.storage for digest in digests[first:]])

    def read(self, read: StorageRead) -> list[Outcome]:
        """Read pages from storage; returns the outcome of each."""
        pool = self.planner.inventory.names[read.component_id]
        for slot, (digest, _, _) in zip(read.slots, read.placed, strict=True):
            self.memory[pool, Tier.HOST][slot] = self.storage[pool, digest]
        return [Outcome.HIT] * len(read.slots)

    def fill(self, request: RequestState, first: int, stamps: Sequence[bytes]) -> None:
        """Stamp the pages from number `first` on, in every pool that has pages."""
        for memory, begin, slots in self._pages(request):
            given = slots[first - begin : first - begin + len(stamps)]
            for slot, stamp in zip(given, stamps, strict=True):
                memory[slot] = stamp

    def fill_states(self, request: RequestState, stamp: bytes) -> None:
        for number, slot in request.states.items():
            self._device(number)[slot] = stamp

    def check(self, request: RequestState, stamps: Sequence[bytes]) -> tuple[int, int]:
        """Compare restored pages, and the states behind the last; a page may go on behind its stamp.

        Returns:
            The numbers of compared and of wrong ones.
        """
        verified = wrong = 0
        for memory, begin, slots in self._pages(request):
            held = [memory[slot] for slot in slots[: len(stamps) - begin]]
            expected = list(stamps[begin:])
            verified += len(held)
            if held != expected:
                pairs = zip(held, expected, strict=True)
                wrong += sum(not stamp.startswith(beginning) for stamp, beginning in pairs)
        for number, slot in request.states.items() if stamps else ():
            verified += 1
            wrong += self._device(number)[slot] != stamps[-1]
        return verified, wrong

    def _pages(self, request: RequestState) -> Iterator[tuple[list[bytes], int, list[int]]]:
        """For each component with pages: its device memory, its first page, and its slots."""
        yield self._device(FULL), 0, request.pages
        for number, window in request.windows.items():
            yield self._device(number), window.first, window.slots

    def _device(self, number: int) -> list[bytes]:
        return self.memory[self.planner.inventory.names[number], Tier.DEVICE]


class VirtualRunner:
    """A serving engine without a model, on a `VirtualCache`."""

    def __init__(self, cache: VirtualCache, page_size: int, interval: int, *, tails: bool = False) -> None:
        """
        Args:
            cache: the cache.
            page_size: tokens of a page.
            interval: tokens between two positions where a prompt can resume; whole pages.
            tails: each turn resumes at the very token where the one before was computed to; for models
                without windows. Stamps then hold every token, so that a tail with one too many, or of other
                tokens, is found.
        """
        self._cache = cache
        self._planner = cache.planner
        self._page_size = page_size
        self._interval = interval
        self._tails = tails
        windows = [component.pages for component in cache.planner.inventory.tree.windows]
        self._chunk = min(windows, default=WHOLE) * page_size

    def problems(self) -> Sequence[str]:
        """Findings of the cache's own check."""
        return self._planner.inventory.verify()

    async def run(
        self, history: Transcript, prompt: array[int], output: array[int], *, marks: Iterable[int] = ()
    ) -> TurnHits:
        """Serve one turn, as `turns.TurnRunner.run` does."""
        await asyncio.sleep(0)  # the only suspension point, so that interrupts are possible
        history.extend(prompt)
        length = len(history.tokens)
        request = self._open(array("q", history.tokens))
        hit = done = request.hit_tokens(self._page_size)
        verified, wrong = self._cache.check(request, self._stamps(history, 0, hit))
        cuts = {*self._planner.cuts(request), *marks, length}
        history.extend(output)
        request.tokens.extend(output)
        computed = len(history.tokens) - 1  # the last token of an output is never computed
        ends = {cut // self._interval * self._interval for cut in (*cuts, computed)}
        for end in sorted(ends | {computed} if self._tails else ends):
            if done < end <= computed:
                self._compute(request, history, done, end, final=self._tails and end == computed)
                done = end
        self._planner.extend(request, max(computed - request.reserved, 0))
        self._planner.release(request)
        return TurnHits(length, hit, {request.tier: hit} if hit else {}, verified, wrong)

    def _open(self, tokens: array[int]) -> RequestState:
        """Open a request whose prefix is on the device, from whichever tier has it."""
        request = self._planner.open(tokens, b"")
        self._cache.prefetch(request)
        self._cache.carry_out(self._planner.loads.load(request))
        return request

    def _compute(
        self, request: RequestState, history: Transcript, done: int, end: int, *, final: bool
    ) -> None:
        """Fill pages from token `done` to `end`, in chunks after which windows advance, and publish them."""
        while done < end:
            page, stop = done // self._page_size, min(done + self._chunk, end)
            self._planner.extend(request, max(stop - request.reserved, 0))
            self._cache.fill(request, page, self._stamps(history, page, stop))
            self._cache.advance(request, stop)
            done = stop
        self._cache.fill_states(request, self._stamps(history, (end - 1) // self._page_size, end)[-1])
        self._cache.carry_out(self._planner.publish(request, end, final=final))
        self._cache.advance(request, end)

    def _stamps(self, history: Transcript, first: int, end: int) -> list[bytes]:
        """Of the pages from number `first` on, with the tokens before `end`."""
        size = self._page_size
        if not self._tails:
            return history.digests[first : end // size]
        pages = range(first, -(-end // size))
        return [self._tail(history, page * size, min(page * size + size, end)) for page in pages]

    def _tail(self, history: Transcript, first: int, end: int) -> bytes:
        """The digest of what precedes the page that begins at token `first`, and its ids before `end`."""
        prior = history.digests[first // self._page_size - 1] if first else bytes(DIGEST_BYTES)
        return prior + history.tokens[first:end].tobytes()
