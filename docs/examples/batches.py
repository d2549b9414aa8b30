"""An engine over a transformers model: continuous batching in padded batches, prefixes from the cache."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TypeAlias

from transformers import DynamicCache, PreTrainedModel

from asynchicache import (
    CacheBridge,
    CacheConfig,
    ClosedError,
    HybridCache,
    InvalidTokensError,
    ModelSpec,
    Request,
)
from asynchicache.integrations.transformers.batches import select, stack
from asynchicache.integrations.transformers.demo_model import build_demo_model, encode_text
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.thread import ModelThread

log = logging.getLogger(__name__)

Step: TypeAlias = tuple[int, DynamicCache | None]
"""The next token of a row, and a copy of the row's memory if a page is full."""


class Row:
    """A sequence that is decoded; its client reads `steps`."""

    def __init__(self, memory: DynamicCache, length: int, last: int, most: int) -> None:
        self.memory = memory  # of the model, until the batch has a copy
        self.length = length  # tokens that the model has computed
        self.end = length + most
        self.last = last  # the token that it is fed next
        self.saved: int | None = length  # tokens in the request's slots; None while they are written
        self.steps: asyncio.Queue[Step | Exception] = asyncio.Queue()


class Batch:
    """Rows in one `DynamicCache`, the shorter ones padded on the left. Used on the model's thread only."""

    def __init__(self, model: PreTrainedModel, page: int) -> None:
        self.model, self.page = model, page
        self.rows: list[Row] = []
        self.memory = DynamicCache()

    def step(self, rows: list[Row]) -> list[Step]:
        """Decode one token of each row."""
        if rows != self.rows:
            self.change(rows)
        longest = max(row.length for row in rows)
        padding = [longest - row.length for row in rows]
        logits = decode(self.model, self.memory, [row.last for row in rows], longest, padding=padding)
        chosen = logits.argmax(-1).tolist()
        for row, row.last in zip(rows, chosen, strict=True):
            row.length += 1
        full = [row.length % self.page == 0 for row in rows]
        kept = [select(self.memory, [n], padding[n]) if full[n] else None for n in range(len(rows))]
        return list(zip(chosen, kept, strict=True))

    def change(self, rows: list[Row]) -> None:
        """Let rows go that have ended; others join behind those that stay."""
        stay = [number for number, row in enumerate(self.rows) if row in rows]
        parts = [row.memory for row in rows if row not in self.rows]
        if stay:
            drop = max(row.length for row in self.rows) - max(self.rows[number].length for number in stay)
            parts.insert(0, select(self.memory, stay, drop))
        self.memory = stack(parts, padded=True)
        self.rows = rows


class Engine:
    """Runs one model on one cache. `async with` runs it; `generate` is for any number of tasks."""

    def __init__(self, model: PreTrainedModel, cache: HybridCache, *, most_rows: int = 8) -> None:
        self.model, self.cache, self.page = model, cache, cache.spec.page_size
        self.bridge = CacheBridge(model.config, cache)
        self.thread = ModelThread(model.device)
        self.batch = Batch(model, self.page)
        self.places = asyncio.Semaphore(most_rows)
        self.rows: list[Row] = []
        self.news = asyncio.Event()

    async def __aenter__(self) -> "Engine":
        self.loop = asyncio.create_task(self.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.loop.cancel()
        await asyncio.wait([self.loop])
        self.thread.close()

    async def generate(self, prompt: Sequence[int], most: int) -> AsyncIterator[int]:
        """Yield `most` tokens, 1 at least; closing the iterator, or cancelling its task, ends it."""
        if (highest := max(prompt, default=0)) >= self.model.config.vocab_size:
            raise InvalidTokensError(f"token id {highest} is outside the model's vocabulary")
        async with self.places, self.cache.request(prompt) as request:
            await request.prefetch()  # storage -> host, while others compute
            await request.load()
            memory = await self.thread.run(partial(self.bridge.restore, request))
            await request.reserve(len(prompt) + most - request.hit.tokens)  # room for the whole answer
            row = Row(memory, len(prompt), await self.prefill(request, memory), most - 1)
            self.join(row)
            try:
                token = row.last
                yield token
                for _ in range(most - 1):
                    request.append([token])
                    token = await self.next_token(request, row)
                    yield token
            finally:
                self.rows = [one for one in self.rows if one is not row]
                if row.saved is not None:
                    request.checkpoint(row.saved, final=True)  # publish the answer

    def join(self, row: Row) -> None:
        if self.loop.done():
            raise ClosedError("the engine has ended")
        if row.length < row.end:
            self.rows.append(row)
            self.news.set()

    async def prefill(self, request: Request, memory: DynamicCache) -> int:
        """Compute what the cache did not have of the prompt, and publish it; the next token."""
        done, prompt = request.hit.tokens, list(request.tokens)
        for end in sorted({*request.cuts, len(prompt)}):
            logits = await self.thread.run(partial(prefill, self.model, memory, prompt, done, end))
            await self.thread.run(partial(self.bridge.save, request, memory, done, end))
            await request.checkpoint(end)
            done = end
        return int(logits.argmax())

    async def next_token(self, request: Request, row: Row) -> int:
        step = await row.steps.get()
        if isinstance(step, Exception):
            raise step
        token, kept = step
        if kept is not None:  # a full page: to the request's slots, with the state at its end
            start, stop = row.saved, int(kept.get_seq_length())
            row.saved = None
            await self.thread.run(partial(self.bridge.save, request, kept, start, stop))
            await request.snapshot(stop)
            row.saved = stop
        return token

    async def run(self) -> None:
        """Decode one token after the other for all rows."""
        try:
            while True:
                if not self.rows:
                    self.news.clear()
                    await self.news.wait()
                await self.step(list(self.rows))
                await asyncio.sleep(0)
        finally:
            for row in self.rows:
                row.steps.put_nowait(ClosedError("the engine has ended"))

    async def step(self, rows: list[Row]) -> None:
        try:
            steps: Sequence[Step | Exception] = await self.thread.run(partial(self.batch.step, rows))
        except Exception as error:
            log.exception("a forward of %d rows failed: their clients get its error", len(rows))
            self.batch = Batch(self.model, self.page)  # what it has of them may be half computed
            self.rows = [row for row in self.rows if row not in rows]
            steps = [error] * len(rows)
        for row, step in zip(rows, steps, strict=True):
            row.steps.put_nowait(step)
        self.rows = [row for row in self.rows if row.length < row.end]


async def main() -> None:
    model, config = build_demo_model()
    spec = ModelSpec.from_config(config, page_size=16)
    rules = encode_text("You answer questions about gardens. ")
    questions = ["When do roses flower?", "And tulips?", "How old do oaks and birches get?"]
    async with (
        HybridCache.open(spec, CacheConfig(device_bytes="64MiB")) as cache,
        Engine(model, cache) as engine,
    ):

        async def answer(question: str) -> bytes:
            prompt = [*rules, *encode_text(question)]
            return bytes([token async for token in engine.generate(prompt, 40)])

        together = await asyncio.gather(*map(answer, questions))
        alone = [await answer(question) for question in questions]
        print("in a batch as alone:", together == alone)


if __name__ == "__main__":
    asyncio.run(main())
