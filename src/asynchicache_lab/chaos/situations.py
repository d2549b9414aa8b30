"""Draw scripts that each create one situation, which random traffic rarely reaches.

Storage and device have no faults here, so that the oracles can judge every hit, promise and wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import TypeAlias, TypeVar

import msgspec

from asynchicache.specs import ModelSpec
from asynchicache.types import PrefetchPolicy, WritePolicy
from asynchicache_lab.chaos.recency import TOLD_SECONDS
from asynchicache_lab.chaos.script import (
    CacheSizes,
    ChaosClient,
    ClientTurn,
    Life,
    ModelShape,
    Pace,
    Script,
    ScriptEvent,
    Steady,
    StorageFaults,
)

T = TypeVar("T", bound=msgspec.Struct)
Situation: TypeAlias = Callable[[random.Random, int, ModelShape], Script]

LONGEST_PROMPT = 100_000
"""Tokens, and pages, of the longest prompt."""

_ROOMY = 128
"""Slots of pools in which nothing has to make room."""

_CALLS = ("flush", "drain", "durable", "reserve", "detach")


def draw_rush(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """Many simultaneous requests with a common prefix, with cold memory and warm storage."""
    head = tuple(range(chance.randrange(2, 9) * model.page_size))
    tails = _tails(chance, model, chance.randrange(5, 17))
    known = chance.randrange(1, len(tails))
    slow = 0.05 if chance.random() < 0.4 else 0.0
    life = Life(
        sizes=roomy(model, device=_ROOMY, host=_ROOMY),
        prefetch=chance.choice([PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.TIMEOUT]),
        patience=chance.choice([0.005, 0.05]),
        storage=StorageFaults(exists=slow),
        audit=chance.choice([0.0, 0.5]),
    )
    warm = _replaced(
        life, clients=(ChaosClient(turns=tuple(_turn(head + tail, durable=True) for tail in tails[:known])),)
    )
    waves = [_rush(chance, head, tails) for _ in range(1 if len(tails) > 11 else 2 if len(tails) > 7 else 3)]
    cold = tuple(_replaced(life, clients=wave) for wave in waves)
    return Script(seed=seed, model=model, lives=(warm, *cold))


def _rush(
    chance: random.Random, head: tuple[int, ...], tails: list[tuple[int, ...]]
) -> tuple[ChaosClient, ...]:
    """Earlier clients return with longer prompts; the others come for the first time."""
    turns = [_turn((*head, *tail, *range(7, 7 + chance.randrange(1, 9)))) for tail in tails]
    chance.shuffle(turns)
    wait = chance.choice([0.0, 0.0, 0.001])
    return tuple(
        ChaosClient(turns=(_replaced(turn, wait=round(chance.uniform(0, wait), 6)), _again(turn)))
        for turn in turns
    )


def _again(turn: ClientTurn) -> ClientTurn:
    return _replaced(turn, prompt=(*turn.prompt, 1, 2, 3), wait=0.0005)


def draw_return(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """Many simultaneous requests that resume where an earlier one ended. Other requests have since evicted
    its pages and state to the host; the cache audits some of them as they are loaded."""
    model = _replaced(model, states=True)
    size, many = model.page_size, chance.randrange(5, 11)
    shared = tuple(range(chance.randrange(1, 6) * size))
    others = [tuple(range(1000 * n, 1000 * n + 4 * size)) for n in range(1, chance.randrange(10, 16))]
    sizes = roomy(model, device=5 * many + 24, host=_ROOMY)
    sizes["mamba"] = CacheSizes(device=many + 3, host=_ROOMY)
    back = [_turn((*shared, 7, *range(tail)), wait=0.2) for tail in range(many)]
    rounds = [(*(_replaced(turn, prompt=(*turn.prompt, 3), wait=0.1) for _ in range(3)),) for turn in back]
    life = Life(
        sizes=sizes,
        clients=(
            ChaosClient(turns=(_turn((*shared, 7)), *(_turn(prompt) for prompt in others))),
            *(ChaosClient(turns=(turn, *more)) for turn, more in zip(back, rounds, strict=True)),
        ),
        audit=chance.choice([0.5, 0.9, 1.0]),
        prefetch=PrefetchPolicy.WAIT_COMPLETE,
        patience=0.05,
    )
    return Script(seed=seed, model=model, lives=(life,))


def draw_waves(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """Two waves of requests that resume at one state. The state is on the host and the pages before it are on
    the device, so both waves' copies keep the same slots.

    The first wave's copy is merged with requests whose pages are fingerprinted, so the audit delays it. The
    second wave's copy is not audited, and may end first.
    """
    model = _replaced(model, states=True)
    size, many = model.page_size, chance.randrange(6, 12)
    shared = tuple(range(chance.randrange(1, 6) * size))
    others = [tuple(range(1000 * n, 1000 * n + 4 * size)) for n in range(1, chance.randrange(10, 16))]
    sizes = roomy(model, device=5 * many + 24, host=_ROOMY)
    sizes["mamba"] = CacheSizes(device=many + 3, host=_ROOMY)
    second = round(0.2 + chance.uniform(0.0001, 0.001), 6)
    waits = [
        0.15,
        *(0.2 if number % 2 else second for number in range(1, many)),
    ]  # the first computes the pages
    back = [_replaced(_turn((*shared, 7, *range(n)), wait=wait), patience=0) for n, wait in enumerate(waits)]
    beside = [_replaced(_turn((*other, 9), wait=0.2), patience=0) for other in others[:4]]
    life = Life(
        sizes=sizes,
        clients=(
            ChaosClient(turns=(_turn((*shared, 7)), *map(_turn, others))),
            *(ChaosClient(turns=(turn,)) for turn in (*back, *beside)),
        ),
        audit=chance.choice([0.3, 0.5, 0.7]),
        hashing=1e-3,
        prefetch=PrefetchPolicy.WAIT_COMPLETE,
        patience=0.05,
    )
    return Script(seed=seed, model=model, lives=(life,))


def draw_bounded(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """Sequential conversations with a common prefix; memory holds all of them, storage only a few."""
    size = model.page_size
    head, numbers = tuple(range(chance.randrange(2, 9) * size)), count(5000)
    own = chance.randrange(2, 6)
    fit = chance.randrange(3, 7)
    durable, wait = chance.choice([0.8, 0.2, 0.0]), chance.choice([1.0, 2.0])
    turns: list[ClientTurn] = []
    for number in range(max(chance.randrange(3 * fit, 5 * fit), 17)):
        tail = tuple(next(numbers) for _ in range(own * size))
        rest = wait * TOLD_SECONDS * chance.uniform(0.6, 1.5) if chance.random() < 0.5 else 0.001
        turns.append(_turn((*head, *tail, 0), durable=chance.random() < durable, wait=round(rest, 3)))
        if number and chance.random() < 0.2:
            turns.append(_again(chance.choice(turns[-3:])))
    pages = len(head) // size + fit * (own + 1)
    first = Life(
        sizes=roomy(model, device=2 * _ROOMY, host=2 * _ROOMY),
        prefetch=PrefetchPolicy.WAIT_COMPLETE,
        write_policy=chance.choice([WritePolicy.WRITE_THROUGH] * 2 + [WritePolicy.WRITE_THROUGH_SELECTIVE]),
        clients=_in_turn(chance, turns),
        crash=chance.random() < 0.3,
    )
    forget = tuple(ScriptEvent(what="forget", wait=0.4, share=0.3) for _ in range(chance.choice([0, 0, 2])))
    last = _replaced(first, clients=(ChaosClient(turns=tuple(turns[-fit:])),), events=forget, crash=False)
    return Script(seed=seed, model=model, lives=(first, last), capacity=pages * page_bytes(model.spec()))


def _in_turn(chance: random.Random, turns: list[ClientTurn]) -> tuple[ChaosClient, ...]:
    if chance.random() < 0.6:
        return (ChaosClient(turns=tuple(turns)),)
    return ChaosClient(turns=tuple(turns[::2])), ChaosClient(turns=tuple(turns[1::2]))


def draw_steady(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """Continuous traffic, and calls that must end in spite of it."""
    size, clients = model.page_size, chance.randrange(5, 9)
    prompts = tuple(
        tuple(range(family * 100, family * 100 + chance.randrange(1, 4) * size)) for family in range(clients)
    )
    pages = chance.randrange(1, 4)
    calls = tuple(chance.sample(_CALLS, chance.choice([1, 2, 2, 3])))
    device = clients * (pages + 6) if "reserve" not in calls else clients * (pages + 5)
    life = Life(
        sizes=roomy(model, device=device, host=chance.choice([40, 2 * _ROOMY])),
        clients=(ChaosClient(turns=tuple(_turn(prompt) for prompt in prompts)),),
        store_bytes=chance.choice([1 << 12, 1 << 15, 1 << 20]),
        write_policy=chance.choice(list(WritePolicy)),
        steady=Steady(
            prompts=prompts,
            pages=pages,
            calls=calls,
            large=device * 3 // 5 if "reserve" in calls else chance.randrange(2, 5),
        ),
    )
    return Script(seed=seed, model=model, lives=(life,))


def draw_long(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """A prompt of very many pages that is queried in storage, and queried again after it was restored."""
    model = ModelShape(page_size=1, layers=2)
    prompt = tuple(range(LONGEST_PROMPT))
    client = ChaosClient(turns=(_turn(prompt), _turn((*prompt, 1))))
    sizes = {"kv": CacheSizes(device=LONGEST_PROMPT + 20, host=chance.randrange(8, 64))}
    life = Life(sizes=sizes, clients=(client,), prefetch=PrefetchPolicy.WAIT_COMPLETE, patience=0.05)
    return Script(seed=seed, model=model, lives=(life,))


def _tails(chance: random.Random, model: ModelShape, many: int) -> list[tuple[int, ...]]:
    longest = 4 * model.page_size
    return [
        tuple(range(1000 * number, 1000 * number + chance.randrange(1, longest)))
        for number in range(1, many + 1)
    ]


def _turn(prompt: tuple[int, ...], *, durable: bool = False, wait: float = 0.0) -> ClientTurn:
    return ClientTurn(
        prompt=prompt, patience=None, durable=durable, wait=wait, paces=(Pace(checkpoint=True),) * 4
    )


def _replaced(given: T, **changes: object) -> T:
    return msgspec.structs.replace(given, **changes)


def roomy(model: ModelShape, *, device: int, host: int) -> dict[str, CacheSizes]:
    """Pools that all have the same number of slots."""
    return {pool.name: CacheSizes(device=device, host=host) for pool in model.spec().owners}


def page_bytes(spec: ModelSpec) -> int:
    """Stored bytes per page of a prefix, over all pools."""
    return sum(
        pool.item_bytes(tensor, spec.page_size) * len(tensor.layers)
        for pool in spec.pools
        for tensor in pool.tensors
    )
