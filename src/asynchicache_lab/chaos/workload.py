"""Draw a script from a seed: models, always too small sizes, traffic with shared prefixes, and faults.

Each script omits most kinds of faults, chosen at random (swarm testing: Groce et al., ISSTA 2012): if all
faults happen at once, no operation gets far enough to fail in a new way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from asynchicache.layouts import HostLayout
from asynchicache.pools.sizing import slot_cost
from asynchicache.specs import ModelSpec
from asynchicache.transfer.local import GROUP_BYTES
from asynchicache.types import PrefetchPolicy, WritePolicy
from asynchicache_lab.chaos.edges import EDGES, SEEDS_AN_EDGE
from asynchicache_lab.chaos.script import (
    HINTS,
    PROMOTIONS,
    CacheSizes,
    ChaosClient,
    ClientTurn,
    DeviceFaults,
    Life,
    ModelShape,
    NearStore,
    Pace,
    Rivals,
    Script,
    ScriptEvent,
    StorageFaults,
)
from asynchicache_lab.chaos.situations import (
    Situation,
    draw_bounded,
    draw_long,
    draw_return,
    draw_rush,
    draw_steady,
    draw_waves,
)

MEAN_REQUESTS = 20
"""Requests of a script, about; what else happens grows with them."""

LONGEST = 12
"""Pages of the longest sequence."""

_FIRST_WAVES, _SEEDS_A_WAVE = 200, 20
"""From which seed on, and how often, a script is about waves of requests, or about one of `EDGES`."""

_CHAINED_SEEDS = 8
"""One seed of so many has a store before the shared one."""

_SUSPENDING_SEEDS = 5
"""One of so many seeds has requests that are suspended."""

_HINTED_SEEDS = 6
"""One of so many seeds has requests with hints."""

_RIVAL_SEEDS = 11
"""One of so many seeds has other replicas that meet the same pages."""

_TAIL_SEEDS = 7
"""Two of so many seeds have prefixes that end inside a page."""

TENANTS = (None, None, None, None, "alice", "bob")
WEIGHTS = ("w0", "w1")
_EVENTS = (
    "flush",
    "detach",
    "attach",
    "attach",
    "clear",
    "release",
    "restart",
    "lose",
    "forget",
    "jump",
    "look",
    "drain",
)


def draw_script(seed: int) -> Script:
    """The script of a seed; the same on every machine."""
    if seed >= _FIRST_WAVES and (edge := EDGES.get(seed % SEEDS_AN_EDGE)) is not None:
        chance = random.Random(f"edge {seed}")
        model = draw_model(chance)
        # With pages of one token, every prompt is whole pages, and has its state a page too late.
        return edge(chance, seed, msgspec.structs.replace(model, page_size=max(model.page_size, 2)))
    script = _draw(seed)
    if seed % _TAIL_SEEDS in (2, 3) and not _is_long(script):
        script = _with_tails(script)
    if seed % _HINTED_SEEDS == 4:
        script = _with_hints(script)
    if seed % _CHAINED_SEEDS == 4:
        script = _with_near_stores(script)
    # A steady life has a bound for every wait, which is shorter than the lease of a rival that dies.
    if (
        seed % _RIVAL_SEEDS == 6
        and script.capacity is None
        and not any(one.steady for one in script.every_life)
    ):
        script = _with_rivals(script)
    return _with_suspensions(script) if seed % _SUSPENDING_SEEDS == 1 else script


# What is drawn apart, so that all else of a seed stays as it was


def _with_near_stores(script: Script) -> Script:
    """Put a store before the one that all caches share, which fails in every second life."""
    chance = random.Random(f"near {script.seed}")

    def change(life: Life) -> Life:
        kinds = ("fail", "raises", "lie", "swap", "drop", "partial", "hang", "late")
        chosen = chance.sample(kinds, 2) if chance.random() < 0.5 else []
        faults = StorageFaults(**{kind: chance.choice((0.02, 0.1, 0.3)) for kind in chosen})
        nbytes = chance.choice((2000, 20_000, 1_000_000))
        promote = chance.choice(PROMOTIONS)
        return msgspec.structs.replace(life, near=NearStore(nbytes=nbytes, promote=promote, faults=faults))

    last = None if script.last is None else change(script.last)
    return msgspec.structs.replace(script, lives=tuple(map(change, script.lives)), last=last)


def _with_rivals(script: Script) -> Script:
    """Let other replicas store some of the pages, or die on the way."""
    chance = random.Random(f"rivals {script.seed}")

    def change(life: Life) -> Life:
        rivals = Rivals(rate=chance.choice((0.1, 0.5)), deaths=chance.choice((0.0, 0.3, 1.0)))
        return msgspec.structs.replace(life, rivals=rivals)

    last = None if script.last is None else change(script.last)
    return msgspec.structs.replace(script, lives=tuple(map(change, script.lives)), last=last)


def _with_hints(script: Script) -> Script:
    """Let clients say what they know about the future of some requests."""
    chance = random.Random(f"hint {script.seed}")
    kinds = chance.sample(sorted(HINTS), 3)  # mostly keeps, or mostly ends, ...

    def change(turn: ClientTurn) -> ClientTurn:
        return msgspec.structs.replace(turn, hint=chance.choice(kinds))

    return _with_turns(script, change)


def _with_larger_memory(script: Script, growth: float) -> Script:
    """Let the host memory that pools share hold as many slots, of pages that have grown."""

    def grown(life: Life) -> Life:
        return msgspec.structs.replace(life, shared=int(life.shared * growth))

    last = None if script.last is None else grown(script.last)
    return msgspec.structs.replace(script, lives=tuple(map(grown, script.lives)), last=last)


def _with_tails(script: Script) -> Script:
    """Let prefixes end inside a page.

    More requests end their sequence, and more prompts of a later life go on where an earlier one ended.
    """
    chance = random.Random(f"tails {script.seed}")
    page_size = max(script.model.page_size, chance.choice([2, 4, 8]))
    model = msgspec.structs.replace(script.model, page_size=page_size)
    script = _with_larger_memory(script, page_size / script.model.page_size)
    script = _with_model(script, model)
    most = LONGEST * model.page_size
    ended: list[ClientTurn] = []

    def change(turn: ClientTurn) -> ClientTurn:
        if ended and chance.random() < 0.6:
            before = chance.choice(ended)
            prompt = (*before.prompt, *before.output, chance.randrange(1000, 1003))[:most]
            turn = msgspec.structs.replace(
                turn,
                prompt=prompt,
                output=turn.output[: most - len(prompt)],
                tenant=before.tenant,
                stops=tuple(stop for stop in turn.stops if stop <= len(prompt)),
                patience=None,
            )
        return msgspec.structs.replace(turn, final=turn.final or chance.random() < 0.5)

    lives = []
    for life in script.lives if len(script.lives) > 1 else _halves(script.lives[0]):
        lives.append(_with_turns_of(life, change))
        ended += [turn for client in lives[-1].clients for turn in client.turns if turn.final]
    last = None if script.last is None else _with_turns_of(script.last, change)
    return msgspec.structs.replace(script, lives=tuple(lives), last=last, tails=True)


def _is_long(script: Script) -> bool:
    """Whether a prompt has many more pages than others have tokens: every tail of it would take a minute."""
    turns = (turn for life in script.lives for client in life.clients for turn in client.turns)
    return any(len(turn.prompt) > LONGEST * 8 for turn in turns)


def _halves(life: Life) -> tuple[Life, Life]:
    """A life as two, each with half of every client's requests."""

    def half(of: Callable[[tuple[ClientTurn, ...]], tuple[ClientTurn, ...]]) -> tuple[ChaosClient, ...]:
        return tuple(msgspec.structs.replace(client, turns=of(client.turns)) for client in life.clients)

    first = half(lambda turns: turns[: -(-len(turns) // 2)])
    second = half(lambda turns: turns[-(-len(turns) // 2) :])
    return msgspec.structs.replace(life, clients=first), msgspec.structs.replace(life, clients=second)


def _with_model(script: Script, model: ModelShape) -> Script:
    """A script for a model with some of the pools."""
    pools = {pool.name for pool in model.spec().pools}

    def change(life: Life) -> Life:
        sizes = {name: size for name, size in life.sizes.items() if name in pools}
        return msgspec.structs.replace(life, sizes=sizes)

    last = None if script.last is None else change(script.last)
    return msgspec.structs.replace(script, model=model, lives=tuple(map(change, script.lives)), last=last)


def _with_suspensions(script: Script) -> Script:
    """Let some of the requests be preempted."""
    chance = random.Random(f"suspend {script.seed}")

    def change(turn: ClientTurn) -> ClientTurn:
        if chance.random() < 0.5:
            return turn
        away = round(chance.expovariate(1000), 6)
        return msgspec.structs.replace(turn, suspend=chance.choice([1, 1, 2, 3, 5]), away=away)

    return _with_turns(script, change)


def _with_turns(script: Script, change: Callable[[ClientTurn], ClientTurn]) -> Script:
    """A script with every request changed."""
    lives = tuple(_with_turns_of(life, change) for life in script.lives)
    return msgspec.structs.replace(script, lives=lives)


def _with_turns_of(life: Life, change: Callable[[ClientTurn], ClientTurn]) -> Life:
    clients = [
        msgspec.structs.replace(client, turns=tuple(map(change, client.turns))) for client in life.clients
    ]
    return msgspec.structs.replace(life, clients=tuple(clients))


def _draw(seed: int) -> Script:
    chance = random.Random(f"script {seed}")
    model = draw_model(chance)
    if seed >= _FIRST_WAVES and seed % _SEEDS_A_WAVE == 0:  # other seeds keep their scripts
        return draw_waves(chance, seed, model)
    situation = chance.choices([draw for draw, _ in _SITUATIONS], [share for _, share in _SITUATIONS])[0]
    return situation(chance, seed, model)


def draw_traffic(chance: random.Random, seed: int, model: ModelShape) -> Script:
    """Random requests, without most kinds of faults."""
    together = chance.random() < 0.2
    count = chance.choice([1, 1, 2, 2, 3]) if not together else 2
    traffic = TrafficGenerator(chance, model)
    lives = tuple(_draw_life(chance, model, traffic, count, alone=not together) for _ in range(count))
    if together and chance.random() < 0.4:
        lives = tuple(_of_rank(life, rank, count) for rank, life in enumerate(lives))
    last = _draw_rest(chance, model, traffic) if any(map(_is_cut_short, lives)) else None
    return Script(seed=seed, model=model, lives=lives, together=together, last=last)


def _is_cut_short(life: Life) -> bool:
    """Whether the life may end before all of its drawn requests and events have happened."""
    faults = life.device
    failing = (
        faults.fail,
        faults.partial,
        faults.never,
        life.close,
        *(client.cancel for client in life.clients),
    )
    return any(number is not None for number in failing)


def _draw_rest(chance: random.Random, model: ModelShape, traffic: TrafficGenerator) -> Life:
    """Draw the last cache, in which every request completes."""
    life = _draw_life(chance, model, traffic, 1, alone=False)
    calm = msgspec.structs.replace(life.device, fail=None, partial=None, never=None, lie=None)
    clients = tuple(msgspec.structs.replace(client, cancel=None) for client in life.clients)
    return msgspec.structs.replace(life, device=calm, close=None, clients=clients)


_SITUATIONS: Sequence[tuple[Situation, float]] = (
    (draw_traffic, 0.75),
    (draw_rush, 0.08),
    (draw_return, 0.04),
    (draw_bounded, 0.07),
    (draw_steady, 0.056),
    (draw_long, 0.004),
)
"""What a script is about, and how often."""


def draw_model(chance: random.Random) -> ModelShape:
    """Draw one of the model families: full, with states, with windows, with an index, or with all of them."""
    family = chance.choice(["full", "states", "window", "index", "mixed", "mixed"])
    mixed = family == "mixed"
    window = chance.choice([1, 2, 3, LONGEST + 4]) if family == "window" or mixed else 0
    return ModelShape(
        page_size=chance.choice([1, 2, 4, 4]),
        layers=chance.choice([2, 3, 4, 6]),
        states=family == "states" or (mixed and chance.random() < 0.7),
        window=window,
        near=chance.choice([0, 0, 1, 2]) if window else 0,
        index=family == "index" or (mixed and chance.random() < 0.5),
        draft=mixed and chance.random() < 0.2,
        replicated=chance.random() < 0.3,
        key_bytes=chance.choice([8, 8, 1100]),  # slots of 4,096 bytes, or of up to twelve times as many
        state_bytes=chance.choice([16, 5000, 9000, 15000]),
    )


class TrafficGenerator:
    """Generates requests whose prompts share prefixes, diverge, extend, resume inside outputs, and return
    just after their pages were evicted."""

    def __init__(self, chance: random.Random, model: ModelShape) -> None:
        self._chance = chance
        self._model = model
        self._families = [[1000 * family + n for n in range(LONGEST * 4)] for family in range(2)]
        self._past: list[tuple[str | None, tuple[int, ...]]] = []  # most recently used last

    @property
    def most(self) -> int:
        """Length of the longest sequence, in tokens."""
        return LONGEST * self._model.page_size

    def turn(self, capacity: int) -> ClientTurn:
        """The next request on a cache whose device and host have `capacity` pages."""
        chance = self._chance
        tenant, start = self._start(capacity)
        tail = [
            chance.randrange(1000, 1003) for _ in range(chance.randrange(1, 2 * self._model.page_size + 2))
        ]
        prompt = (*start, *tail)[: self.most]
        room = self.most - len(prompt)
        output = tuple(chance.randrange(2) for _ in range(chance.choice([0, 0, chance.randrange(9)])))[:room]
        self._past = [one for one in self._past if one != (tenant, prompt)]
        self._past.append((tenant, (*prompt, *output)))
        return self._request(tenant, prompt, output)

    def _start(self, capacity: int) -> tuple[str | None, Sequence[int]]:
        """The tenant of the next prompt, and the tokens that it begins with."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.25 or not self._past:
            return chance.choice(TENANTS), chance.choice(self._families)[: chance.randrange(self.most)]
        tenant, tokens = self._evicted(capacity) if kind < 0.55 else chance.choice(self._past)
        if chance.random() < 0.1:
            tenant = chance.choice(TENANTS)  # same tokens in another tenant: no pages may be shared
        cut = len(tokens) if chance.random() < 0.6 else chance.randrange(len(tokens) + 1)
        return tenant, tokens[:cut]

    def _evicted(self, capacity: int) -> tuple[str | None, tuple[int, ...]]:
        """A sequence that LRU eviction would just have removed (a ghost list)."""
        used, chosen = 0, self._past[-1]
        for chosen in reversed(self._past):
            used += -(-len(chosen[1]) // self._model.page_size)
            if used > capacity:
                break
        return chosen

    def _request(self, tenant: str | None, prompt: tuple[int, ...], output: tuple[int, ...]) -> ClientTurn:
        chance = self._chance
        return ClientTurn(
            prompt=prompt,
            output=output,
            tenant=tenant,
            wait=round(chance.expovariate(2000), 6),
            patience=chance.choice([0.0, None, None, None, round(chance.uniform(0, 0.003), 6)]),
            rest=round(chance.expovariate(1000), 6) if chance.random() < 0.1 else None,
            admit=chance.random() < 0.5,
            stops=tuple(sorted({chance.randrange(1, len(prompt) + 1) for _ in range(chance.randrange(3))})),
            paces=tuple(self._pace() for _ in range(chance.randrange(2, 7))),
            abort=chance.choice([None] * 12 + [0, 1, 2]),
            final=chance.random() < 0.5,
            durable=chance.random() < 0.2,
            leaves=chance.random() < 0.3,
        )

    def _pace(self) -> Pace:
        chance = self._chance
        advance = [100, 100, chance.randrange(100)]
        return Pace(
            snapshot=chance.random() < 0.3,
            checkpoint=chance.random() < 0.5,
            advance=tuple(chance.choice(advance) for _ in range(chance.choice([0, 1, 1, 2]))),
            again=chance.randrange(101) if not self._model.states and chance.random() < 0.15 else None,
            pause=round(chance.expovariate(5000), 6) if chance.random() < 0.3 else 0.0,
        )


def _draw_life(
    chance: random.Random, model: ModelShape, traffic: TrafficGenerator, lives: int, *, alone: bool
) -> Life:
    """Draw one cache. `alone`: no other cache is open at the same time.

    Faults that may fail or hang the device are rare: a cache that serves nothing finds no further violations.
    """
    sizes = draw_sizes(chance, model)
    deadly = chance.choice(["fail", "partial", "never", "lie"]) if chance.random() < 0.2 else ""
    stored = deadly != "lie" and (chance.random() < 0.85 or lives > 1)
    requests = max(2, round(MEAN_REQUESTS / lives * chance.uniform(0.7, 1.3)))
    close = round(chance.uniform(0.001, 0.03), 6) if chance.random() < 0.15 or deadly == "never" else None
    layouts = [HostLayout.PAGE_FIRST_DIRECT] * 3 + [HostLayout.PAGE_FIRST]  # different layouts share no pages
    return Life(
        sizes=sizes,
        clients=_draw_clients(chance, traffic, requests, sizes),
        events=_draw_events(chance, requests) if chance.random() < 0.7 else (),
        weights=chance.choice([*WEIGHTS, *WEIGHTS[:1] * 3]) if stored else None,
        salt=chance.choice([""] * 6 + ["salt"]),
        layout=chance.choice(layouts) if stored else chance.choice(list(HostLayout)),
        write_policy=chance.choice(list(WritePolicy)),
        prefetch=chance.choice([*PrefetchPolicy, PrefetchPolicy.TIMEOUT]),
        eviction=chance.choice(["size", "size", "lru", "fifo"]),
        checkpoints=chance.choice(["prompt+output+branch", "prompt+branch+8", "none"]),
        store_bytes=chance.choice([1 << 12, 1 << 15, 1 << 20]),
        audit=1.0 if deadly == "lie" else chance.choice([0.0] * 3 + [0.3, 0.7, 1.0]),
        patience=chance.choice([0.005, 0.005, 0.05]),
        crash=not deadly and close is None and chance.random() < 0.1,
        group_bytes=chance.choice([1, 1, 200, GROUP_BYTES]),
        close=close,
        storage=_draw_storage_faults(chance),
        device=_draw_device_faults(chance, deadly, requests),
        refuse=chance.choice([0.0, 0.0, 0.0, 0.02, 0.1]),
        poor=chance.randrange(6) if alone and chance.random() < 0.1 else None,
        shared=_draw_shared(chance, model, sizes) if len(sizes) > 1 and chance.random() < 0.7 else 0,
    )


def _draw_shared(chance: random.Random, model: ModelShape, sizes: dict[str, CacheSizes]) -> int:
    """Draw a host memory that all pools share, of about the bytes that their own slots would take."""
    return round(host_bytes(model.spec(), sizes) * chance.uniform(0.6, 1.6))


def host_bytes(spec: ModelSpec, sizes: Mapping[str, CacheSizes]) -> int:
    """Bytes of the pools' own host slots, with a window and three pages of each at least."""
    return sum(
        max(sizes[pool.slots_of or pool.name].host, (pool.coverage.pages or 0) + 3)
        * slot_cost(pool, spec.page_size, host=True)
        for pool in spec.pools
    )


def draw_sizes(chance: random.Random, model: ModelShape) -> dict[str, CacheSizes]:
    """Draw pools that one long sequence nearly fills; some have no host memory."""
    sizes: dict[str, CacheSizes] = {}
    for pool in model.spec().owners:
        window = pool.coverage.kept if pool.per_token else 0
        if not pool.per_token:
            device = chance.randrange(4, 9)
        elif window:
            device = window + chance.randrange(1, 12)
        else:
            device = chance.randrange(LONGEST + 1, LONGEST * 2)
        host = chance.choice([0, max(window, 1) + chance.randrange(1, 8), 40])
        if not pool.coverage.trailing:
            host = chance.choice([0, LONGEST, 20, 40, 40, 40, 40])
        sizes[pool.name] = CacheSizes(device=device, host=host)
    return sizes


def _draw_clients(
    chance: random.Random, traffic: TrafficGenerator, requests: int, sizes: dict[str, CacheSizes]
) -> tuple[ChaosClient, ...]:
    full = next(iter(sizes.values()))
    count = chance.choice([1, 2, 3, 4])
    turns: list[list[ClientTurn]] = [[] for _ in range(count)]
    for _ in range(requests):
        turns[chance.randrange(count)].append(
            traffic.turn(chance.choice([full.device, full.device + full.host]))
        )
    impatient = chance.randrange(count) if chance.random() < 0.3 else None
    return tuple(
        ChaosClient(
            turns=tuple(some),
            cancel=round(chance.uniform(0, 0.01), 6) if number == impatient else None,
        )
        for number, some in enumerate(turns)
        if some
    )


def _draw_events(chance: random.Random, requests: int) -> tuple[ScriptEvent, ...]:
    """Draw concurrent events. Detached storage is usually attached again."""
    known = chance.sample(_EVENTS, chance.randrange(1, len(_EVENTS)))
    events: list[ScriptEvent] = []
    for _ in range(requests):
        what = chance.choice(known)
        events.append(_draw_event(chance, what))
        if what == "detach" and chance.random() < 0.8:
            events.append(_draw_event(chance, "attach"))
    return tuple(events)


def _draw_event(chance: random.Random, what: str) -> ScriptEvent:
    wait = round(chance.expovariate(500), 6)
    share = chance.choice([0.2, 0.5, 0.9]) if what == "forget" else 0.0
    return ScriptEvent(what=what, wait=wait, seconds=chance.choice([0.001, 0.005, 0.05, 100.0]), share=share)


def _draw_storage_faults(chance: random.Random) -> StorageFaults:
    kinds = [name for name in StorageFaults.__struct_fields__ if name != "exists" and chance.random() < 0.25]
    rate = chance.choice([0.0, 0.03, 0.1, 0.3])
    rates = dict.fromkeys(kinds, rate)
    if "hang" in rates:
        rates["hang"] = min(rate, 0.03)  # after a few hanging calls the core stops calling storage
    return StorageFaults(**rates)


def _draw_device_faults(chance: random.Random, deadly: str, requests: int) -> DeviceFaults:
    stall, lost, late = (chance.choice([0.0, 0.0, 0.05, 0.3]) for _ in range(3))
    worst = {deadly: chance.randrange(requests * 3)} if deadly else {}
    return msgspec.structs.replace(DeviceFaults(stall=stall, lost=lost, late=late), **worst)


def _of_rank(life: Life, rank: int, ranks: int) -> Life:
    """The life of one rank; each rank's cache holds a part of the model."""
    weights = life.weights and WEIGHTS[0]
    return msgspec.structs.replace(life, rank=rank, ranks=ranks, weights=weights, salt="")
