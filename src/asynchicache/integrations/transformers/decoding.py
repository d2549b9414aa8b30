"""Continuous batching: sequences join and leave batches, and each forward decodes one token of every row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from asynchicache.integrations.transformers.calls import Decode
from asynchicache.integrations.transformers.forward import pads
from asynchicache.integrations.transformers.generation import GenerationJob
from asynchicache.integrations.transformers.prefix import PrefixContext

_SHORT = 256
"""Padding up to this number of tokens costs almost nothing."""


class Row:
    """A sequence that is being decoded.

    Attributes:
        sequence: its number in the model's memory.
        length: tokens that the model has computed.
        kept: the last page boundary that a decode step reached, whose states were kept, or None.
        left: done when the row has left its batch; fails if the model does.
    """

    def __init__(self, job: GenerationJob, sequence: int) -> None:
        self.job = job
        self.sequence = sequence
        self.length = len(job.prompt)
        self.kept: int | None = None
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
        number: of the batch in the model's memory.
        joining: rows that join at the next step.
    """

    def __init__(self, number: int, *, padded: bool) -> None:
        self.number = number
        self.rows: list[Row] = []
        self.joining: list[Row] = []
        self._padded = padded

    def fits(self, row: Row) -> bool:
        lengths = [other.length for other in (row, *self.rows, *self.joining)]
        if not self._padded:
            return min(lengths) == max(lengths)
        return max(lengths) <= max(2 * min(lengths), _SHORT)

    def step(self) -> Decode:
        """Let rows go that are over, and others join; returns the call that decodes one token of each."""
        leaving = [row for row in self.rows if row.over]
        joining = [row for row in self.joining if not row.over]
        self.rows = [row for row in self.rows if row not in leaving] + joining
        self.joining = []
        return Decode(
            self.number,
            [row.sequence for row in leaving],
            [row.sequence for row in joining],
            [row.job.generated[-1] for row in self.rows],
        )


class Decoder:
    """Steps the batches in rotation while there are rows."""

    def __init__(self, model: PreTrainedModel, context: PrefixContext, *, batch_size: int) -> None:
        """`batch_size`: the most rows of a batch."""
        self._padded = pads(model)
        self._context = context
        self._batch_size = batch_size
        self._joining: list[Row] = []
        self._batches: list[DecodeBatch] = []
        self._pump: asyncio.Task[None] | None = None

    async def run(self, row: Row) -> None:
        """Decode until the sequence has ended or was cancelled; then it is out of its batch again.

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
                batch = DecodeBatch(self._context.calls.new_batch(), padded=self._padded)
                self._batches.append(batch)
            batch.joining.append(row)
        self._joining = []

    def _has_room(self, batch: DecodeBatch) -> bool:
        return len(batch.rows) + len(batch.joining) < self._batch_size

    async def _run_step(self, batch: DecodeBatch) -> None:
        concerned = [*batch.rows, *batch.joining]
        call = batch.step()
        try:
            tokens = await self._context.calls.compute(call, partial(_choose_all, batch.rows))
        except Exception as error:  # noqa: BLE001  a task boundary: the waiters of these rows get it
            batch.rows = []
            for row in concerned:
                _fail(row, error)
            return
        for row, token in zip(batch.rows, tokens, strict=True):
            row.length += 1
            if self._context.has_states and row.length % self._context.page_size == 0:
                row.kept = row.length
            if isinstance(token, RuntimeError):
                _fail(row, token)  # `row.over` is then true, and the row leaves at the next step
            else:
                _take(row, token)
        for row in concerned:
            if row not in batch.rows and not row.left.done():
                row.left.set_result(None)


def _choose_all(rows: Sequence[Row], logits: torch.Tensor) -> list[int | RuntimeError]:
    return [_choose(row, one) for row, one in zip(rows, logits, strict=True)]


def _choose(row: Row, logits: torch.Tensor) -> int | RuntimeError:
    """Choose a row's next token. Logits that are not finite fail this row only, not its batch."""
    try:
        return row.job.choose(logits)
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
