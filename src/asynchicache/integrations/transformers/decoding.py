"""Continuous batching: sequences join and leave batches, and each forward decodes one token of every row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel

from asynchicache.integrations.transformers.batches import select, stack
from asynchicache.integrations.transformers.forward import decode, pads
from asynchicache.integrations.transformers.generation import GenerationJob
from asynchicache.integrations.transformers.prefix import PrefixContext
from asynchicache.integrations.transformers.snapshot import SavedStates, save_states
from asynchicache.integrations.transformers.thread import ModelThread

_SHORT = 256
"""Padding up to this number of tokens costs almost nothing."""


class Row:
    """A sequence that is being decoded.

    Attributes:
        job: the request.
        memory: the sequence's cache, before it joins a batch and after it has left.
        length: tokens that the model has computed.
        states: states at the last page boundary that a decode step reached; None before the first.
        left: done when the row has left its batch; fails if the model does.
    """

    def __init__(self, job: GenerationJob, memory: DynamicCache) -> None:
        self.job = job
        self.memory = memory
        self.length = len(job.prompt)
        self.states: SavedStates | None = None
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """Whether the row needs no more steps, or its waiter was cancelled."""
        return self.job.finish_reason is not None or self.left.done()


class DecodeBatch:
    """Rows that are decoded together.

    Shorter rows are padded, so lengths must be similar: a batch takes at most twice the memory of its rows.
    Rows of a model without padding must be of equal length.

    Attributes:
        rows: current rows; changed by `step`, on the model's thread.
        joining: rows that join at the next step.
    """

    def __init__(self, model: PreTrainedModel, context: PrefixContext) -> None:
        self.rows: list[Row] = []
        self.joining: list[Row] = []
        self._model = model
        self._context = context
        self._memory = DynamicCache()

    def fits(self, row: Row) -> bool:
        lengths = [other.length for other in (row, *self.rows, *self.joining)]
        if not pads(self._model):
            return min(lengths) == max(lengths)
        return max(lengths) <= max(2 * min(lengths), _SHORT)

    def step(self, leaving: Sequence[Row], joining: Sequence[Row]) -> list[int | RuntimeError]:
        """Remove rows, which get their own memory back, and add others; then decode one token of each row.

        Returns:
            the token, or the error, of each of `rows`, in order.
        """
        if leaving:
            self._release(leaving)
        if joining:
            self._admit(joining)
        return self._decode() if self.rows else []

    def _release(self, leaving: Sequence[Row]) -> None:
        longest = self._longest()
        for row in leaving:
            row.memory = select(self._memory, [self.rows.index(row)], longest - row.length)
            self._context.trim(row.memory)
        stay = [number for number, row in enumerate(self.rows) if row not in leaving]
        self.rows = [self.rows[number] for number in stay]
        memory = self._memory
        self._memory = select(memory, stay, longest - self._longest()) if stay else DynamicCache()

    def _admit(self, joining: Sequence[Row]) -> None:
        memories = [row.memory for row in joining]
        self._memory = stack([self._memory, *memories] if self.rows else memories, padded=True)
        self.rows = [*self.rows, *joining]
        for row in joining:
            row.memory = DynamicCache()  # the batch has a copy

    def _longest(self) -> int:
        return max((row.length for row in self.rows), default=0)

    def _decode(self) -> list[int | RuntimeError]:
        longest = self._longest()
        latest = [row.job.generated[-1] for row in self.rows]
        padding = [longest - row.length for row in self.rows]
        logits = decode(self._model, self._memory, latest, longest, padding=padding)
        for number, row in enumerate(self.rows):
            row.length += 1
            if row.length % self._context.page_size == 0 and self._context.bridge.has_states:
                row.states = save_states(self._memory, row.length, row=number)
        if (longest + 1) % self._context.page_size == 0:
            # One page more: a shorter row may be up to a page past a boundary of its own.
            self._context.trim(self._memory, more_pages=1)
        return [_choose(row, one) for row, one in zip(self.rows, logits, strict=True)]


class Decoder:
    """Steps the batches in rotation while there are rows."""

    def __init__(
        self, thread: ModelThread, model: PreTrainedModel, context: PrefixContext, *, batch_size: int
    ) -> None:
        """`batch_size`: the most rows of a batch."""
        self._thread = thread
        self._model = model
        self._context = context
        self._batch_size = batch_size
        self._joining: list[Row] = []
        self._batches: list[DecodeBatch] = []
        self._pump: asyncio.Task[None] | None = None

    async def run(self, row: Row) -> None:
        """Decode until the sequence has ended or was cancelled; then `row.memory` is its own again.

        Raises:
            Exception: the model's error.
        """
        row.job.decoding = True
        if row.over:
            return
        self._joining.append(row)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run_steps(), name="decoding")
        await row.left

    async def aclose(self) -> None:
        """Stop; remaining rows are cancelled."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])

    async def _run_steps(self) -> None:
        try:
            while self._joining or self._batches:
                self._find_batches()
                for batch in self._batches:
                    await self._run_step(batch)
                self._batches = [batch for batch in self._batches if batch.rows]
        finally:
            batches = [row for batch in self._batches for row in (*batch.rows, *batch.joining)]
            for row in (*self._joining, *batches):
                row.left.cancel()

    def _find_batches(self) -> None:
        """Assign each new row to the first batch that has room and a similar length, or to a new one."""
        for row in self._joining:
            batch = next((b for b in self._batches if self._has_room(b) and b.fits(row)), None)
            if batch is None:
                batch = DecodeBatch(self._model, self._context)
                self._batches.append(batch)
            batch.joining.append(row)
        self._joining = []

    def _has_room(self, batch: DecodeBatch) -> bool:
        return len(batch.rows) + len(batch.joining) < self._batch_size

    async def _run_step(self, batch: DecodeBatch) -> None:
        concerned = [*batch.rows, *batch.joining]
        leaving = [row for row in batch.rows if row.over]
        joining = [row for row in batch.joining if not row.over]
        batch.joining = []
        try:
            tokens = await self._thread.run(partial(batch.step, leaving, joining))
        except Exception as error:  # noqa: BLE001  a task boundary: the waiters of these rows get it
            batch.rows = []
            for row in concerned:
                _fail(row, error)
            return
        for row, token in zip(batch.rows, tokens, strict=True):
            if isinstance(token, RuntimeError):
                _fail(row, token)  # `row.over` is then true, and the row leaves at the next step
            else:
                _take(row, token)
        for row in concerned:
            if row not in batch.rows and not row.left.done():
                row.left.set_result(None)


def _choose(row: Row, logits: torch.Tensor) -> int | RuntimeError:
    """Choose a row's next token. Logits that are not finite fail this row only, not its batch."""
    try:
        return row.job.sampler.choose(logits)
    except RuntimeError as error:
        return error


def _take(row: Row, token: int) -> None:
    try:
        row.job.take(token)
    except Exception as error:  # noqa: BLE001  the user's tokenizer may raise when it decodes the output
        _fail(row, error)


def _fail(row: Row, error: Exception) -> None:
    if not row.left.done():
        row.left.set_exception(error)
