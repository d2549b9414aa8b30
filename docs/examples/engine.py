"""An engine in 100 lines: continuous batching on the cache's pages, with preemption and back-pressure."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence

from paged_model import PagedModel

from asynchicache import BusyError, CapacityError, ClosedError, HybridCache, Request

log = logging.getLogger(__name__)


class Row:
    """A prompt that waits, runs, or was preempted; its client reads `tokens`, and None is the end."""

    def __init__(self, request: Request, most: int) -> None:
        self.request = request
        self.end = len(request.tokens) + most
        self.done = 0  # tokens that the model has computed
        self.tokens: asyncio.Queue[int | None] = asyncio.Queue()


class Engine:
    """Runs one model on one cache. `async with` runs it; `generate` is for any number of tasks."""

    def __init__(self, cache: HybridCache, *, most_rows: int = 4, most_waiting: int = 64) -> None:
        self.cache, self.model, self.page = cache, PagedModel(cache), cache.spec.page_size
        self.room = self.model.keys.shape[0] * self.page  # tokens of all pages on the device
        self.most_rows, self.most_waiting = most_rows, most_waiting
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.preempted = 0
        self.news = asyncio.Event()
        self.stepping = asyncio.Lock()

    async def __aenter__(self) -> "Engine":
        self.loop = asyncio.create_task(self.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.loop.cancel()
        await asyncio.wait([self.loop])

    # For clients

    async def generate(self, prompt: Sequence[int], most: int) -> AsyncIterator[int]:
        """Yield up to `most` tokens; closing the iterator, or cancelling its task, frees what it holds."""
        if len(self.waiting) >= self.most_waiting:
            raise BusyError(f"{len(self.waiting)} prompts wait already: try again later")  # back-pressure
        if len(prompt) + most > self.room:
            raise CapacityError(
                f"{len(prompt)} and {most} tokens are more than the {self.room} of the device"
            )
        async with self.cache.request(prompt) as request:
            await request.prefetch()  # storage -> host, while others compute
            request.rest()  # while it waits for its turn, it keeps only what was read for it
            row = Row(request, most)
            self.waiting.append(row)
            self.news.set()
            try:
                while (token := await row.tokens.get()) is not None:
                    yield token
                if len(request.tokens) < row.end:
                    raise ClosedError("the engine has ended")
            finally:  # a step in another thread may still write to the row's pages: wait for its end
                async with self.stepping:
                    self.waiting = deque(one for one in self.waiting if one is not row)
                    self.running = [one for one in self.running if one is not row]

    # One step after the other

    async def run(self) -> None:
        try:
            while True:
                async with self.stepping:
                    await self.admit()
                    if self.running:
                        await self.step()
                if not self.running and not self.waiting:
                    await self.news.wait()
                self.news.clear()
                await asyncio.sleep(0)  # clients that hung up get the lock
        except Exception:
            log.exception("the engine failed")
        finally:
            for row in (*self.running, *self.waiting):
                row.tokens.put_nowait(None)

    async def admit(self) -> None:
        """Start prompts in their order while there is room: match again, load, and prefill."""
        while self.waiting and len(self.running) < self.most_rows:
            row = self.waiting.popleft()
            row.request.rematch()  # others have published meanwhile, perhaps the same beginning
            await row.request.load()
            row.done = row.request.hit.tokens
            self.running.append(row)
            for end in sorted({*row.request.cuts, len(row.request.tokens)}):
                if not await self.make_room(row, end):
                    return
                token = await asyncio.to_thread(self.model.prefill, row.request, row.done, end)
                row.done = end
                await row.request.checkpoint(end)  # a state exists only where a forward ends
            self.take(row, token)

    async def step(self) -> None:
        """One more token for every running row, in one forward."""
        batch = [row for row in list(self.running) if await self.make_room(row, len(row.request.tokens))]
        batch = [row for row in batch if row in self.running]  # room for one may have preempted another
        chosen = await asyncio.to_thread(self.model.decode, [row.request for row in batch])
        for row, token in zip(batch, chosen, strict=True):
            row.done += 1
            if row.done % self.page == 0:
                await row.request.snapshot(row.done)  # where the next turn, or a preempted row, goes on
            self.take(row, token)

    def take(self, row: Row, token: int) -> None:
        row.request.append([token])
        row.tokens.put_nowait(token)
        if len(row.request.tokens) == row.end:
            self.running.remove(row)
            row.request.suspend(row.done)  # publish; the client's `async with` ends the request
            row.tokens.put_nowait(None)

    async def make_room(self, row: Row, length: int) -> bool:
        """Pages for `length` tokens. Without room the youngest row, perhaps this one, waits again."""
        while row in self.running:
            more = max(length - row.request.reserved, 0)
            try:
                if self.running == [row]:
                    await row.request.reserve(
                        more
                    )  # nothing but copies in flight can hold pages: wait for them
                else:
                    row.request.extend(more)
            except CapacityError:
                victim = self.running.pop()
                victim.request.suspend(victim.done)  # what is whole is published, the rest given back
                self.waiting.appendleft(victim)
                self.preempted += 1
            else:
                return True
        return False
