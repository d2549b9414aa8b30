"""Decoding: sequences that come and go generate in common forwards, one token each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel

from asynchicache.integrations.transformers.batches import select, stack
from asynchicache.integrations.transformers.forward import decode
from asynchicache.integrations.transformers.generation import GenerationJob
from asynchicache.integrations.transformers.prefix import PrefixContext
from asynchicache.integrations.transformers.snapshot import SavedStates, save_states
from asynchicache.integrations.transformers.thread import ModelThread

_SHORT = 256
"""Tokens below which padding costs next to nothing."""


class Row:
    """A sequence that decodes.

    Attributes:
        job: what is generated, and where it ends.
        memory: what the model works on, before it joins a batch and after it has left.
        length: tokens of the sequence that the model has computed.
        states: those at the last page boundary that a decode step has reached; None before the first.
        left: done when it is out of its batch; fails if the model does.
    """

    def __init__(self, job: GenerationJob, memory: DynamicCache) -> None:
        self.job = job
        self.memory = memory
        self.length = len(job.prompt)
        self.states: SavedStates | None = None
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """Whether it needs no more steps, or nobody waits for them."""
        return self.job.finish_reason is not None or self.left.done()


class DecodeBatch:
    """Rows that step together. Shorter ones are padded, so their lengths must not be too different: a batch
    takes at most twice the memory of its rows.

    Attributes:
        rows: those that are in; changed by `turn`, on the model's thread.
        coming: those that enter with the next turn.
    """

    def __init__(self, model: PreTrainedModel, context: PrefixContext) -> None:
        self.rows: list[Row] = []
        self.coming: list[Row] = []
        self._model = model
        self._context = context
        self._memory = DynamicCache()

    def fits(self, row: Row) -> bool:
        lengths = [other.length for other in (row, *self.rows, *self.coming)]
        return max(lengths) <= max(2 * min(lengths), _SHORT)

    def turn(self, going: Sequence[Row], coming: Sequence[Row]) -> list[int | RuntimeError]:
        """Let rows go, with memory of their own, and others come; then one token for each, in the order of
        `rows`, or why there is none."""
        if going:
            self._release(going)
        if coming:
            self._admit(coming)
        return self._step() if self.rows else []

    def _release(self, going: Sequence[Row]) -> None:
        longest = self._longest()
        for row in going:
            row.memory = select(self._memory, [self.rows.index(row)], longest - row.length)
            self._context.trim(row.memory)
        stay = [number for number, row in enumerate(self.rows) if row not in going]
        self.rows = [self.rows[number] for number in stay]
        memory = self._memory
        self._memory = select(memory, stay, longest - self._longest()) if stay else DynamicCache()

    def _admit(self, coming: Sequence[Row]) -> None:
        memories = [row.memory for row in coming]
        self._memory = stack([self._memory, *memories] if self.rows else memories, padded=True)
        self.rows = [*self.rows, *coming]
        for row in coming:
            row.memory = DynamicCache()  # the batch has a copy

    def _longest(self) -> int:
        return max((row.length for row in self.rows), default=0)

    def _step(self) -> list[int | RuntimeError]:
        longest = self._longest()
        latest = [row.job.generated[-1] for row in self.rows]
        padding = [longest - row.length for row in self.rows]
        logits = decode(self._model, self._memory, latest, longest, padding=padding)
        for number, row in enumerate(self.rows):
            row.length += 1
            if row.length % self._context.page_size == 0 and self._context.bridge.has_states:
                row.states = save_states(self._memory, row.length, row=number)
        if (longest + 1) % self._context.page_size == 0:
            self._context.trim(self._memory, more_pages=1)  # others are less than a page behind their own
        return [_choose(row, one) for row, one in zip(self.rows, logits, strict=True)]


class Decoder:
    """Runs batches in turns, for as long as there are rows."""

    def __init__(
        self, thread: ModelThread, model: PreTrainedModel, context: PrefixContext, *, batch_size: int
    ) -> None:
        """`batch_size`: rows that step together, at most."""
        self._thread = thread
        self._model = model
        self._context = context
        self._batch_size = batch_size
        self._coming: list[Row] = []
        self._batches: list[DecodeBatch] = []
        self._pump: asyncio.Task[None] | None = None

    async def run(self, row: Row) -> None:
        """Until the sequence has come to its end, or was told to; then `row.memory` is its own again.

        Raises:
            Exception: what the model raised.
        """
        row.job.decoding = True
        if row.over:
            return
        self._coming.append(row)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run_turns(), name="decoding")
        await row.left

    async def aclose(self) -> None:
        """Stop; rows that are still in are cancelled."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])

    async def _run_turns(self) -> None:
        try:
            while self._coming or self._batches:
                self._find_batches()
                for batch in self._batches:
                    await self._turn(batch)
                self._batches = [batch for batch in self._batches if batch.rows]
        finally:
            batches = [row for batch in self._batches for row in (*batch.rows, *batch.coming)]
            for row in (*self._coming, *batches):
                row.left.cancel()

    def _find_batches(self) -> None:
        """A batch for each that has come: the first that has room and suits it, or a new one."""
        for row in self._coming:
            batch = next((b for b in self._batches if self._has_room(b) and b.fits(row)), None)
            if batch is None:
                batch = DecodeBatch(self._model, self._context)
                self._batches.append(batch)
            batch.coming.append(row)
        self._coming = []

    def _has_room(self, batch: DecodeBatch) -> bool:
        return len(batch.rows) + len(batch.coming) < self._batch_size

    async def _turn(self, batch: DecodeBatch) -> None:
        concerned = [*batch.rows, *batch.coming]
        going = [row for row in batch.rows if row.over]
        coming = [row for row in batch.coming if not row.over]
        batch.coming = []
        try:
            tokens = await self._thread.run(partial(batch.turn, going, coming))
        except Exception as error:  # noqa: BLE001  a task boundary: theirs who wait for these rows
            batch.rows = []
            for row in concerned:
                _fail(row, error)
            return
        for row, token in zip(batch.rows, tokens, strict=True):
            if isinstance(token, RuntimeError):
                _fail(row, token)  # so it is over, and goes with the next turn
            else:
                _take(row, token)
        for row in concerned:
            if row not in batch.rows and not row.left.done():
                row.left.set_result(None)


def _choose(row: Row, logits: torch.Tensor) -> int | RuntimeError:
    """A row's next token; logits that are no numbers are its own misfortune, and not its batch's."""
    try:
        return row.job.sampler.choose(logits)
    except RuntimeError as error:
        return error


def _take(row: Row, token: int) -> None:
    try:
        row.job.take(token)
    except Exception as error:  # noqa: BLE001  a tokenizer of somebody's may read what the model said
        _fail(row, error)


def _fail(row: Row, error: Exception) -> None:
    if not row.left.done():
        row.left.set_exception(error)
