"""Run a trace's requests through the planner, one after the other: all decisions, but no bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from asynchicache.errors import CapacityError
from asynchicache.planner.hints import CacheHint
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.replay.instant import InstantCache
from asynchicache.replay.trace import Trace, TraceBlocks, TraceRequest
from asynchicache.tree.node import FULL, place_of
from asynchicache.types import TOKEN_BYTES, MissReason, Tier

IDS_A_BLOCK = 2
"""A block of a trace is a page of two ids, and the rest of a prompt, if any, is one id: as in a serving
engine, a page that is not whole takes a slot and is never published."""

_CHUNK_TOKENS = 8192
_WHOLE = 1 << 62
"""Prompts are computed in chunks where windows move on between them, and at once elsewhere."""


class Miss(NamedTuple):
    """Why tokens were not served: the pool that limited the hit, and the reason."""

    pool: str
    reason: str


class ReplayedRequest(NamedTuple):
    """The result of one request.

    Attributes:
        prompt_tokens, hit_tokens: length of the prompt, and tokens of it that the cache served.
        tier: the farthest tier that any pool of the hit came from.
        reason: why the hit was not longer, as in `request.hit`.
        misses: the remaining tokens, by cause.
    """

    prompt_tokens: int
    hit_tokens: int
    tier: Tier
    reason: MissReason
    misses: Mapping[Miss, int]


class Player:
    """A serving engine without a model. It serves prompts, and caches what a trace says of their answers."""

    def __init__(self, planner: Planner, trace: Trace, cache: InstantCache | None = None) -> None:
        """`cache`: carries out what the planner decides, with a store behind it, say."""
        self._planner = planner
        self._cache = cache or InstantCache(planner)
        self._block_size = trace.block_size
        self._chunk = self._chunk_blocks()
        self._was_resumable = bytearray(trace.blocks)

    def serve(self, request: TraceRequest, known: int) -> ReplayedRequest:
        """Match, load, compute and publish one prompt, whose first `known` blocks occurred before."""
        blocks = request.blocks()
        try:
            state = self._planner.open(self._tokens(request, blocks), b"", hint=self._hint(request))
        except CapacityError:
            return self._refused(request, known)
        self._cache.prefetch(state)
        self._cache.carry_out(self._planner.count_hit(state))
        self._cache.carry_out(self._planner.loads.load(state))
        served = self._served(request, state, blocks, known)
        with suppress(CapacityError):  # without room, the prompt is computed but not cached
            for stop in self._stops(state, len(blocks)):
                self._publish(state, stop, blocks)
            self._answer(state, request)
        self._planner.release(state)
        return served

    def _tokens(self, request: TraceRequest, blocks: TraceBlocks) -> array[int]:
        ids = _ids(blocks)
        if request.tokens % self._block_size:
            ids.frombytes(bytes(TOKEN_BYTES))
        return ids

    def _hint(self, request: TraceRequest) -> CacheHint:
        return CacheHint(
            repeats=tuple(length // self._block_size * IDS_A_BLOCK for length in request.hint.repeats)
        )

    # Computing

    def _answer(self, state: RequestState, request: TraceRequest) -> None:
        """Publish the blocks that were cached with the answer, with a state at their end if it is wanted."""
        if not request.answer:
            return
        blocks = request.blocks(answer=True)
        begin, end = len(blocks) - sum(count for _, count in request.answer), len(blocks)
        del state.tokens[IDS_A_BLOCK * begin :]
        state.tokens.extend(_ids(blocks[begin:]))
        state.tokens.append(0)  # the last token generated
        for blocks_done in range(begin + self._chunk, end, self._chunk):
            self._publish(state, IDS_A_BLOCK * blocks_done + 1, blocks)
        is_wanted = self._planner.checkpoints.output
        self._publish(state, IDS_A_BLOCK * end + (not is_wanted), blocks, final=is_wanted)

    def _publish(self, state: RequestState, stop: int, blocks: TraceBlocks, *, final: bool = False) -> None:
        planner = self._planner
        end = stop if planner.inventory.tree.windows else len(state.tokens)
        planner.extend(state, max(end - state.reserved, 0))
        self._cache.carry_out(planner.backups.clean())
        self._cache.carry_out(planner.publish(state, stop, final=final))
        self._cache.advance(state, stop)
        if state.borrowed and planner.inventory.tree.restorable(state.lease.node):
            self._was_resumable[blocks[state.borrowed - 1]] = 1

    def _stops(self, state: RequestState, whole: int) -> list[int]:
        """Ends of forwards: positions where states are wanted; otherwise one id after a block, where no state
        is kept."""
        cuts = self._planner.cuts(state)
        chunks = range(state.hit_pages + self._chunk, whole, self._chunk)
        stops = {IDS_A_BLOCK * blocks + 1 for blocks in chunks}
        if IDS_A_BLOCK * whole not in cuts:
            stops.add(IDS_A_BLOCK * whole + 1)
        if len(state.tokens) % IDS_A_BLOCK == 0:
            state.tokens.append(0)  # the first token generated
        return sorted(stops.union(cuts))

    def _chunk_blocks(self) -> int:
        """Longest prefill chunk that fits beside a window and a partial page."""
        free = self._planner.inventory.free
        room = [
            free[place_of(window.id, Tier.DEVICE)].capacity - window.kept - 1
            for window in self._planner.inventory.tree.windows
        ]
        return min(max(_CHUNK_TOKENS // self._block_size, 1), *room) if room else _WHOLE

    # Counting

    def _served(
        self, request: TraceRequest, state: RequestState, blocks: TraceBlocks, known: int
    ) -> ReplayedRequest:
        misses = self._unknown(request, known)
        for miss, lost in self._held_back(state, blocks, known):
            misses[miss] = lost * self._block_size
        hit = state.hit_pages * self._block_size
        return ReplayedRequest(request.tokens, hit, state.tier, self._planner.reason(state), misses)

    def _refused(self, request: TraceRequest, known: int) -> ReplayedRequest:
        """The result for a prompt that does not fit on the device: computed, but not cached."""
        misses = self._unknown(request, known)
        misses[self._miss(FULL, "device_capacity")] = known * self._block_size
        return ReplayedRequest(request.tokens, 0, Tier.DEVICE, MissReason.DEVICE_CAPACITY, misses)

    def _unknown(self, request: TraceRequest, known: int) -> dict[Miss, int]:
        """Tokens that no cache could serve: those of partial blocks, and those that did not occur before."""
        whole = (request.tokens - 1) // self._block_size  # at least one token must be computed
        return {
            self._miss(FULL, "partial_block"): request.tokens - whole * self._block_size,
            self._miss(FULL, "cold"): (whole - known) * self._block_size,
        }

    def _held_back(self, state: RequestState, blocks: TraceBlocks, known: int) -> Iterator[tuple[Miss, int]]:
        """Known blocks that were not served, by the pool that missed them."""
        hit, matched, reach = state.hit_pages, state.matched_pages, state.match.full_pages
        yield self._miss(FULL, "evicted"), known - reach
        if matched > hit:
            yield self._miss(FULL, "device_capacity"), matched - hit
        if state.held_back is not None:
            lengths = range(reach, matched, -1)
            last = next((end for end in lengths if self._was_resumable[blocks[end - 1]]), matched)
            yield self._miss(state.held_back.component_id, "evicted"), last - matched
            yield self._miss(state.held_back.component_id, "not_kept"), reach - last

    def _miss(self, component_id: int, reason: str) -> Miss:
        return Miss(self._planner.inventory.names[component_id], reason)


def _ids(blocks: TraceBlocks) -> array[int]:
    ids = array("q", bytes(IDS_A_BLOCK * TOKEN_BYTES * len(blocks)))
    for offset in range(IDS_A_BLOCK):
        ids[offset::IDS_A_BLOCK] = blocks
    return ids
