"""What belongs to something else, streams and event loops, is refused at the call; closing is no crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynchicache import CacheConfig, HybridCache, Request
from asynchicache.errors import ClosedError, UsageError
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.specs import synthetic_spec
from asynchicache.transfer.ticket import Ticket
from cache.interruptions import public_coroutines

SPEC = synthetic_spec(4, ("kv", "mamba"))
CONFIG = CacheConfig(
    device_slots={"kv": 16, "mamba": 8}, host_slots={"kv": 16, "mamba": 8}, weight_version="1"
)
PROMPT = range(17)


class TorchStream:
    """What `torch.cuda.current_stream()` looks like."""

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> None: ...

    def synchronize(self) -> None: ...


NAMED: dict[str, Callable[[Request, Ticket, Any], object]] = {
    "advance": lambda request, _, stream: request.advance(4, after=stream),
    "checkpoint": lambda request, _, stream: request.checkpoint(8, after=stream),
    "snapshot": lambda request, _, stream: request.snapshot(8, after=stream),
    "suspend": lambda request, _, stream: request.suspend(8, after=stream),
    "close": lambda request, _, stream: request.close(after=stream),
    "fence": lambda _, ticket, stream: ticket.fence(1).wait_on(stream),
}


@pytest.mark.parametrize("what", ["torch", "another device"])
@pytest.mark.parametrize("call", NAMED)
@pytest.mark.asyncio
async def test_a_stream_of_something_else_is_refused_and_nothing_is_lost(call: str, what: str):
    other = EmulatedDevice(ThreadDriver())
    stream: Any = TorchStream() if what == "torch" else other.stream("compute")
    async with HybridCache.open(SPEC, CONFIG) as cache:
        with pytest.raises(UsageError, match=r"no stream of this cpu device.*wrap"):
            cache.request(PROMPT, stream=stream)
        async with cache.request(PROMPT, stream=cache.device.stream("compute")) as request:
            await (ticket := request.load())
            request.extend(17)
            with pytest.raises(UsageError, match="no stream of this cpu device"):
                NAMED[call](request, ticket, stream)
            await request.checkpoint(16)
        await cache.drain()
        assert cache.verify(idle=True) == []
        async with cache.request(PROMPT) as request:
            assert request.hit.tokens == 16
    other.close()


CALLS: dict[str, Callable[[HybridCache], Coroutine[Any, Any, Any]]] = {
    "aclose": lambda cache: cache.aclose(),
    "drain": lambda cache: cache.drain(),
    "warm": lambda cache: cache.warm([PROMPT]),
    "sync": lambda cache: cache.sync(),
    "flush": lambda cache: cache.flush(),
    "verify_ranks": lambda cache: cache.verify_ranks(),
    "attach_stage": lambda cache: cache.attach_stage("near"),
    "attach_storage": lambda cache: cache.attach_storage("memory"),
    "detach_storage": lambda cache: cache.detach_storage(),
    "clear_storage": lambda cache: cache.clear_storage(),
    "update_weights": lambda cache: cache.update_weights("2"),
    "snapshot": lambda cache: cache.snapshot(),
}
VERBS = {"prefetch": (), "admit": (), "reserve": (4,), "durable": (), "__aenter__": ()}


def test_another_event_loop_is_told_so_instead_of_waiting_for_ever():
    """A server that opened its cache in one `asyncio.run` and serves in the next."""
    names = [name.split(".") for name in public_coroutines()]
    assert {name for kind, name in names if kind.endswith("Cache")} == CALLS.keys()
    assert {name for kind, name in names if kind.endswith("Request")} == {*VERBS, "__aexit__"}

    async def here() -> tuple[HybridCache, Request, Request, Any]:
        cache = await HybridCache.open(SPEC, CONFIG)
        entered = cache.request(PROMPT)
        await entered.__aenter__()
        await entered.load()
        return cache, entered, cache.request(PROMPT), cache.events()

    async def there() -> None:
        for call in CALLS.values():
            with pytest.raises(UsageError, match="belongs to the event loop that opened it"):
                await call(cache)
        for call in (lambda: cache.request(PROMPT), cache.events):
            with pytest.raises(UsageError, match="belongs to the event loop"):
                call()
        for verb, arguments in VERBS.items():
            request = made if verb == "__aenter__" else entered
            with pytest.raises(UsageError, match="belongs to the event loop"):
                await getattr(request, verb)(*arguments)
        with pytest.raises(UsageError, match="the subscription belongs to the event loop"):
            await anext(events)

    async def here_again() -> None:
        entered.close()
        assert cache.verify(idle=True) == []
        await cache.aclose()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        cache, entered, made, events = first.run(here())
        second.run(there())
        first.run(here_again())


@pytest.mark.parametrize(
    "call", ["update_weights", "attach_storage", "detach_storage", "clear_storage", "sync", "flush"]
)
@pytest.mark.asyncio
async def test_closing_meanwhile_is_no_crash(call: str, tmp_path: Path):
    """At whatever step the cache is closed, the call ends, by its result or ClosedError."""
    for steps in range(16):
        named = {"storage": "file", "storage_options": {"path": str(tmp_path / str(steps))}}
        config = CONFIG if call == "attach_storage" else msgspec.structs.replace(CONFIG, **named)
        cache = await HybridCache.open(SPEC, config)
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(17)
            await request.checkpoint(16)
        arguments = {"update_weights": ("2",), "attach_storage": tuple(named.values())}.get(call, ())
        task = asyncio.ensure_future(getattr(cache, call)(*arguments))
        for _ in range(steps):
            await asyncio.sleep(0)
        await cache.aclose()
        with suppress(ClosedError):
            await task


@pytest.mark.parametrize(
    "call",
    [
        lambda request: request.extend(1),
        lambda request: request.append([1]),
        lambda request: request.suspend(16),
        lambda request: request.checkpoint(16),
        lambda request: request.advance(16),
        lambda request: request.close(),
    ],
    ids=["extend", "append", "suspend", "checkpoint", "advance", "close"],
)
@pytest.mark.asyncio
async def test_a_call_from_another_thread_is_refused(call: Callable[[Request], object]):
    async with HybridCache.open(SPEC, CONFIG) as cache, cache.request(PROMPT) as request:
        await request.load()
        request.extend(17)
        with pytest.raises(UsageError, match="belongs to the thread of its event loop"):
            await asyncio.to_thread(call, request)
    assert cache.verify(idle=True) == []
