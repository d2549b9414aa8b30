"""A group of the size of published runs, in one process and in virtual time.

The pools are those of a model of 397 billion parameters: its layers, heads and shards, with narrow heads, so
that the bytes of all ranks fit into one process. Every rank checks every page that it reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType
from transformers import Qwen3_5MoeTextConfig

from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.config import CacheConfig, PrefetchOptions, PrefetchPolicy
from asynchicache.ranks.leader import RankLeader
from asynchicache.reports import facts
from asynchicache.specs import ModelSpec
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache_lab.bench.ranks.options import ROUNDS, RanksOptions
from asynchicache_lab.bench.ranks.setup import LIMITS
from asynchicache_lab.ranks.group import openings, seeded_group

_CLIENTS = 8
_MAX_STEPS = 1 << 40
_TIMED = ("copy", "mark", "take", "feed")
"""What the leader does in a step, and when bytes of a follower arrive."""


def published_model(page_size: int) -> ModelSpec:
    """Qwen3.5-397B-A17B: 15 layers of attention with 2 KV heads, and 45 linear ones with 64 heads."""
    config = Qwen3_5MoeTextConfig(
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=64,
        head_dim=2,  # of 256
        linear_key_head_dim=2,  # of 128
        linear_value_head_dim=2,  # of 128
    )
    return ModelSpec.from_config(config, page_size=page_size, dtype="bfloat16")


@dataclass(slots=True, eq=False)
class SimulationReport:
    """What a simulated group did.

    Attributes:
        ranks, requests: of the run.
        violations: descriptions of wrong bytes and broken invariants.
        hit_tokens, prompt_tokens: of all requests.
        log_bytes: of the whole run; each follower gets all of them.
        leader_seconds: processor time of the leader's log: encoding entries, and answers of all followers.
    """

    ranks: int
    requests: int = 0
    violations: list[str] = field(default_factory=list)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    log_bytes: int = 0
    leader_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            **asdict(self),
            "log_bytes_per_request": self.log_bytes / self.requests,
            "leader_us_per_request": 1e6 * self.leader_seconds / self.requests,
        }

    def present(self) -> RenderableType:
        rows = [
            ("hit rate", f"{self.hit_tokens / self.prompt_tokens:.1%}"),
            ("log of a request", f"{self.log_bytes / self.requests:,.0f} B"),
            ("leader's CPU for it", f"{1e6 * self.leader_seconds / self.requests:,.0f} us"),
            ("violations", str(len(self.violations))),
        ]
        return facts(
            [*rows, *(("", one) for one in self.violations[:5])],
            f"{self.ranks} ranks, {self.requests} requests",
        )


def simulate(
    options: RanksOptions,
    advance: Callable[[int, int], object] = lambda done, of: None,
    *,
    parts: Sequence[ModelSpec] = (),
) -> SimulationReport:
    """Play all conversations over `options.ranks` ranks; deterministic but for processor time.

    Args:
        options: flags.
        advance: called with finished requests and their total.
        parts: the pools of each rank. Default: those of `published_model`, tensor-parallel.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    report = SimulationReport(options.ranks)
    if not parts:
        model = published_model(options.page_size)
        parts = [model.shard(tp=(rank, options.ranks)) for rank in range(options.ranks)]
    run_seeded(
        options.seed, lambda world: _play(world, options, parts, report, advance), max_steps=_MAX_STEPS
    )
    return report


async def _play(
    world: SeededWorld,
    options: RanksOptions,
    parts: Sequence[ModelSpec],
    report: SimulationReport,
    advance: Callable[[int, int], object],
) -> None:
    storage = [MemoryBackend(store) for store in [MemoryStore()] * len(parts)]
    ranks = openings(world, parts, _config(options), storage)
    async with seeded_group(world, ranks, limits=LIMITS) as mirror:
        leader = mirror.group.leader
        _time(leader, report)
        total = options.conversations * ROUNDS
        turns = iter(range(total))
        histories: list[list[int]] = [[] for _ in range(options.conversations)]

        async def client() -> None:
            for turn in turns:  # of all conversations in turn, so that memory has forgotten most of them
                history = histories[turn % len(histories)]
                history += (world.random.randrange(50_000) for _ in range(options.request_length))
                hit, _ = await mirror.serve(list(history))
                report.requests += 1
                report.hit_tokens += hit
                report.prompt_tokens += len(history)
                advance(report.requests, total)

        await asyncio.gather(*(client() for _ in range(_CLIENTS)))
        await mirror.cache.drain()
        await asyncio.sleep(1.0)
        failure = mirror.group.failure
        report.violations += mirror.violations + mirror.cache.verify(idle=True)
        report.violations += [] if failure is None else [str(failure)]
        report.violations += [f"{len(leader)} operations are still open"] if len(leader) else []
        report.log_bytes = leader.log_bytes


def _time(leader: RankLeader, report: SimulationReport) -> None:
    """Add the processor time of what the leader does to the report."""

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            started = time.thread_time()
            try:
                return work(*given)
            finally:
                report.leader_seconds += time.thread_time() - started

        return run

    for name in _TIMED:
        setattr(leader, name, timed(getattr(leader, name)))


def _config(options: RanksOptions) -> CacheConfig:
    """Device memory for the prompts of all clients, and twice that on the host: most comes from storage."""
    pages = (_CLIENTS + 1) * (options.pages + 1)
    states = 4 * _CLIENTS
    return CacheConfig(
        device_slots={"kv": pages, "mamba": states},
        host_slots={"kv": 2 * pages, "mamba": 2 * states},
        prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        weight_version="bench",
    )
