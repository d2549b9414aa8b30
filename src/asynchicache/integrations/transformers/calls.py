"""What runs on a model's thread: calls as data, and the rank that carries them out.

A model that is divided over several processes must be called the same way on each of them. So a call names
sequences and slots by number, and the leader of a group sends to the other ranks what it runs itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch
from transformers import DynamicCache, PreTrainedModel

from asynchicache.errors import RankError
from asynchicache.integrations.transformers.batches import select, stack
from asynchicache.integrations.transformers.bridge import HitSlots, NewSlots, PrefixCopies
from asynchicache.integrations.transformers.forward import decode, feed
from asynchicache.integrations.transformers.snapshot import SavedStates, save_states, trim_windows
from asynchicache.integrations.transformers.thread import ModelThread
from asynchicache.ranks.group import RankGroup

T = TypeVar("T")


class Restore(msgspec.Struct, frozen=True, tag="restore", array_like=True):
    """Begin a sequence, or begin it again, with the first `tokens` tokens from the cache."""

    sequence: int
    tokens: int = 0
    slots: HitSlots = HitSlots()


class Feed(msgspec.Struct, frozen=True, tag="feed", array_like=True):
    """Compute `tokens`, which follow the first `start` tokens of a sequence; `every`: logits after each."""

    sequence: int
    start: int
    tokens: list[int]
    every: bool = False


class Save(msgspec.Struct, frozen=True, tag="save", array_like=True):
    """Copy pages and states of the first `stop` tokens to the cache.

    Attributes:
        sequence: whose.
        stop: end of the copied tokens.
        slots: the destination.
        kept: copy the states that decode steps kept at the last page boundary, not those of now.
    """

    sequence: int
    stop: int
    slots: NewSlots
    kept: bool


class Trim(msgspec.Struct, frozen=True, tag="trim", array_like=True):
    """Drop rows of a sequence that no later forward or publication reads."""

    sequence: int


class Decode(msgspec.Struct, frozen=True, tag="decode", array_like=True):
    """Take sequences out of a batch, add others, and feed a token to each.

    Attributes:
        batch: which batch; it begins with the first call, and ends when it has no sequence.
        leaving, joining: sequences.
        tokens: of each sequence of the batch, the ones that stay before those that join.
    """

    batch: int
    leaving: list[int]
    joining: list[int]
    tokens: list[int]


class Drop(msgspec.Struct, frozen=True, tag="drop", array_like=True):
    """Forget a sequence."""

    sequence: int


ModelCall: TypeAlias = Restore | Feed | Save | Trim | Decode | Drop


class SequenceMemory:
    """The model's memory of one sequence.

    Attributes:
        cache: of transformers; empty while the sequence is in a batch, which has it then.
        length: tokens that the model has computed.
        kept: states at the last page boundary that a decode step reached; None before the first.
    """

    def __init__(self, cache: DynamicCache, length: int) -> None:
        self.cache = cache
        self.length = length
        self.kept: SavedStates | None = None


class _Batch:
    """Sequences that are decoded together; shorter ones are padded."""

    def __init__(self) -> None:
        self.sequences: dict[int, SequenceMemory] = {}
        self.cache = DynamicCache()

    def longest(self) -> int:
        return max((one.length for one in self.sequences.values()), default=0)


class ModelRank:
    """A model, or one rank's part of it, and the memory of its sequences. Used on one thread.

    Attributes:
        sequences: by number.
    """

    def __init__(self, model: PreTrainedModel, copies: PrefixCopies) -> None:
        self.sequences: dict[int, SequenceMemory] = {}
        self._model = model
        self._copies = copies
        self._page_size = copies.pools.spec.page_size
        self._batches: dict[int, _Batch] = {}

    def run(self, call: ModelCall) -> torch.Tensor:
        """Carry out a call.

        Returns:
            of `Feed`, logits after the last token, `[vocabulary]`, or after each; of `Decode`, those of each
            sequence, `[batch, vocabulary]`; of other calls, nothing (`[0]`).

        Raises:
            UsageError: the model's memory does not fit the pools.
            Exception: the model's error.
        """
        match call:
            case Restore():
                cache = self._copies.restore(call.tokens, call.slots)
                self.sequences[call.sequence] = SequenceMemory(cache, call.tokens)
            case Feed():
                one = self.sequences[call.sequence]
                logits = feed(self._model, one.cache, call.tokens, call.start, every=call.every)
                one.length += len(call.tokens)
                return logits
            case Save():
                one = self.sequences[call.sequence]
                self._copies.save(one.cache, call.stop, call.slots, states=one.kept if call.kept else None)
            case Trim():
                self._trim(self.sequences[call.sequence].cache)
            case Decode():
                return self._decode(call)
            case Drop():
                self.sequences.pop(call.sequence, None)
        return torch.empty(0)

    def _trim(self, cache: DynamicCache, *, more_pages: int = 0) -> None:
        if self._copies.window_pages:  # otherwise there are no windows, or their pages are all kept
            trim_windows(cache, self._page_size, pages=self._copies.window_pages + more_pages)

    def _decode(self, call: Decode) -> torch.Tensor:
        batch = self._batches.pop(call.batch, None) or _Batch()
        if call.leaving:
            self._release(batch, call.leaving)
        if call.joining:
            self._admit(batch, call.joining)
        if not batch.sequences:
            return torch.empty(0)
        logits = self._step(batch, call.tokens)
        self._batches[call.batch] = batch  # only now: a batch whose model failed is over
        return logits

    def _release(self, batch: _Batch, leaving: list[int]) -> None:
        longest = batch.longest()
        for place, (number, one) in enumerate(batch.sequences.items()):
            if number in leaving and number in self.sequences:  # else nobody waits for it
                one.cache = select(batch.cache, [place], longest - one.length)
                self._trim(one.cache)
        stay = [place for place, number in enumerate(batch.sequences) if number not in leaving]
        for number in leaving:
            del batch.sequences[number]
        drop = longest - batch.longest()
        batch.cache = select(batch.cache, stay, drop) if stay else DynamicCache()

    def _admit(self, batch: _Batch, joining: list[int]) -> None:
        new = {number: self.sequences[number] for number in joining}
        caches = [one.cache for one in new.values()]
        batch.cache = stack([batch.cache, *caches] if batch.sequences else caches, padded=True)
        batch.sequences |= new
        for one in new.values():
            one.cache = DynamicCache()  # the batch has a copy

    def _step(self, batch: _Batch, tokens: list[int]) -> torch.Tensor:
        longest = batch.longest()
        padding = [longest - one.length for one in batch.sequences.values()]
        logits = decode(self._model, batch.cache, tokens, longest, padding=padding)
        for place, one in enumerate(batch.sequences.values()):
            one.length += 1
            if one.length % self._page_size == 0 and self._copies.has_states:
                one.kept = save_states(batch.cache, one.length, row=place)
        if (longest + 1) % self._page_size == 0:
            # One page more: a shorter sequence may be up to a page past a boundary of its own.
            self._trim(batch.cache, more_pages=1)
        return logits


class ModelCalls:
    """Runs calls on the model's thread, and on every other rank of a group, in one order."""

    def __init__(self, rank: ModelRank, thread: ModelThread, group: RankGroup | None = None) -> None:
        """`group`: the ranks that the model is divided over, if it is; this one leads it."""
        self.rank = rank
        self.thread = thread
        self._group = group
        self._encoder = msgspec.msgpack.Encoder()
        self._sequences = count()
        self._batches = count()

    async def run(self, call: ModelCall) -> None:
        """
        Raises:
            RankError: a rank of the group is lost.
            UsageError, Exception: as of `ModelRank.run`.
        """
        await self.compute(call, lambda logits: None)

    async def compute(self, call: ModelCall, use: Callable[[torch.Tensor], T]) -> T:
        """Run a call, and `use` its logits on the model's thread; returns what that returns.

        Raises:
            RankError: a rank of the group is lost.
            UsageError, Exception: as of `ModelRank.run`, and of `use`.
        """
        self._send(call)
        return await self.here(partial(self._compute, call, use))

    async def here(self, work: Callable[[], T]) -> T:
        """Run `work` on the model's thread, in turn; on this rank alone, unless it was sent.

        Raises:
            RankError: a rank of the group is lost, for which the thread may wait.
            Exception: as of `work`.
        """
        if self._group is None:
            return await self.thread.run(work)
        return await self._unless_lost(self._group, work)

    async def _unless_lost(self, group: RankGroup, work: Callable[[], T]) -> T:
        """Run what was sent, if the waiter is cancelled or not: other ranks run it too.

        If one of them is lost, do not wait: the model may hang in a sum over all ranks until its own timeout.
        """
        running = self.thread.submit(work)
        lost = asyncio.ensure_future(group.failed())
        ends: list[asyncio.Future[Any]] = [running, lost]
        cancelled: asyncio.CancelledError | None = None
        try:
            while not (running.done() or lost.done()):
                try:
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError as error:
                    cancelled = error
            if not running.done():
                running.add_done_callback(_forget)
                self._check(group)
        finally:
            lost.cancel()
        if cancelled is not None:
            _forget(running)
            raise cancelled
        return running.result()

    def _compute(self, call: ModelCall, use: Callable[[torch.Tensor], T]) -> T:
        return use(self.rank.run(call))

    def _send(self, call: ModelCall) -> None:
        if self._group is not None:
            self._check(self._group)
            self._group.mark(self._encoder.encode(call))

    @staticmethod
    def _check(group: RankGroup) -> None:
        if group.failure is not None:
            raise RankError(f"the model cannot run: {group.failure}") from group.failure

    def close(self) -> None:
        """Close the thread; wait for its call, unless it may wait for a rank that is lost."""
        self.thread.close(wait=self._group is None or self._group.failure is None)

    @contextmanager
    def sequence(self) -> Iterator[int]:
        """The number of a new sequence, for the duration of a `with`; `Restore` begins it."""
        number = next(self._sequences)
        try:
            yield number
        finally:
            call = Drop(number)
            if self._group is None or self._group.failure is None:
                self._send(call)
            self.thread.start(partial(self.rank.run, call))

    def new_batch(self) -> int:
        """The number of a new batch."""
        return next(self._batches)


def _forget(running: asyncio.Future[T]) -> None:
    """Mark the error of a call that nobody waits for as retrieved."""
    if not running.cancelled():
        running.exception()
