"""An engine in 200 lines: continuous batching on the cache's pages, with preemption and back-pressure."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

from paged_model import PagedModel

from asynchicache import BusyError, CapacityError, ClosedError, HybridCache, InvalidTokensError, Request

log = logging.getLogger(__name__)


class Row:
    """A prompt that waits, runs, or was preempted; its client reads `tokens`, and None is the end."""

    def __init__(self, request: Request, most: int) -> None:
        self.request = request
        self.end = len(request.tokens) + most
        self.done = 0  # tokens that the model has computed
        self.tokens: asyncio.Queue[int | None] = asyncio.Queue()
        self.error: Exception | None = None  # what ended it early


class Engine:
    """Runs one model on one cache. `async with` runs it; `generate` is for any number of tasks."""

    def __init__(self, cache: HybridCache, *, most_rows: int = 4, most_waiting: int = 64) -> None:
        self.cache, self.model, self.page = cache, PagedModel(cache), cache.spec.page_size
        self.room = self.model.keys.shape[0] * self.page  # tokens of all pages on the device
        self.most_rows, self.most_waiting = most_rows, most_waiting
        self.arriving = 0  # prompts whose storage is still read
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.preempted = 0
        self.news = asyncio.Event()
        self.stepping = asyncio.Lock()
        self.ending = False

    async def __aenter__(self) -> "Engine":
        self.loop = asyncio.create_task(self.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.ending = True  # not by cancelling: a forward in its thread would write on
        self.news.set()
        await asyncio.wait([self.loop])

    # For clients

    async def generate(self, prompt: Sequence[int], most: int) -> AsyncIterator[int]:
        """Yield up to `most` tokens; closing the iterator, or cancelling its task, frees what it holds."""
        self.check(prompt, most)
        async with AsyncExitStack() as held:
            self.arriving += 1  # before the first await: others that come meanwhile count it
            try:
                request = await held.enter_async_context(self.cache.request(prompt))
                await request.prefetch()  # storage -> host, while others compute
                request.rest()  # while it waits for its turn, it keeps only what was read for it
            finally:
                self.arriving -= 1
            self.check_open()
            row = Row(request, most)
            self.waiting.append(row)
            self.news.set()
            try:
                while (token := await row.tokens.get()) is not None:
                    yield token
                if row.error:
                    raise row.error
            finally:  # a step in another thread may still write to the row's pages: wait for its end
                async with self.stepping:
                    self.waiting = deque(one for one in self.waiting if one is not row)
                    self.running = [one for one in self.running if one is not row]

    def check(self, prompt: Sequence[int], most: int) -> None:
        """Refuse what cannot be served, or not now."""
        self.check_open()
        if (waiting := len(self.waiting) + self.arriving) >= self.most_waiting:
            raise BusyError(f"{waiting} prompts wait already: try again later")  # back-pressure
        if most < 1:
            raise ValueError(f"most is {most}; an answer has at least 1 token")
        if len(prompt) + most > self.room:
            raise CapacityError(
                f"{len(prompt)} and {most} tokens are more than the {self.room} of the device"
            )
        if (highest := max(prompt, default=0)) >= self.model.vocabulary:  # on a GPU it would end the process
            raise InvalidTokensError(
                f"token id {highest} is outside the model's vocabulary of {self.model.vocabulary}"
            )

    def check_open(self) -> None:
        if self.ending:
            raise ClosedError("the engine has ended")

    # One step after the other

    async def run(self) -> None:
        try:
            while not self.ending:
                async with self.stepping:
                    await self.admit()
                    await self.step()
                if not self.running and not self.waiting and not self.ending:
                    await self.news.wait()
                self.news.clear()
                await asyncio.sleep(0)  # clients that hung up get the lock
        finally:
            self.ending = True
            for row in (*self.running, *self.waiting):
                self.end(row, ClosedError("the engine has ended"))

    async def admit(self) -> None:
        """Start prompts in their order while there is room."""
        while self.waiting and len(self.running) < self.most_rows and not self.ending:
            row = self.waiting.popleft()
            with self.ending_only(row):
                if not await self.start(row):
                    return

    async def start(self, row: Row) -> bool:
        """Match again, load, and prefill; whether there was room."""
        row.request.rematch()  # others have published meanwhile, perhaps the same beginning
        await row.request.load()
        row.done = row.request.hit.tokens
        self.running.append(row)
        for end in sorted({*row.request.cuts, len(row.request.tokens)}):
            if not await self.make_room(row, end):
                return False
            token = await asyncio.to_thread(self.model.prefill, row.request, row.done, end)
            row.done = end
            row.request.written(self, end, states=True)  # from now on, no other length has this state
            await row.request.checkpoint(end)  # a state exists only where a forward ends
        self.take(row, token)
        return True

    async def step(self) -> None:
        """One more token for every running row, in one forward."""
        batch: list[Row] = []
        for row in list(self.running):
            with self.ending_only(row):
                if await self.make_room(row, len(row.request.tokens)):
                    batch.append(row)
        batch = [row for row in batch if row in self.running]  # room for one may have preempted another
        if not batch:
            return
        try:
            chosen = await asyncio.to_thread(self.model.decode, [row.request for row in batch])
        except Exception:
            log.exception("a forward of %d rows failed: each is prefilled again, alone", len(batch))
            for row in reversed(batch):  # the one at fault fails again there, and ends
                self.preempt(row, row.done - (row.done % self.page == 0))  # its state may be half written
            return
        for row, token in zip(batch, chosen, strict=True):
            with self.ending_only(row):
                row.done += 1
                row.request.written(self, row.done, states=True)
                if row.done % self.page == 0:
                    await row.request.snapshot(row.done)  # where the next turn, or a preempted row, goes on
                self.take(row, token)

    def take(self, row: Row, token: int) -> None:
        row.request.append([token])
        row.tokens.put_nowait(token)
        if len(row.request.tokens) == row.end:
            row.request.suspend(row.done)  # publish; the client's `async with` ends the request
            self.end(row)

    @contextmanager
    def ending_only(self, row: Row) -> Iterator[None]:
        """An error ends this row, with its cause, and no other."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - its client gets it
            self.end(row, error)

    def end(self, row: Row, error: Exception | None = None) -> None:
        self.running = [one for one in self.running if one is not row]
        row.error = error
        row.tokens.put_nowait(None)

    def preempt(self, row: Row, length: int) -> None:
        """Publish what is whole in `length` tokens, give the rest back, and let the row wait again."""
        self.running.remove(row)
        row.request.suspend(length)
        self.waiting.appendleft(row)
        self.preempted += 1

    async def make_room(self, row: Row, length: int) -> bool:
        """Pages for `length` tokens. Without room the youngest row, perhaps this one, waits again."""
        while row in self.running:
            more = max(length - row.request.reserved, 0)
            try:
                if self.running == [row]:
                    await row.request.reserve(more)  # only copies in flight can hold pages: wait for them
                else:
                    row.request.extend(more)
            except CapacityError:
                self.preempt(self.running[-1], self.running[-1].done)
            else:
                return True
        return False
