"""Draw scripts for what the cache promises at its edges: each says what a request must find at least.

As in `situations`, nothing fails here. What a request must find follows from the script alone, so these
scripts also judge what the cache never kept, of which the other oracles, which look at what is there, say
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TypeVar

import msgspec

from asynchicache.layouts import HostLayout
from asynchicache.storage.protocol import Capabilities
from asynchicache.types import PrefetchPolicy, WritePolicy
from asynchicache_lab.chaos.script import (
    CacheSizes,
    ChaosClient,
    ClientTurn,
    Life,
    ModelShape,
    Pace,
    Script,
    ScriptEvent,
    StorageLink,
)
from asynchicache_lab.chaos.situations import Situation, roomy

T = TypeVar("T", bound=msgspec.Struct)

_ROOMY = 256
"""Slots of pools in which nothing has to make room."""

LAYOUTS = (HostLayout.PAGE_FIRST_DIRECT, HostLayout.PAGE_FIRST_DIRECT, HostLayout.PAGE_FIRST)
"""Of the host pages of caches with storage; caches with different ones share no pages."""

_PATIENCE = 10.0
"""Seconds to wait for storage that is only slow."""


def draw_identities(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """The same tokens under all that may tell pages apart: namespaces and salts of requests, weights that
    change at work, and caches with other weights, salts, types and layouts over one store."""
    long = _tokens(0, 8, model)
    names = [(tenant, salt) for tenant in (None, "a", "b") for salt in (None, "", "a", "b")]

    def turn() -> ClientTurn:
        tenant, salt = chance.choice(names)
        cut = chance.randrange(model.page_size, len(long) + 1)
        one = _replaced(_turn(long[:cut], wait=chance.uniform(0, 0.002)), tenant=tenant, salt=salt)
        return _replaced(one, durable=chance.random() < 0.2, suspend=chance.choice([None, None, 1]))

    def life() -> Life:
        clients = tuple(ChaosClient(turns=tuple(turn() for _ in range(5))) for _ in range(3))
        weights = [chance.choice(["w0", "w1"]) for _ in range(chance.randrange(4))]
        return _life(
            model,
            clients=clients,
            events=tuple(ScriptEvent(what="weights", wait=0.004, weights=one) for one in weights),
            weights=chance.choice(["w0", "w1"]),
            salt=chance.choice(["", "", "s"]),
            dtype=chance.choice(["uint8", "uint8", "int8"]),
            layout=chance.choice(LAYOUTS),
            write_policy=chance.choice([*WritePolicy, WritePolicy.WRITE_THROUGH]),
        )

    return Script(seed=seed, model=model, lives=tuple(life() for _ in range(3)))


def draw_questions(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """Questions about prompts that storage never saw, beside reads of many pages over a slow wire."""
    documents = [_tokens(number, chance.randrange(10, 30), model) for number in range(chance.randrange(3, 7))]
    link = StorageLink(
        page_seconds=chance.choice([0.0005, 0.002]),
        concurrency=chance.choice([0, 1, 2]),
        batch_pages=chance.choice([0, 4]),
    )
    warm = _life(model, clients=_one_client(map(_turn, documents)))
    reads = [_turn(document, wait=chance.uniform(0, 0.001)) for document in documents]
    asks = [
        _turn(_tokens(100 + number, chance.randrange(1, 6), model), wait=chance.uniform(0, 0.05))
        for number in range(6)
    ]
    clients = tuple(ChaosClient(turns=(turn,)) for turn in (*reads, *asks))
    cold = _life(model, clients=clients, link=link, prefetch=PrefetchPolicy.WAIT_COMPLETE)
    return Script(seed=seed, model=model, lives=(warm, cold))


def draw_neighbour(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """A client without hints returns after each of many requests that are to be kept, of many namespaces."""
    model = _attention(model)
    own, names = chance.randrange(6, 17), [f"flood {number}" for number in range(chance.randrange(4, 9))]
    back = _turn(_tokens(0, own, model), wait=0.0005)
    turns = [back]
    for number in range(1, chance.randrange(14, 26)):
        flood = _turn(_tokens(number, chance.randrange(4, 9), model), wait=0.0005)
        turns.append(_replaced(flood, tenant=chance.choice(names), hint="keep"))
        turns.append(_replaced(back, least=own))
    life = _life(
        model,
        sizes=roomy(model, device=64, host=0),
        clients=_one_client(turns),
        weights=None,
        eviction=chance.choice(["lru", "size"]),
    )
    return Script(seed=seed, model=model, lives=(life,))


def draw_returns(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """A document that returns again and again, each time after it was evicted from the device."""
    pages, own = chance.randrange(6, 14), count(1)
    back = _replaced(_turn(_tokens(0, pages, model), wait=0.01), admit=True)
    flood = [_turn(_tokens(next(own), pages, model), wait=0.001) for _ in range(8)]
    # Asked for twice, it is worth a copy: from then on it is found.
    turns = [back, *flood[:2], back, *flood[2:4]]
    for number in (4, 6):
        turns += [_replaced(back, least=pages), *flood[number : number + 2]]
    life = _life(
        model,
        sizes=_sizes(model, device=2 * pages + 2, host=_ROOMY),
        clients=_one_client(turns),
        weights=None,
        write_policy=chance.choice([WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE]),
    )
    return Script(seed=seed, model=model, lives=(life,))


def draw_whole_pages(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """A prompt of whole pages is asked again, of a model with windows: from memory, and after a restart."""
    model = _replaced(_attention(model), window=chance.randrange(1, 5), near=chance.choice([0, 1, 2]))
    pages = chance.randrange(6, 14)
    prompt = _tokens(0, pages, model)[:-1]  # its last token is the last of a page
    again = _replaced(_turn(prompt, wait=0.01), least=pages - 1)
    floods = [_turn(_tokens(number, pages, model), wait=0.001) for number in (1, 2, 3)]
    first = _life(
        model,
        sizes=_sizes(model, device=2 * pages + 2, host=_ROOMY),
        clients=_one_client([_replaced(again, least=0), *floods, again]),
    )
    return Script(
        seed=seed, model=model, lives=(first, _replaced(first, clients=_one_client([again, *floods, again])))
    )


def draw_dirty_close(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """A cache that copies down as late as possible is closed: what only its device has is written first."""
    prompts = [_tokens(number, chance.randrange(3, 9), model) for number in range(chance.randrange(2, 6))]
    policy = chance.choice([WritePolicy.WRITE_BACK] * 3 + [WritePolicy.WRITE_THROUGH])
    turns = [_turn(prompt, wait=0.001) for prompt in prompts]
    first = _life(model, clients=_one_client(turns), write_policy=policy, dirty=True)
    found = [_replaced(turn, least=len(turn.prompt) // model.page_size) for turn in turns]
    return Script(
        seed=seed, model=model, lives=(first, _replaced(first, clients=_one_client(found), dirty=False))
    )


def draw_promises(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """`durable` of requests that were suspended, matched again or rest, where states and windows have few
    slots: what it promises is found after a restart."""
    sizes = _sizes(model, device=64, host=chance.choice([0, 4, 64, 64, 64]))
    for pool in model.spec().owners[1:]:
        least = (pool.coverage.pages or 0) + 1
        host = chance.choice([0, least, least + 1, 64])
        sizes[pool.name] = CacheSizes(device=least + chance.randrange(2, 6), host=host)
    numbers = count()

    def turn() -> ClientTurn:
        through = ("suspend", "rematch", "rest")[: chance.randrange(4)]
        one = _turn(_tokens(next(numbers), chance.randrange(1, 8), model), chance.uniform(0, 0.002))
        return _replaced(one, prompt=one.prompt[:-1], durable=chance.random() < 0.7, through=through)

    clients = tuple(ChaosClient(turns=tuple(turn() for _ in range(4))) for _ in range(chance.randrange(1, 4)))
    policy = chance.choice(list(WritePolicy))
    first = _life(model, sizes=sizes, clients=clients, write_policy=policy, crash=chance.random() < 0.5)
    return Script(seed=seed, model=model, lives=(first, _life(model)))


def draw_larger_than_host(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """A prefix in storage that is longer than the host memory, with states along the way."""
    model = _replaced(_attention(model), states=True)
    pages, size = chance.randrange(12, 24), model.page_size
    host = chance.randrange(pages // 2, pages - 1)
    stops = tuple(range(2 * size, pages * size, 2 * size))
    prompt = _turn(_tokens(0, pages, model))
    prompt = _replaced(prompt, stops=stops, paces=(Pace(checkpoint=True),) * (len(stops) + 1))
    first = _life(model, clients=_one_client([prompt]))
    short = _sizes(model, device=_ROOMY, host=_ROOMY)
    short["kv"] = CacheSizes(device=_ROOMY, host=host)
    again = _replaced(prompt, least=min(host, pages) // 2, stops=(), paces=())
    return Script(
        seed=seed, model=model, lives=(first, _replaced(first, sizes=short, clients=_one_client([again])))
    )


def draw_deadline(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """A long prompt of which a part has arrived when its time is over."""
    model = _attention(model)
    pages, patience = chance.randrange(30, 60), 0.1
    document = _tokens(0, pages, model)
    pools = len(model.spec().pools)
    share = chance.choice([0.3, 0.5, 0.7])  # of the pages have arrived when `patience` is over
    link = StorageLink(page_seconds=patience / share / pages / pools, concurrency=1, batch_pages=4)
    warm = _life(model, clients=_one_client([_turn(document)]))
    hurried = _replaced(_turn(document), least=int(share * pages) - 8)
    cold = _life(
        model, clients=_one_client([hurried]), link=link, prefetch=PrefetchPolicy.TIMEOUT, patience=patience
    )
    return Script(seed=seed, model=model, lives=(warm, cold))


def draw_abandoned(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """Clients ask for documents in slow storage and hang up, then one asks that stays: it has twice the time
    that it takes alone, or what the calls in flight take and it takes behind them."""
    pages, spec = chance.randrange(12, 24), model.spec()
    documents = [_turn(_tokens(number, pages, model)) for number in range(chance.randrange(8, 20))]
    link = StorageLink(
        page_seconds=0.001, concurrency=chance.choice([0, 1, 2]), batch_pages=chance.choice([0, 4])
    )
    gone = [ChaosClient(turns=(turn,), cancel=0.02) for turn in documents]
    stays = _replaced(chance.choice(documents), wait=0.03, least=pages)
    room = roomy(model, device=_ROOMY, host=len(documents) * (pages + 4) + 8)
    sizes = {name: _replaced(room[name], device=room[name].host) for name in room}
    warm = _life(model, sizes=sizes, clients=_one_client(documents), store_bytes=1 << 30)  # sheds none
    clients = (*gone, ChaosClient(turns=(stays,)))
    calls = link.concurrency or Capabilities(durable=True, checks=True).concurrency
    begun = calls * min(link.batch_pages or pages, pages)
    patience = max(2 * pages, pages + begun) * len(spec.pools) * link.page_seconds + 0.1
    policy = PrefetchPolicy.TIMEOUT
    cold = _replaced(warm, clients=clients, link=link, prefetch=policy, patience=patience)
    return Script(seed=seed, model=model, lives=(warm, cold))


def draw_queue(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """Many prompts soon after each other after a restart: each rests until its turn, and the host holds half
    of them."""
    pages, many = chance.randrange(4, 9), chance.randrange(8, 17)
    prompts = [_turn(_tokens(number, pages, model)) for number in range(many)]
    warm = _life(model, clients=_one_client(prompts))
    sizes = _sizes(model, device=_ROOMY, host=many * pages // 2 + 2)
    clients = tuple(
        ChaosClient(turns=(_replaced(turn, rest=0.05 + 0.03 * number, least=pages, wait=0.003 * number),))
        for number, turn in enumerate(prompts)
    )
    return Script(seed=seed, model=model, lives=(warm, _replaced(warm, sizes=sizes, clients=clients)))


def draw_stuck(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """The pages of one prompt hang when they are read, and it is asked for again and again; others do not."""
    pages, others = chance.randrange(6, 12), chance.randrange(2, 5)
    stuck, *prompts = [_turn(_tokens(number, pages, model)) for number in range(others + 1)]
    warm = _life(model, clients=_one_client([stuck, *prompts]))
    link = StorageLink(stuck=stuck.prompt, concurrency=chance.choice([0, 4, 8]))
    host = (others + 1) * (pages + (model.window or 0) + 4)
    again = [
        _replaced(stuck, wait=0.02, patience=0.015, hint="transient") for _ in range(chance.randrange(3, 7))
    ]
    found = [_replaced(turn, wait=0.03, least=pages) for turn in prompts]
    cold = _replaced(
        warm,
        sizes=_sizes(model, device=_ROOMY, host=host),
        clients=(*_one_client(again), *_one_client(found)),
        link=link,
    )
    return Script(seed=seed, model=model, lives=(warm, cold))


SEEDS_AN_EDGE = 40
"""Of so many seeds, one is for each remainder that is named below."""

EDGES: dict[int, Situation] = {
    **dict.fromkeys((1, 21), draw_identities),
    3: draw_larger_than_host,
    5: draw_deadline,
    **dict.fromkeys((7, 27), draw_questions),
    **dict.fromkeys((9, 29), draw_dirty_close),
    **dict.fromkeys((11, 31), draw_whole_pages),
    **dict.fromkeys((13, 33), draw_neighbour),
    **dict.fromkeys((15, 35), draw_promises),
    **dict.fromkeys((17, 37), draw_returns),
    **dict.fromkeys((19, 39), draw_abandoned),
    23: draw_queue,
    25: draw_stuck,
}
"""By the remainder of a seed, what its script is about."""


def _life(model: ModelShape, **changes: object) -> Life:
    life = Life(
        sizes=roomy(model, device=_ROOMY, host=_ROOMY),
        prefetch=PrefetchPolicy.WAIT_COMPLETE,
        patience=_PATIENCE,
    )
    return _replaced(life, **changes)


def _sizes(model: ModelShape, *, device: int, host: int) -> dict[str, CacheSizes]:
    """Attention pages as given; all else has room."""
    sizes = roomy(model, device=_ROOMY, host=_ROOMY)
    sizes["kv"] = CacheSizes(device=device, host=host)
    return sizes


def _attention(model: ModelShape) -> ModelShape:
    return _replaced(model, states=False, window=0, near=0, draft=False)


def _tokens(number: int, pages: int, model: ModelShape) -> tuple[int, ...]:
    """A prompt of its own, one token longer than whole pages."""
    first = 10_000 * (number + 1)  # apart from the request that ends each life
    return tuple(range(first, first + pages * model.page_size + 1))


def _turn(prompt: Sequence[int], wait: float = 0.0) -> ClientTurn:
    """A request that waits for storage. A promise of `durable` would be asked for before it."""
    return ClientTurn(
        prompt=tuple(prompt), patience=None, wait=round(wait, 6), paces=(Pace(checkpoint=True),) * 4
    )


def _one_client(turns: Iterable[ClientTurn]) -> tuple[ChaosClient, ...]:
    return (ChaosClient(turns=tuple(turns)),)


def _replaced(given: T, **changes: object) -> T:
    return msgspec.structs.replace(given, **changes)
