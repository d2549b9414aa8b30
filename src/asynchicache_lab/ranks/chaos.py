"""A seeded search over groups of ranks: random traffic, storage faults per rank, slow links and lost ranks.

All ranks of a group run in one seeded loop: each has a device, memory and storage of its own, and links with
drawn delays. Every rank mirrors the forwards of the leader on a compute stream of its own, checks what it
reads against its own shard's bytes, and writes them. `asynchicache chaos --ranks` runs it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.config import CacheConfig, PrefetchOptions, PrefetchPolicy
from asynchicache.errors import BusyError, CapacityError, RankError
from asynchicache.layouts import HostLayout
from asynchicache.specs import ModelSpec
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.paged import PagedMemory
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import WritePolicy
from asynchicache_lab.chaos.ledger import Ledger, error_text
from asynchicache_lab.chaos.run import collection_watched, warnings_watched
from asynchicache_lab.chaos.search import BATCH, carry_out, quick_collection
from asynchicache_lab.ranks.delayed_link import DelayedLink
from asynchicache_lab.ranks.group import LIMITS, RankOpening, seeded_group
from asynchicache_lab.ranks.mirror import BaseRankMirror
from asynchicache_lab.ranks.oracles import wrong_sizes, wrongly_marked

PAGE = 4
MAX_STEPS = 400_000
"""Callbacks of the loop after which a seed counts as endless."""

_FAMILIES = (("kv",), ("kv", "mamba"), ("kv", "swa"), ("kv", "mamba", "swa"), ("kv", "dsa"))
_WEIGHTS = ("test", "other")
_MISFITS = ("page_size", "weight_version", "salt", "host_layout")
_HOPELESS = (CapacityError, BusyError)


@dataclass(frozen=True, slots=True)
class RankScript:
    """One run: a group's ranks, its lives, and what goes wrong.

    Attributes:
        seed: replays the run.
        ranks: ranks of each group, the leader included.
        pools: pools of the model.
        replicated: those whose bytes are the same on every rank. The ranks have one storage if there are
            any, else each its own.
        share_host: whether these lie once in host memory for all ranks.
        slots: by pool, (device, host) slots of each rank, drawn per rank; the least of all is agreed.
        wire: mean seconds of a message's way.
        lives: how many groups follow each other over the same storage.
        clients, turns: clients of each life, and the prompts of each.
        rates: storage faults of each rank.
        calm: the last life has no storage faults, and asks for what was promised before.
        forgets: between lives, the rank whose storage loses half of its pages; -1 for none.
        lost: in the last life, the rank that is lost; 0 for none.
        how: how it is lost: "closed", "silent" or "damaged".
        updates: how often the weights change in each life.
        write_policy: of the cache.
        misfit: in what the last rank differs from the others when it first tries to join; empty: in nothing.
        paged: engines own the device memory.
        tails: prefixes may end inside a page.
    """

    seed: int
    ranks: int
    pools: tuple[str, ...]
    replicated: tuple[str, ...]
    share_host: bool
    slots: tuple[Mapping[str, tuple[int, int]], ...]
    wire: float
    lives: int
    clients: int
    turns: int
    rates: tuple[FaultRates, ...]
    calm: bool
    forgets: int
    lost: int
    how: str
    updates: int
    write_policy: WritePolicy
    misfit: str
    paged: bool = False
    tails: bool = False


def draw_rank_script(seed: int) -> RankScript:
    chance = random.Random(f"ranks {seed}")
    count = chance.choice((2, 2, 3, 3, 4))
    pools = chance.choice(_FAMILIES)
    lost = chance.randrange(1, count) if chance.random() < 0.2 else 0
    faulty = chance.random() < 0.5
    replicated = tuple(name for name in pools if name != "mamba") if chance.random() < 0.4 else ()
    script = RankScript(
        seed,
        count,
        pools,
        replicated[-1:] if chance.random() < 0.3 else replicated,
        chance.random() < 0.8,
        tuple({name: _sizes(chance, name) for name in pools if name != "dsa"} for _ in range(count)),
        wire=chance.choice((1e-5, 1e-4, 1e-3)),
        lives=chance.choice((1, 2, 3, 4)),
        clients=chance.randrange(1, 6),
        turns=chance.randrange(1, 5),
        rates=tuple(_rates(chance) if faulty else FaultRates() for _ in range(count)),
        calm=chance.random() < 0.5,
        forgets=chance.randrange(count) if chance.random() < 0.3 else -1,
        lost=lost,
        how=chance.choice(("closed", "silent", "damaged")),
        updates=chance.choice((1, 2)) if chance.random() < 0.3 else 0,
        write_policy=chance.choice(tuple(WritePolicy)),
        misfit=chance.choice(_MISFITS) if chance.random() < 0.1 else "",
    )
    if seed % 3 == 1:
        return _with_engine_memory(script)
    return replace(script, tails=seed % 3 == 2)


def _with_engine_memory(script: RankScript) -> RankScript:
    """The same for engines that own their device memory; every rank has the pages that the leader names."""
    chance = random.Random(f"paged ranks {script.seed}")
    least = {name: min(one[name][0] for one in script.slots) for name in script.slots[0]}
    slots = ({name: (least[name], host) for name, (_, host) in script.slots[0].items()}, *script.slots[1:])
    policy = script.write_policy
    if policy is WritePolicy.WRITE_BACK:
        policy = WritePolicy.WRITE_THROUGH
    misfit = script.misfit and chance.choice((*_MISFITS[1:], "device memory", "number of pages"))
    return replace(script, slots=slots, write_policy=policy, misfit=misfit, paged=True)


def _sizes(chance: random.Random, pool: str) -> tuple[int, int]:
    if pool == "mamba":
        return chance.randrange(7, 14), chance.randrange(3, 12)
    return chance.randrange(20, 48), chance.randrange(20, 64)


def _rates(chance: random.Random) -> FaultRates:
    if chance.random() < 0.4:
        return FaultRates()
    rate = chance.choice((0.02, 0.1, 0.3))
    lie = rate / 2 if chance.random() < 0.3 else 0.0
    return FaultRates(fail=rate, partial=rate, late=rate / 2, hang=rate, lie=lie)


@dataclass(slots=True, eq=True)
class RankReport:
    """What a run found.

    Attributes:
        violations: descriptions of what went wrong.
        requests: requests that were served.
        tiers: tokens of their hits, by tier.
        lost: groups that went on cold, on purpose.
    """

    violations: list[str] = field(default_factory=list)
    requests: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    lost: int = 0


def run_rank_script(script: RankScript) -> RankReport:
    """Run a script in virtual time."""
    report, ledger = RankReport(), Ledger()
    known = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # faults are logged, and they are the point
    try:
        with warnings_watched(ledger), collection_watched(ledger):
            try:
                run_seeded(script.seed, partial(_lives, script, report), max_steps=MAX_STEPS)
            except Exception as error:  # noqa: BLE001 - the boundary of a run: whatever ends it is a finding
                ledger.violations.append(error_text(error))
            for _ in range(5 if ledger.violations else 1):  # finalizers of a run that did not end leave more
                gc.collect()  # leaked objects warn now, not during another run
    finally:
        logging.disable(known)
    report.violations += ledger.violations
    return report


async def _lives(script: RankScript, report: RankReport, world: SeededWorld) -> None:
    # A bound that is never reached: a store with one is told of uses, which faults strike too.
    stores = [MemoryStore(1 << 40) for _ in range(script.ranks)]
    if script.replicated:
        stores = stores[:1] * script.ranks
    prompts: list[list[int]] = []
    promised: dict[tuple[str, tuple[int, ...]], int] = {}
    weights = _WEIGHTS[0]
    if script.misfit:
        await _RankLife(script, report, world, stores, prompts, promised, weights).be_refused()
    for life in range(script.lives):
        last = life == script.lives - 1
        one = _RankLife(script, report, world, stores, prompts, promised, weights)
        weights = await one.run(lose=last and script.lost > 0, last=last)
        if script.forgets >= 0:
            _forget(stores[script.forgets], world.random)


def _forget(store: MemoryStore, chance: random.Random) -> None:
    for key in list(store):
        if chance.random() < 0.5:
            store.drop(key)


def _spec(script: RankScript) -> ModelSpec:
    spec = synthetic_spec(PAGE, script.pools)
    pools = [replace(pool, replicated=pool.name in script.replicated) for pool in spec.pools]
    return replace(spec, pools=tuple(pools))


def _misfit(spec: ModelSpec, config: CacheConfig, name: str) -> tuple[ModelSpec, CacheConfig]:
    """The model and options of a rank that differs in one thing that all must agree on."""
    if name == "page_size":
        return replace(spec, page_size=2 * PAGE), config
    other = HostLayout.LAYER_FIRST if name == "host_layout" else "misfit"
    return spec, msgspec.structs.replace(config, **{name: other})


class _RankLife:
    """One group, from its forming to its end."""

    def __init__(
        self,
        script: RankScript,
        report: RankReport,
        world: SeededWorld,
        stores: Sequence[MemoryStore],
        prompts: list[list[int]],
        promised: dict[tuple[str, tuple[int, ...]], int],
        weights: str,
    ) -> None:
        self._script = script
        self._report = report
        self._world = world
        self._stores = stores
        self._prompts = prompts
        self._promised = promised
        self._weights = weights
        self._spec = _spec(script)
        self._faults: list[Faulty] = []
        self._calm = False
        self._misfit = ""
        # Storage that lies about what it has, or loses it, breaks promises that the cache cannot keep.
        self._honest = script.forgets < 0 and not any(rates.lie for rates in script.rates)

    async def be_refused(self) -> None:
        """Open with a rank that does not fit: no group may form."""
        self._misfit, refused = self._script.misfit, False
        try:
            async with self._open():
                pass
        except* RankError:
            refused = True
        if not refused:
            self._report.violations.append(f"a rank with another {self._misfit} was accepted")

    async def run(self, *, lose: bool, last: bool) -> str:
        """Live; returns the weights in the end."""
        self._calm = last and self._script.calm
        async with self._open() as mirror:
            self._report.violations += wrong_sizes(mirror.cache, mirror.workers, self._script.slots)
            if self._honest and self._calm:
                await self._ask_promised(mirror)
            tasks = [
                asyncio.create_task(self._client(mirror, number)) for number in range(self._script.clients)
            ]
            if lose:
                await asyncio.sleep(self._world.random.expovariate(200))
                self._lose(mirror.links[self._script.lost])
            await asyncio.gather(*tasks, self._release(), self._update(mirror), self._verify(mirror))
            await self._settle(mirror, lose=lose)
            self._report.violations += mirror.violations
            served = mirror.cache.statistics().served.hit_tokens
            self._report.tiers += Counter({str(tier): count for tier, count in served.items()})
            return mirror.weights

    async def _update(self, mirror: BaseRankMirror[Any]) -> None:
        for _ in range(self._script.updates):
            await asyncio.sleep(self._world.random.expovariate(5))
            later = _WEIGHTS[1 - _WEIGHTS.index(mirror.weights)]  # pages of the first are in storage still
            await mirror.update_weights(later)

    async def _verify(self, mirror: BaseRankMirror[Any]) -> None:
        """What the ranks do agrees at any time."""
        chance = random.Random(f"{self._script.seed} verify")
        for _ in range(12):
            await asyncio.sleep(chance.expovariate(6))
            found = await mirror.cache.verify_ranks()
            if mirror.group.failure is None:
                self._report.violations += found

    def _open(self) -> AbstractAsyncContextManager[BaseRankMirror[Any]]:
        script, world = self._script, self._world
        devices = [
            world.device(mean_seconds=world.random.choice((1e-5, 1e-4, 1e-3))) for _ in range(script.ranks)
        ]
        self._faults = [
            Faulty(
                MemoryBackend(store), FaultRates() if self._calm else rates, world.random, late_seconds=1.0
            )
            for store, rates in zip(self._stores, script.rates, strict=True)
        ]
        ranks = []
        for rank, pages in enumerate(self._pages()):
            # The mirror writes garbage on its streams: at once, it would hit what a forward still reads.
            memory = PagedMemory(self._spec, pages, poison=False) if script.paged else None
            one = RankOpening(self._spec, self._config(rank), self._faults[rank], devices[rank], memory)
            ranks.append(self._misfitting(one) if rank == script.ranks - 1 else one)
        return seeded_group(world, ranks, wire=script.wire, share_host=script.share_host)

    def _misfitting(self, rank: RankOpening) -> RankOpening:
        """What the last rank opens with, if it must not fit."""
        if self._misfit == "device memory":
            return replace(rank, config=self._config(self._script.ranks - 1, paged=False), memory=None)
        if self._misfit in _MISFITS:
            spec, config = _misfit(rank.spec, rank.config, self._misfit)
            return replace(rank, spec=spec, config=config)
        return rank

    def _pages(self) -> Iterator[dict[str, int]]:
        """By rank, the pages of its engine; of the last rank too few, if that is its misfit."""
        for rank, slots in enumerate(self._script.slots):
            short = rank == self._script.ranks - 1 and self._misfit == "number of pages"
            yield {name: 1 if short else device for name, (device, _) in slots.items()}

    def _config(self, rank: int, *, paged: bool | None = None) -> CacheConfig:
        slots = self._script.slots[rank]
        paged = self._script.paged if paged is None else paged
        return CacheConfig(
            device_slots={} if paged else {name: device for name, (device, _) in slots.items()},
            host_slots={name: host for name, (_, host) in slots.items()},
            prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
            storage_limits=PoolLimits(deadline=0.2, cooldown=0.05, closing=0.1),
            write_policy=self._script.write_policy,
            tails=self._script.tails,
            weight_version=self._weights,
            rank=rank,
            ranks=self._script.ranks,
            close_seconds=0.5,
        )

    async def _release(self) -> None:
        """Let hanging storage calls go on, long after their deadline, while others are served."""
        for _ in range(8):
            await asyncio.sleep(self._world.random.expovariate(3))
            for faults in self._faults:
                faults.release()

    def _lose(self, link: DelayedLink) -> None:
        if self._script.how == "closed":
            link.close()
        elif self._script.how == "silent":
            link.send = lambda data: None  # type: ignore[method-assign]
        else:
            link.spoil = lambda data: bytes([*data[:-1], data[-1] ^ 1])

    async def _ask_promised(self, mirror: BaseRankMirror[Any]) -> None:
        """What `durable()` has promised in an earlier life is there, if no storage fails."""
        of_these = [
            (prompt, length)
            for (weights, prompt), length in self._promised.items()
            if weights == self._weights
        ]
        for prompt, length in of_these[-2:]:
            await mirror.cache.drain()  # copies of the prompt before lock host slots that this one may need
            with suppress(*_HOPELESS):
                async with mirror.cache.request([*prompt, 1]) as request:
                    if request.hit.tokens >= PAGE and request.hit.tokens // PAGE == length // PAGE:
                        length -= length % PAGE  # for a tail alone, storage is not asked
                hit, _ = await mirror.serve([*prompt, 1])
                if hit < length:
                    self._report.violations.append(
                        f"{hit} of {length} durable tokens are back after a restart"
                    )

    async def _client(self, mirror: BaseRankMirror[Any], number: int) -> None:
        chance = random.Random(f"{self._script.seed} {number} {len(self._prompts)}")
        for _ in range(self._script.turns):
            if chance.random() < 0.5:
                await asyncio.sleep(chance.expovariate(10))
            if self._prompts and chance.random() < 0.7:
                tokens = list(chance.choice(self._prompts))
                tokens = tokens[: chance.randrange(1, len(tokens) + 1)]
            else:
                tokens = [chance.randrange(3)]
            tokens += [chance.randrange(1000) for _ in range(chance.randrange(1, 24))]
            tokens = tokens[:64]
            if len(tokens) > PAGE and chance.random() < 0.5:
                tokens = tokens[: len(tokens) // PAGE * PAGE]  # it ends with a state
            self._prompts.append(tokens)
            with suppress(*_HOPELESS):
                _, promised = await mirror.serve(tokens, durable=chance.random() < 0.4)
                self._report.requests += 1
                if promised:
                    self._promised[mirror.weights, tuple(tokens)] = promised

    async def _settle(self, mirror: BaseRankMirror[Any], *, lose: bool) -> None:
        """Everything ends: no operation is left open, and the caches hold what they should."""
        for faults in self._faults:
            faults.rates = FaultRates()
            faults.release()
        await asyncio.sleep(2.0)
        if lose:
            await asyncio.sleep(2 * LIMITS.silence)
        failure = mirror.group.failure
        if (failure is None) == lose and not (lose and self._script.how == "damaged"):
            self._report.violations.append(f"the group's failure is {failure!r}, lost on purpose: {lose}")
        self._report.lost += failure is not None
        await mirror.cache.drain()
        if failure is None:
            self._report.violations += await mirror.cache.verify_ranks(idle=not self._may_leak())
            open_operations = len(mirror.group.leader)
            if open_operations:
                self._report.violations.append(f"{open_operations} operations of ranks are still open")
            if not self._script.updates and not any(rates.lie for rates in self._script.rates):
                self._report.violations += wrongly_marked(mirror.cache, self._stores)

    def _may_leak(self) -> bool:
        """Whether slots may be lost for good: to a storage call that had not ended when storage was closed,
        to be opened again under other weights."""
        return bool(self._script.updates and any(one.hang or one.late for one in self._script.rates))


@dataclass(slots=True, eq=False)
class RankFindings:
    """Totals of a search.

    Attributes:
        seeds: seeds run.
        violations: by seed, descriptions of what went wrong.
        requests: requests that were served.
        tiers: tokens of their hits, by tier.
        lost: groups that went on cold, on purpose.
        cpu_seconds: processor time.
    """

    seeds: int = 0
    violations: dict[int, list[str]] = field(default_factory=dict)
    requests: int = 0
    tiers: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    cpu_seconds: float = 0.0

    def add(self, seed: int, report: RankReport) -> None:
        self.seeds += 1
        if report.violations:
            self.violations[seed] = report.violations
        self.requests += report.requests
        self.tiers += report.tiers
        self.lost += report.lost

    def merge(self, other: RankFindings) -> None:
        self.seeds += other.seeds
        self.violations |= other.violations
        self.requests += other.requests
        self.tiers += other.tiers
        self.lost += other.lost
        self.cpu_seconds += other.cpu_seconds


def run_rank_seeds(seeds: Sequence[int]) -> RankFindings:
    """Run some seeds, one after the other."""
    found, started = RankFindings(), time.process_time()
    with quick_collection():
        for seed in seeds:
            found.add(seed, run_rank_script(draw_rank_script(seed)))
    found.cpu_seconds = time.process_time() - started
    return found


def search_ranks(
    seeds: Sequence[int], jobs: int, advance: Callable[[int, int], object] = lambda done, of: None
) -> RankFindings:
    """Run many seeds.

    Args:
        seeds: the seeds to run.
        jobs: number of processes; 1 runs them in this process.
        advance: called with the number of finished seeds and the total.
    """
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    found = RankFindings()
    for some in carry_out(run_rank_seeds, batches, jobs):
        found.merge(some)
        advance(found.seeds, len(seeds))
    return found
