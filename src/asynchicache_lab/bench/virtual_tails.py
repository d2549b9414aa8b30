"""Run turns through the planner alone, with prefixes that end inside a page: every token is checked.

As `bench.virtual`, but a slot holds the digest of what precedes its page and the ids in it so far, and a
state the same of its length. So a tail with a token too many, or of other tokens, is found.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable

from asynchicache.hashing import DIGEST_BYTES
from asynchicache.planner.request_state import RequestState
from asynchicache.tree.node import FULL
from asynchicache.types import Tier
from asynchicache_lab.bench.synthetic import Transcript
from asynchicache_lab.simulator import TurnHits, VirtualCache


class TailRunner:
    """A serving engine without a model, for models without windows: each turn resumes at the very token
    where the one before was computed to."""

    def __init__(self, cache: VirtualCache, page_size: int, interval: int) -> None:
        """`interval`: tokens between two positions where a prompt can resume, besides the ends of outputs."""
        self._cache = cache
        self._planner = cache.planner
        self._memory = [cache.memory[name, Tier.DEVICE] for name in cache.planner.state.names]
        self._page_size = page_size
        self._interval = interval

    def problems(self) -> list[str]:
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
        verified, wrong = self._check(request, history, hit)
        cuts = {
            cut // self._interval * self._interval for cut in (*self._planner.cuts(request), *marks, length)
        }
        history.extend(output)
        request.tokens.extend(output)
        computed = len(history.tokens) - 1  # the last token of an output is never computed
        done = hit
        for cut in sorted({*cuts, computed // self._interval * self._interval, computed}):
            if done < cut <= computed:
                self._compute(request, history, done, cut, final=cut == computed)
                done = cut
        self._planner.release(request)
        return TurnHits(length, hit, {request.tier: hit} if hit else {}, verified, wrong)

    def _compute(
        self, request: RequestState, history: Transcript, done: int, end: int, *, final: bool
    ) -> None:
        self._planner.extend(request, max(end - request.reserved, 0))
        for page in range(done // self._page_size, -(-end // self._page_size)):
            self._memory[FULL][request.pages[page]] = self._stamp(history, page, end)
        for number, slot in request.states.items():
            self._memory[number][slot] = self._state(history, end)
        self._cache.carry_out(self._planner.publish(request, end, final=final))

    def _check(self, request: RequestState, history: Transcript, hit: int) -> tuple[int, int]:
        """Compare restored pages and states; return the numbers of compared and of wrong ones."""
        pages = range(-(-hit // self._page_size))
        wrong = sum(
            not self._memory[FULL][request.pages[page]].startswith(self._stamp(history, page, hit))
            for page in pages
        )
        states = list(request.states.items()) if hit else []
        wrong += sum(self._memory[number][slot] != self._state(history, hit) for number, slot in states)
        return len(pages) + len(states), wrong

    def _stamp(self, history: Transcript, page: int, end: int) -> bytes:
        """Of a page, with the tokens before `end`."""
        first = page * self._page_size
        prior = history.digests[page - 1] if page else bytes(DIGEST_BYTES)
        return prior + history.tokens[first : min(first + self._page_size, end)].tobytes()

    def _state(self, history: Transcript, length: int) -> bytes:
        return b"state" + self._stamp(history, (length - 1) // self._page_size, length)
