"""Run turns through the planner alone, with a stamp in place of each page's bytes.

The tree, the allocators, eviction and all decisions are the library's. The controller's work (copies, storage
calls, waiting) happens immediately and in order. So the same turns give the same figures on every machine, at
thousands of turns per second.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from asynchicache.planner.actions import Copy
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.replay.instant import InstantCache
from asynchicache.specs import ModelSpec
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

    A slot holds the digest of its page, or of its state's prefix, which is enough to detect stale, swapped or
    unwritten slots.
    """

    def __init__(self, spec: ModelSpec, slots: Mapping[str, tuple[int, int]], *, tails: bool = False) -> None:
        """`slots`: device and host slots by pool. Storage is unbounded. `tails`: as of `Planner`."""
        super().__init__(Planner(spec, slots, tails=tails))
        self.memory: dict[tuple[str, Tier], list[bytes]] = {
            (name, tier): [b""] * slots[name][tier] for name in slots for tier in (Tier.DEVICE, Tier.HOST)
        }
        self._storage: dict[str, dict[bytes, bytes]] = {name: {} for name in slots}

    def move(self, copy: Copy) -> None:
        source, destination = _ENDS[copy.direction]
        for pool, taken, given in copy.transfers:
            read, written = self.memory[pool, source], self.memory[pool, destination]
            for origin, target in zip(taken, given, strict=True):
                written[target] = read[origin]

    def store(self, node: Node) -> None:
        work = self.planner.backups.store(node)
        if work is None:
            return
        for pool, (digests, slots) in work.pages.items():
            host = self.memory[pool, Tier.HOST]
            self._storage[pool].update(zip(digests, [host[slot] for slot in slots], strict=True))
        self.planner.backups.write_finished(work, stored=True)

    def open(self, tokens: array[int]) -> RequestState:
        """Open a request whose prefix is on the device, from whichever tier has it."""
        request = self.planner.open(tokens, b"")
        self._prefetch(request)
        self.carry_out(self.planner.loads.load(request))
        return request

    def _prefetch(self, request: RequestState) -> None:
        """Load the prefix's stored pages to the host."""
        reader, names = self.planner.prefetches, self.planner.state.names
        query = reader.make_query(request.tokens, request.seed)
        if query is None:
            return
        present = {
            number: self._present(
                names[number], query.digests, query.matched_pages if number else query.memory_pages
            )
            for number in self._asked()
        }
        choice = reader.choose(query, present)
        self.carry_out(choice.backups)
        if choice.reading is None:
            reader.release(query)
            return
        while (read := reader.next_read()) is not None:
            name = names[read.component_id]
            host, stored = self.memory[name, Tier.HOST], self._storage[name]
            for slot, digest in zip(read.slots, read.digests, strict=True):
                host[slot] = stored[digest]
            for result in reader.deliver(read, [Outcome.HIT] * len(read.pages)):
                self.carry_out(result.backups)
        for result in reader.abandon(choice.reading):  # there was no room for the rest
            self.carry_out(result.backups)
        self.planner.rematch(request)

    def _asked(self) -> list[int]:
        return [n for n in range(len(self.planner.state.names)) if self.planner.prefetches.can_read(n)]

    def _present(self, pool: str, digests: Sequence[bytes], first: int) -> bytes:
        """For each page from number `first` on, a byte: 1 if storage has it."""
        stored = self._storage[pool]
        return bytes(first) + bytes([digest in stored for digest in digests[first:]])


class VirtualRunner:
    """A serving engine without a model, on a `VirtualCache`."""

    def __init__(self, cache: VirtualCache, page_size: int, interval: int) -> None:
        """`interval`: tokens between two positions where a prompt can resume; whole pages."""
        self._cache = cache
        self._planner = cache.planner
        self._names = cache.planner.state.names
        self._page_size = page_size
        self._interval = interval
        windows = [component.pages for component in cache.planner.state.tree.windows]
        self._chunk = min(windows, default=WHOLE) * page_size

    def problems(self) -> Sequence[str]:
        """Findings of the cache's own check."""
        return self._planner.state.verify()

    async def run(
        self, history: Transcript, prompt: array[int], output: array[int], *, marks: Iterable[int] = ()
    ) -> TurnHits:
        """Serve one turn, as `turns.TurnRunner.run` does."""
        await asyncio.sleep(0)  # the only suspension point, so that interrupts are possible
        history.extend(prompt)
        length = len(history.tokens)
        request = self._cache.open(array("q", history.tokens))
        hit = request.hit_tokens(self._page_size)
        verified, wrong = self._check(request, history.digests)
        cuts = {*self._planner.cuts(request), *marks, length}
        history.extend(output)
        request.tokens.extend(output)
        computed = len(history.tokens) - 1
        for cut in sorted({self._on_grid(cut) for cut in (*cuts, computed)}):
            if hit < cut <= computed:
                self._compute(request, cut, history.digests)
        self._planner.extend(request, max(computed - request.reserved, 0))
        self._planner.release(request)
        return TurnHits(length, hit, {request.tier: hit} if hit else {}, verified, wrong)

    def _on_grid(self, length: int) -> int:
        return length // self._interval * self._interval

    def _compute(self, request: RequestState, length: int, digests: list[bytes]) -> None:
        """Fill pages up to `length`, in chunks after which windows advance, and publish them."""
        while request.reserved < length:
            first, end = request.reserved // self._page_size, min(request.reserved + self._chunk, length)
            self._planner.extend(request, end - request.reserved)
            self._fill(request, first, digests[: end // self._page_size])
            self._cache.advance(request, end)
        for number, slot in request.states.items():
            self._device(number)[slot] = digests[length // self._page_size - 1]
        self._cache.carry_out(self._planner.publish(request, length))
        self._cache.advance(request, length)

    def _fill(self, request: RequestState, first: int, digests: list[bytes]) -> None:
        """Stamp the pages from number `first` on, in every pool that has pages."""
        for number, begin, slots in self._pages(request):
            memory = self._device(number)
            for slot, digest in zip(
                slots[first - begin : len(digests) - begin], digests[first:], strict=True
            ):
                memory[slot] = digest

    def _check(self, request: RequestState, digests: list[bytes]) -> tuple[int, int]:
        """Compare restored pages and states; return the numbers of compared and of wrong ones."""
        expected = digests[: request.hit_pages]
        verified = wrong = 0
        for number, begin, slots in self._pages(request):
            verified += len(slots)
            wrong += self._count_wrong(number, slots, expected[begin:])
        for number, slot in request.states.items() if expected else ():
            verified += 1
            wrong += self._count_wrong(number, [slot], expected[-1:])
        return verified, wrong

    def _count_wrong(self, number: int, slots: list[int], digests: list[bytes]) -> int:
        memory = self._device(number)
        held = [memory[slot] for slot in slots]
        if held == digests:
            return 0
        return sum(stamp != digest for stamp, digest in zip(held, digests, strict=True))

    @staticmethod
    def _pages(request: RequestState) -> Iterator[tuple[int, int, list[int]]]:
        """For each component with pages: its number, its first page, and its slots."""
        yield FULL, 0, request.pages
        for number, window in request.windows.items():
            yield number, window.first, window.slots

    def _device(self, number: int) -> list[bytes]:
        return self._cache.memory[self._names[number], Tier.DEVICE]
