"""Waiting calls beside continuous traffic: each must end while the traffic continues."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import count

from asynchicache.errors import CapacityError, UsageError
from asynchicache.storage.protocol import StorageBackend
from asynchicache_lab.chaos.clients import FOREVER, ChaosEngine
from asynchicache_lab.chaos.script import ClientTurn, Steady

BOUND_SECONDS = 0.3
"""In which what was in flight when a call was made has long ended: a copy takes 0.1 ms, a storage call 0.5,
a request of this traffic 3; a request of many slots waits for some that came before."""

_BEGINNING = 0.003
"""Seconds until all clients are at work."""


class SteadyTraffic:
    """Clients that keep making requests with new pages, and the calls made meanwhile."""

    def __init__(self, engine: ChaosEngine, steady: Steady, backend: StorageBackend) -> None:
        self._engine = engine
        self._steady = steady
        self._backend = backend
        self._size = engine.cache.spec.page_size
        self._numbers = count(1_000_000)
        self._stopped = False

    async def run(self) -> None:
        """Make every call, then let the clients end."""
        clients = [asyncio.create_task(self._client(prompt)) for prompt in self._steady.prompts]
        await asyncio.sleep(_BEGINNING)
        for what in self._steady.calls:
            await self._beside(what, clients)
        self._stopped = True
        await asyncio.gather(*clients)

    async def _client(self, prompt: tuple[int, ...]) -> None:
        while not self._stopped:
            await self._one(ClientTurn(prompt=self._longer(prompt, self._steady.pages), patience=None))

    def _longer(self, prompt: tuple[int, ...], pages: int) -> tuple[int, ...]:
        """The prompt, extended by new pages."""
        return (*prompt, *(next(self._numbers) for _ in range(pages * self._size)), 0)

    async def _one(self, turn: ClientTurn) -> None:
        try:
            async with asyncio.timeout(FOREVER):
                await self._engine.serve(turn)
        except CapacityError:
            self._engine.did("refused")
            await asyncio.sleep(0)

    async def _beside(self, what: str, clients: list[asyncio.Task[None]]) -> None:
        self._engine.did(f"{what}.beside")
        task = asyncio.create_task(self._call(what), name=what)
        done, _ = await asyncio.wait(
            [task, *clients], timeout=BOUND_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if task not in done and not any(client in done for client in clients):
            self._engine.violated(
                f"wait: {what!r} did not end in {BOUND_SECONDS} s beside {len(clients)} clients that go on"
            )
            self._stopped = True
        await task

    def _call(self, what: str) -> Coroutine[object, object, object]:
        cache, large = self._engine.cache, self._longer((), self._steady.large)
        match what:
            case "flush":
                return cache.flush()
            case "drain":
                return cache.drain()
            case "durable":
                return self._one(ClientTurn(prompt=large, durable=True))
            case "reserve":
                return self._reserve(large)
            case "detach":
                return self._detach()
            case _:
                raise UsageError(f"{what!r} is none of the calls that a script may make beside traffic")

    async def _reserve(self, prompt: tuple[int, ...]) -> None:
        """Wait until all slots of a large request are free at once."""
        async with self._engine.cache.request(prompt) as request:
            await request.load()
            await request.reserve(len(prompt))

    async def _detach(self) -> None:
        await self._engine.cache.detach_storage()
        await self._engine.cache.attach_storage(self._backend)
