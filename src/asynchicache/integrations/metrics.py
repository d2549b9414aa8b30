"""A table of metrics of a cache: names, labels, and how each is read from the statistics.

Independent of metrics libraries; `integrations.prometheus` exports it to Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from asynchicache.controller.statistics import CacheStatistics, GroupStatistics, Occupancy
from asynchicache.histograms import Distribution
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.guard import ENGINE_CALLS
from asynchicache.storage.statistics import CallStatistics, PoolStatistics
from asynchicache.types import Outcome, ShedReason, Tier

PREFIX = "asynchicache_"

Value: TypeAlias = float | Distribution
Nested: TypeAlias = Value | Mapping[Any, Any]
"""A value, or, by label value, what is nested further. A key that is a tuple has several label values."""


class Family(NamedTuple):
    """One metric.

    Attributes:
        name: name without the prefix; counters end in `_total`, durations in `_seconds`.
        help: one-line description.
        read: reads it from the statistics, nested by `labels`.
        labels: names of its labels.
    """

    name: str
    help: str
    read: Callable[[CacheStatistics], Nested]
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """`counter`, `histogram` or `gauge`, by the ending of its name."""
        if self.name.endswith("_total"):
            return "counter"
        return "histogram" if self.name.endswith("_seconds") else "gauge"

    @property
    def full_name(self) -> str:
        return PREFIX + self.name

    def samples(self, statistics: CacheStatistics) -> Iterator[tuple[tuple[str, ...], Value]]:
        """Label values, in the order of `labels`, and the value of each sample."""
        return _flat(self.read(statistics))


def _flat(found: Nested) -> Iterator[tuple[tuple[str, ...], Value]]:
    if not isinstance(found, Mapping):
        yield (), found
        return
    for key, nested in found.items():
        words = tuple(map(_word, key if isinstance(key, tuple) else (key,)))
        for labels, value in _flat(nested):
            yield (*words, *labels), value


def _word(key: object) -> str:
    if isinstance(key, Tier):
        return key.name.lower()
    return str(key.value if isinstance(key, Enum) else key)


def _of_group(read: Callable[[GroupStatistics], Nested]) -> Callable[[CacheStatistics], Nested]:
    return lambda s: {} if s.group is None else read(s.group)


def _pools(read: Callable[[PoolStatistics], Nested]) -> Callable[[CacheStatistics], Nested]:
    return lambda s: {pool: read(stored) for pool, stored in s.storage.items()}


def _stages(read: Callable[[PoolStatistics], Nested]) -> Callable[[CacheStatistics], Nested]:
    """By stage of a chain of stores, and pool."""
    return lambda s: {
        (stage, pool): read(stored) for stage, pools in s.stages.items() for pool, stored in pools.items()
    }


def _calls(read: Callable[[CallStatistics], Nested]) -> Callable[[PoolStatistics], Nested]:
    return lambda stored: {kind.name: read(getattr(stored, kind.name)) for kind in ENGINE_CALLS}


def _outcomes(stored: PoolStatistics) -> Nested:
    """From 0 on: what a series counted before its first sample is no `increase`."""
    return {
        kind.name: dict.fromkeys((*kind.answers, Outcome.TIMEOUT), 0)
        | dict(getattr(stored, kind.name).outcomes)
        for kind in ENGINE_CALLS
    }


def _faults(calls: CallStatistics) -> Nested:
    return {"error": calls.errors, "timeout": calls.late}


def _breaker(stored: PoolStatistics) -> Nested:
    return {state: int(stored.breaker is state) for state in BreakerState}


def _tiers(pair: tuple[Nested, Nested]) -> Nested:
    return dict(zip((Tier.DEVICE, Tier.HOST), pair, strict=True))


def _states(slots: Occupancy) -> Nested:
    return {
        "free": slots.capacity - slots.held - slots.quarantined - slots.closed,
        "held": slots.held,
        "quarantined": slots.quarantined,
        "closed": slots.closed,
    }


def _slots(s: CacheStatistics) -> Nested:
    return {pool: _tiers((_states(one), _states(two))) for pool, (one, two) in s.occupancy.items()}


def _audit(s: CacheStatistics) -> Nested:
    audit = s.transfers.audit
    return {"recorded": audit.recorded, "compared": audit.compared, "mismatched": audit.mismatched}


FAMILIES = (
    # What requests were given
    Family(
        "requests_total",
        "Requests served, by why they were not given more.",
        lambda s: s.served.reasons,
        ("reason",),
    ),
    Family("prompt_tokens_total", "Prompt tokens.", lambda s: s.served.prompt_tokens),
    Family(
        "hit_tokens_total",
        "Prompt tokens served from the cache, by the farthest tier that any pool of the prefix came from.",
        lambda s: s.served.hit_tokens,
        ("tier",),
    ),
    Family(
        "missed_tokens_total",
        "Prompt tokens not served, by the pool that kept the hit from being longer, and why.",
        lambda s: s.served.missed_tokens,
        ("pool", "reason"),
    ),
    Family(
        "hit_slots_total",
        "Pages and states that hits consisted of, by where they lay before the request.",
        lambda s: s.served.hit_slots,
        ("pool", "tier"),
    ),
    Family(
        "wait_seconds",
        "How long requests waited.",
        lambda s: {"prefetch": s.prefetch_waits, "room": s.room_waits},
        ("op",),
    ),
    Family(
        "namespace_prompt_tokens_total",
        "Prompt tokens by namespace.",
        lambda s: {name: one.prompt_tokens for name, one in s.served.namespaces.items()},
        ("namespace",),
    ),
    Family(
        "namespace_hit_tokens_total",
        "Prompt tokens served from the cache, by namespace.",
        lambda s: {name: one.hit_tokens for name, one in s.served.namespaces.items()},
        ("namespace",),
    ),
    # Device and host memory
    Family("slots", "Slots by what they are: their sum is the capacity.", _slots, ("pool", "tier", "state")),
    Family(
        "evicted_slots_total",
        "Pages and states that made room.",
        lambda s: {pool: _tiers(pair) for pool, pair in s.evicted.items()},
        ("pool", "tier"),
    ),
    Family(
        "demoted_pages_total",
        "Evicted pages that live on in a lower tier of memory.",
        lambda s: s.planner.demoted,
    ),
    Family("lost_pages_total", "Evicted pages that no memory has any more.", lambda s: s.planner.lost),
    Family("backed_up_slots_total", "Pages and states that went to the host.", lambda s: s.planner.backed_up),
    Family(
        "host_pressure_slots_total",
        "Pages and states that did not, for want of host slots.",
        lambda s: s.planner.host_pressure,
    ),
    Family(
        "states_skipped_total",
        "Checkpoints without a state, for want of a device slot.",
        lambda s: s.planner.states_skipped,
    ),
    Family(
        "host_bytes",
        "Bytes of the host memory that pools share, by the pool that has them.",
        lambda s: s.host_bytes,
        ("pool",),
    ),
    Family(
        "memory_bytes",
        "Bytes of all slots of a tier; what pools share counts once.",
        lambda s: s.memory_bytes,
        ("tier",),
    ),
    Family(
        "moved_slots_total",
        "Pages and states moved within the host memory that pools share.",
        lambda s: s.planner.moved,
    ),
    Family(
        "tokens_per_end",
        "Cached tokens for each end of a path: what the traffic asks for as tokens_per_state.",
        lambda s: s.tokens_per_end,
    ),
    # Copies between device and host
    Family(
        "copied_bytes_total",
        "Bytes copied: load (host to device), backup (device to host), fork (on the device).",
        lambda s: s.transfers.nbytes,
        ("op",),
    ),
    Family(
        "copy_path_bytes_total",
        "Bytes enqueued, by the way they were copied.",
        lambda s: s.transfers.paths,
        ("pool", "path"),
    ),
    Family(
        "copy_seconds",
        "From the submission of a copy until its bytes had landed.",
        lambda s: s.transfers.latencies,
        ("op",),
    ),
    Family("copy_launches_total", "Transfers that copies were merged into.", lambda s: s.transfers.launches),
    Family("copies_failed_total", "Copies that failed.", lambda s: s.traffic.copies_failed),
    Family("copies_in_flight", "Copies in flight.", lambda s: s.transfers.in_flight),
    Family("audit_slots_total", "Pages whose fingerprints were taken and compared.", _audit, ("result",)),
    # Storage
    Family("read_slots_total", "Pages and states that came from storage.", lambda s: s.pages_read),
    Family(
        "stored_slots_total",
        "Pages and states that went to storage, or were there already.",
        lambda s: s.traffic.stored,
    ),
    Family(
        "shed_slots_total",
        "Attempts to write a page or state that did not get it to storage, by why.",
        lambda s: dict.fromkeys(ShedReason, 0) | dict(s.traffic.shed),
        ("reason",),
    ),
    Family("storing_bytes", "Bytes of storage writes in flight.", lambda s: s.storing_bytes),
    Family(
        "storage_pages_total",
        "Pages of calls to storage, by outcome.",
        _pools(_outcomes),
        ("pool", "op", "outcome"),
    ),
    Family(
        "storage_bytes_total",
        "Bytes read and stored.",
        _pools(_calls(lambda calls: calls.bytes)),
        ("pool", "op"),
    ),
    Family(
        "storage_call_seconds",
        "Latency of calls to storage; late ones up to their deadline.",
        _pools(_calls(lambda calls: calls.latencies)),
        ("pool", "op"),
    ),
    Family(
        "storage_faults_total",
        "Calls to storage that raised or answered nonsense (error), or came too late (timeout).",
        _pools(_calls(_faults)),
        ("pool", "op", "reason"),
    ),
    Family(
        "storage_calls_running", "Calls that have not ended.", _pools(lambda pool: pool.running), ("pool",)
    ),
    Family(
        "storage_calls_lingering",
        "Those past their deadline; no caller waits for them.",
        _pools(lambda pool: pool.lingering),
        ("pool",),
    ),
    Family("storage_breaker", "1 for the state that the breaker is in.", _pools(_breaker), ("pool", "state")),
    Family(
        "storage_breaker_opened_total",
        "How often the breaker opened.",
        _pools(lambda pool: pool.opened),
        ("pool",),
    ),
    Family(
        "storage_full",
        "1 while storage refuses to take more.",
        _pools(lambda pool: int(pool.full)),
        ("pool",),
    ),
    Family(
        "storage_known_pages",
        "Pages that storage is known to have (there), or to have damaged.",
        _pools(lambda pool: {"there": pool.known.there, "damaged": pool.known.damaged}),
        ("pool", "state"),
    ),
    Family(
        "storage_recalled_pages_total",
        "Pages that storage was not asked for, because they are known.",
        _pools(lambda pool: pool.known.recalled),
        ("pool",),
    ),
    # Stages of a chain of stores
    Family(
        "stage_hit_tokens_total",
        "Those of hit_tokens_total from storage, by the farthest stage that a page was read from.",
        lambda s: s.served.stage_tokens,
        ("stage",),
    ),
    Family(
        "storage_stage_pages_total",
        "Pages of calls to a stage, by outcome.",
        _stages(_outcomes),
        ("stage", "pool", "op", "outcome"),
    ),
    Family(
        "storage_stage_bytes_total",
        "Bytes read from a stage and stored there.",
        _stages(_calls(lambda calls: calls.bytes)),
        ("stage", "pool", "op"),
    ),
    Family(
        "storage_stage_call_seconds",
        "Latency of calls to a stage; late ones up to their deadline.",
        _stages(_calls(lambda calls: calls.latencies)),
        ("stage", "pool", "op"),
    ),
    Family(
        "storage_stage_faults_total",
        "Calls to a stage that raised or answered nonsense (error), or came too late (timeout).",
        _stages(_calls(_faults)),
        ("stage", "pool", "op", "reason"),
    ),
    Family(
        "storage_stage_breaker",
        "1 for the state that the breaker of a stage is in.",
        _stages(_breaker),
        ("stage", "pool", "state"),
    ),
    Family(
        "storage_stage_shed_pages_total",
        "Pages that a stage did not get from others, or because it was behind.",
        _stages(lambda pool: pool.shed),
        ("stage", "pool"),
    ),
    # Other ranks of a sharded model
    Family(
        "rank_lag_seconds",
        "From an entry of the log to a rank's answer.",
        _of_group(lambda group: {rank: one.lag for rank, one in group.ranks.items()}),
        ("rank",),
    ),
    Family(
        "rank_lost",
        "1 for the rank that ended the group.",
        _of_group(lambda group: {rank: int(one.lost) for rank, one in group.ranks.items()}),
        ("rank",),
    ),
    Family("ranks_failed", "1 if the group goes on cold.", _of_group(lambda group: int(group.failed))),
    Family(
        "ranks_log_bytes_total",
        "Bytes of the log; each follower gets all of them.",
        _of_group(lambda group: group.log_bytes),
    ),
    Family("ranks_steps_total", "Steps that were marked.", _of_group(lambda group: group.steps)),
    Family(
        "ranks_open_operations",
        "Operations that some rank has not answered.",
        _of_group(lambda group: group.open_operations),
    ),
)
