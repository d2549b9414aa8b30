"""Run a trace token by token: pages of any size, outputs that are cached, prefixes that end inside a page.

A block becomes as many ids as it has tokens. What stands behind a prompt's whole blocks, its output too, is
what the trace says was cached with the answer, or what the next prompt of the same session has there, if that
begins with this one; otherwise its ids occur once, fill memory, and are never hit.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress

from asynchicache.errors import CapacityError
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.replay.instant import InstantCache
from asynchicache.replay.player import Miss, ReplayedRequest
from asynchicache.replay.trace import Trace, TraceRequest
from asynchicache.tree.node import FULL
from asynchicache.types import MissReason, Tier

_UNKNOWN = 1 << 40
"""The first id that stands for text that no later prompt repeats; above all ids of blocks."""
_POSITIONS = 28  # bits: a prompt is shorter


class TokenTrace:
    """The sequences of a trace, as ids."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._next = self._continuations()

    def _continuations(self) -> Mapping[int, int]:
        """By the number of a request, that of the prompt of the same session that goes on where it ended."""
        found: dict[int, int] = {}
        open_ends: dict[str, tuple[int, int]] = {}
        for number, request in enumerate(self.trace.requests):
            blocks = request.blocks()
            if request.session is None:
                continue
            last, length = open_ends.get(request.session, (0, 0))
            before = self.trace.requests[last]
            if length and length <= len(blocks) and before.blocks() == blocks[:length]:
                found[last] = number
            open_ends[request.session] = (number, len(blocks))
        return found

    def ids(self, number: int, length: int) -> array[int]:
        """The first `length` tokens of a request and what follows it."""
        size, requests = self.trace.block_size, self.trace.requests
        while len(blocks := requests[number].blocks(answer=True)) * size < length and number in self._next:
            number = self._next[number]
        whole = min(len(blocks) * size, length)
        blocks = blocks[: -(-whole // size)]
        found = array("q", bytes(8 * size * len(blocks)))
        for offset in range(size):
            found[offset::size] = array("q", (block * size + offset for block in blocks))
        del found[whole:]
        unknown = _UNKNOWN + (number << _POSITIONS)
        found.extend(range(unknown + whole, unknown + length))
        return found


class TokenPlayer:
    """A serving engine without a model.

    Attributes:
        reachable: tokens of the prompts that were computed before, in whole blocks.
    """

    def __init__(self, planner: Planner, tokens: TokenTrace, *, outputs: bool) -> None:
        """`outputs`: publish what was generated, but its last token, where the trace does not say."""
        self._planner = planner
        self._cache = InstantCache(planner)
        self._tokens = tokens
        self._outputs = outputs
        self._seen = bytearray(tokens.trace.blocks)
        self.reachable = 0

    def serve(self, number: int) -> ReplayedRequest:
        """Match, load, compute and publish one prompt, and its output."""
        planner, request = self._planner, self._tokens.trace.requests[number]
        known = self._known(number)
        self.reachable += known
        try:
            state = planner.open(self._tokens.ids(number, request.tokens), b"", hint=request.hint)
        except CapacityError:
            lost = {self._miss("device_capacity"): request.tokens}
            return ReplayedRequest(request.tokens, 0, Tier.DEVICE, MissReason.DEVICE_CAPACITY, lost)
        self._cache.carry_out(planner.count_hit(state))
        self._cache.carry_out(planner.loads.load(state))
        served = self._served(state, known)
        with suppress(CapacityError):  # without room, it is computed but not cached
            self._compute(state, number)
        planner.release(state)
        return served

    def _known(self, number: int) -> int:
        """Tokens of a prompt that were computed before, at most all but one; and note what it computes."""
        size, request = self._tokens.trace.block_size, self._tokens.trace.requests[number]
        blocks = request.blocks()
        common = bisect_left(blocks, 1, key=lambda block: 1 - self._seen[block])
        end = self._end(request)
        for at in self._tokens.ids(number, end)[::size][: end // size]:
            if at < _UNKNOWN:
                self._seen[at // size] = 1
        return min(common * size, request.tokens - 1)

    def _end(self, request: TraceRequest) -> int:
        """The tokens that are published: of a prompt, and of its output."""
        if request.answer:
            return len(request.blocks(answer=True)) * self._tokens.trace.block_size
        return request.tokens + max(request.output - 1, 0) * self._outputs

    def _compute(self, state: RequestState, number: int) -> None:
        planner, request = self._planner, self._tokens.trace.requests[number]
        size, end = planner.inventory.page_size, self._end(request)
        kept = {*planner.cuts(state)}
        stops = {*kept, request.tokens, end}
        if end > request.tokens and planner.checkpoints.output:
            kept.add(end)
        state.tokens.extend(self._tokens.ids(number, end)[request.tokens :])
        done = state.hit_tokens(size)
        for stop in sorted(stop for stop in stops if stop > done):
            planner.extend(state, max(stop - state.reserved, 0))
            self._cache.carry_out(planner.backups.clean())
            self._cache.carry_out(planner.publish(state, stop, final=stop == end, states=stop in kept))

    def _served(self, state: RequestState, known: int) -> ReplayedRequest:
        size, prompt = self._planner.inventory.page_size, state.prompt
        hit, reason = state.hit_tokens(size), self._planner.reason(state)
        lost = max(known - hit, 0)
        why = "partial_block" if lost < size else "evicted" if state.held_back is None else "not_kept"
        misses = {self._miss("cold"): prompt - max(known, hit), self._miss(why): lost}
        return ReplayedRequest(prompt, hit, state.tier, reason, misses)

    def _miss(self, reason: str) -> Miss:
        return Miss(self._planner.inventory.names[FULL], reason)
