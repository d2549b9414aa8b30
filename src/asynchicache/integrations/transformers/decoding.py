"""Decoding: sequences that generate one token after the other, in turns."""

from __future__ import annotations

from functools import partial

from transformers import DynamicCache, PreTrainedModel

from asynchicache.integrations.transformers.forward import decode
from asynchicache.integrations.transformers.generation import Job
from asynchicache.integrations.transformers.prefix import PrefixStore
from asynchicache.integrations.transformers.snapshot import SavedStates, save_states
from asynchicache.integrations.transformers.thread import ModelThread


class Row:
    """A sequence that decodes.

    Attributes:
        job: what is generated, and where it ends.
        memory: what the model works on; `computed` tokens of the sequence.
        states: those at the last page boundary that a decode step has reached; None before the first.
    """

    def __init__(self, job: Job, memory: DynamicCache) -> None:
        self.job = job
        self.memory = memory
        self.states: SavedStates | None = None

    @property
    def computed(self) -> int:
        return int(self.memory.get_seq_length())


class Decoder:
    """Lets sequences decode, each a step at a time, so that none waits for another's end."""

    def __init__(self, thread: ModelThread, model: PreTrainedModel, store: PrefixStore) -> None:
        self._thread = thread
        self._model = model
        self._store = store

    async def run(self, row: Row) -> None:
        """Until the sequence has come to its end, or was told to."""
        job = row.job
        job.decoding = True
        while job.finish_reason is None:
            job.take(await self._thread.run(partial(self._step, row)))

    def _step(self, row: Row) -> int:
        logits = decode(self._model, row.memory, row.job.generated[-1:], row.computed)
        if row.computed % self._store.page_size == 0:
            self._store.trim(row.memory)
            if self._store.bridge.has_states:
                row.states = save_states(row.memory)
        return row.job.sampler.choose(logits[0])
