"""A table of metrics of a cache: names, labels, and how each is read from the statistics.

Independent of metrics libraries; `integrations.prometheus` exports it to Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from asynchicache.controller.statistics import CacheStatistics, GroupStatistics, Occupancy, RankStatistics
from asynchicache.histograms import Distribution
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.statistics import CallStatistics, PoolStatistics
from asynchicache.types import Tier

PREFIX = "asynchicache_"

Value: TypeAlias = float | Distribution
Samples: TypeAlias = Iterable[tuple[tuple[str, ...], Value]]
"""Label values, in the order of the family's labels, and the value."""

_OPS = ("exists", "get", "put", "delete", "touch")


class Family(NamedTuple):
    """One metric.

    Attributes:
        name: name without the prefix; counters end in `_total`, durations in `_seconds`.
        help: one-line description.
        labels: names of its labels.
        samples: reads it from the statistics.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[CacheStatistics], Samples]

    @property
    def kind(self) -> str:
        """`counter`, `histogram` or `gauge`, by the ending of its name."""
        if self.name.endswith("_total"):
            return "counter"
        return "histogram" if self.name.endswith("_seconds") else "gauge"

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _tier(tier: Tier) -> str:
    return tier.name.lower()


def _by_rank(read: Callable[[RankStatistics], Value]) -> Callable[[CacheStatistics], Samples]:
    def samples(statistics: CacheStatistics) -> Samples:
        ranks = {} if statistics.group is None else statistics.group.ranks
        return (((str(rank),), read(one)) for rank, one in ranks.items())

    return samples


def _of_group(read: Callable[[GroupStatistics], Value]) -> Callable[[CacheStatistics], Samples]:
    return lambda statistics: [] if statistics.group is None else [((), read(statistics.group))]


def _slots(statistics: CacheStatistics) -> Samples:
    for pool, tiers in statistics.occupancy.items():
        for tier, occupancy in zip((Tier.DEVICE, Tier.HOST), tiers, strict=True):
            for state, count in _states(occupancy):
                yield (pool, _tier(tier), state), count


def _states(slots: Occupancy) -> Iterator[tuple[str, int]]:
    yield "free", slots.capacity - slots.held - slots.quarantined - slots.closed
    yield "held", slots.held
    yield "quarantined", slots.quarantined
    yield "closed", slots.closed


def _evicted(statistics: CacheStatistics) -> Samples:
    for pool, (device, host) in statistics.evicted.items():
        yield (pool, _tier(Tier.DEVICE)), device
        yield (pool, _tier(Tier.HOST)), host


Pools: TypeAlias = Iterator[tuple[tuple[str, ...], PoolStatistics]]
"""Label values, and the statistics of one pool in storage."""


def _pools(statistics: CacheStatistics) -> Pools:
    """By pool."""
    return (((pool,), stored) for pool, stored in statistics.storage.items())


def _stages(statistics: CacheStatistics) -> Pools:
    """By stage of a chain of stores, and pool."""
    for stage, pools in statistics.stages.items():
        for pool, stored in pools.items():
            yield (stage, pool), stored


def _by_pool(
    read: Callable[[PoolStatistics], Value], pools: Callable[[CacheStatistics], Pools] = _pools
) -> Callable[[CacheStatistics], Samples]:
    return lambda statistics: ((labels, read(stored)) for labels, stored in pools(statistics))


def _by_state(
    read: Callable[[PoolStatistics], Iterable[tuple[str, Value]]],
    pools: Callable[[CacheStatistics], Pools] = _pools,
) -> Callable[[CacheStatistics], Samples]:
    return lambda statistics: (
        ((*labels, state), value) for labels, stored in pools(statistics) for state, value in read(stored)
    )


def _by_call(
    read: Callable[[CallStatistics], Value], pools: Callable[[CacheStatistics], Pools] = _pools
) -> Callable[[CacheStatistics], Samples]:
    return _by_state(lambda stored: ((op, read(getattr(stored, op))) for op in _OPS), pools)


def _by_outcome(
    read: Callable[[CallStatistics], Iterable[tuple[str, Value]]],
    pools: Callable[[CacheStatistics], Pools] = _pools,
) -> Callable[[CacheStatistics], Samples]:
    return lambda statistics: (
        ((*labels, op, word), value)
        for labels, stored in pools(statistics)
        for op in _OPS
        for word, value in read(getattr(stored, op))
    )


def _breaker(stored: PoolStatistics) -> Iterable[tuple[str, Value]]:
    return ((state.value, int(stored.breaker is state)) for state in BreakerState)


def _known(stored: PoolStatistics) -> Iterable[tuple[str, Value]]:
    return [("there", stored.known.there), ("damaged", stored.known.damaged)]


def _faults(calls: CallStatistics) -> Iterable[tuple[str, Value]]:
    return [("error", calls.errors), ("timeout", calls.late)]


def _outcomes(calls: CallStatistics) -> Iterable[tuple[str, Value]]:
    return ((outcome.value, pages) for outcome, pages in calls.outcomes.items())


def _one(read: Callable[[CacheStatistics], Value]) -> Callable[[CacheStatistics], Samples]:
    return lambda statistics: [((), read(statistics))]


def _waits(statistics: CacheStatistics) -> Samples:
    yield ("prefetch",), statistics.prefetch_waits
    yield ("room",), statistics.room_waits


def _audit(statistics: CacheStatistics) -> Samples:
    audit = statistics.transfers.audit
    yield ("recorded",), audit.recorded
    yield ("compared",), audit.compared
    yield ("mismatched",), audit.mismatched


def _copy_paths(statistics: CacheStatistics) -> Samples:
    for pool, paths in statistics.transfers.paths.items():
        for path, nbytes in paths.items():
            yield (pool, path.value), nbytes


FAMILIES = (
    # What requests were given
    Family(
        "requests_total",
        "Requests served, by why they were not given more.",
        ("reason",),
        lambda s: (((reason.value,), count) for reason, count in s.served.reasons.items()),
    ),
    Family("prompt_tokens_total", "Prompt tokens.", (), _one(lambda s: s.served.prompt_tokens)),
    Family(
        "hit_tokens_total",
        "Prompt tokens served from the cache, by the farthest tier that any pool of the prefix came from.",
        ("tier",),
        lambda s: (((_tier(tier),), count) for tier, count in s.served.hit_tokens.items()),
    ),
    Family(
        "missed_tokens_total",
        "Prompt tokens not served, by the pool that kept the hit from being longer, and why.",
        ("pool", "reason"),
        lambda s: (((pool, why.value), count) for (pool, why), count in s.served.missed_tokens.items()),
    ),
    Family(
        "hit_slots_total",
        "Pages and states that hits consisted of, by where they lay before the request.",
        ("pool", "tier"),
        lambda s: (((pool, _tier(tier)), count) for (pool, tier), count in s.served.hit_slots.items()),
    ),
    Family("wait_seconds", "How long requests waited.", ("op",), _waits),
    Family(
        "namespace_prompt_tokens_total",
        "Prompt tokens by namespace.",
        ("namespace",),
        lambda s: (((name,), one.prompt_tokens) for name, one in s.served.namespaces.items()),
    ),
    Family(
        "namespace_hit_tokens_total",
        "Prompt tokens served from the cache, by namespace.",
        ("namespace",),
        lambda s: (((name,), one.hit_tokens) for name, one in s.served.namespaces.items()),
    ),
    # Device and host memory
    Family("slots", "Slots by what they are: their sum is the capacity.", ("pool", "tier", "state"), _slots),
    Family("evicted_slots_total", "Pages and states that made room.", ("pool", "tier"), _evicted),
    Family(
        "demoted_pages_total",
        "Evicted pages that live on in a lower tier of memory.",
        (),
        _one(lambda s: s.planner.demoted),
    ),
    Family(
        "lost_pages_total", "Evicted pages that no memory has any more.", (), _one(lambda s: s.planner.lost)
    ),
    Family(
        "backed_up_slots_total",
        "Pages and states that went to the host.",
        (),
        _one(lambda s: s.planner.backed_up),
    ),
    Family(
        "host_pressure_slots_total",
        "Pages and states that did not, for want of host slots.",
        (),
        _one(lambda s: s.planner.host_pressure),
    ),
    Family(
        "states_skipped_total",
        "Checkpoints without a state, for want of a device slot.",
        (),
        _one(lambda s: s.planner.states_skipped),
    ),
    Family(
        "host_bytes",
        "Bytes of the host memory that pools share, by the pool that has them.",
        ("pool",),
        lambda s: (((pool,), nbytes) for pool, nbytes in s.host_bytes.items()),
    ),
    Family(
        "memory_bytes",
        "Bytes of all slots of a tier; what pools share counts once.",
        ("tier",),
        lambda s: (((tier.name.lower(),), nbytes) for tier, nbytes in s.memory_bytes.items()),
    ),
    Family(
        "moved_slots_total",
        "Pages and states moved within the host memory that pools share.",
        (),
        _one(lambda s: s.planner.moved),
    ),
    Family(
        "tokens_per_end",
        "Cached tokens for each end of a path: what the traffic asks for as tokens_per_state.",
        (),
        _one(lambda s: s.tokens_per_end),
    ),
    # Copies between device and host
    Family(
        "copied_bytes_total",
        "Bytes copied: load (host to device), backup (device to host), fork (on the device).",
        ("op",),
        lambda s: (((op.value,), nbytes) for op, nbytes in s.transfers.nbytes.items()),
    ),
    Family(
        "copy_path_bytes_total", "Bytes enqueued, by the way they were copied.", ("pool", "path"), _copy_paths
    ),
    Family(
        "copy_seconds",
        "From the submission of a copy until its bytes had landed.",
        ("op",),
        lambda s: (((op.value,), latency) for op, latency in s.transfers.latencies.items()),
    ),
    Family(
        "copy_launches_total",
        "Transfers that copies were merged into.",
        (),
        _one(lambda s: s.transfers.launches),
    ),
    Family("copies_failed_total", "Copies that failed.", (), _one(lambda s: s.traffic.copies_failed)),
    Family("copies_in_flight", "Copies in flight.", (), _one(lambda s: s.transfers.in_flight)),
    Family("audit_slots_total", "Pages whose fingerprints were taken and compared.", ("result",), _audit),
    # Storage
    Family("read_slots_total", "Pages and states that came from storage.", (), _one(lambda s: s.pages_read)),
    Family(
        "stored_slots_total",
        "Pages and states that went to storage, or were there already.",
        (),
        _one(lambda s: s.traffic.stored),
    ),
    Family(
        "shed_slots_total",
        "Pages and states that did not get to storage, by why.",
        ("reason",),
        lambda s: (((reason.value,), count) for reason, count in s.traffic.shed.items()),
    ),
    Family("storing_bytes", "Bytes of storage writes in flight.", (), _one(lambda s: s.storing_bytes)),
    Family(
        "storage_pages_total",
        "Pages of calls to storage, by outcome.",
        ("pool", "op", "outcome"),
        _by_outcome(_outcomes),
    ),
    Family(
        "storage_bytes_total", "Bytes read and stored.", ("pool", "op"), _by_call(lambda calls: calls.bytes)
    ),
    Family(
        "storage_call_seconds",
        "Latency of calls to storage; late ones up to their deadline.",
        ("pool", "op"),
        _by_call(lambda calls: calls.latencies),
    ),
    Family(
        "storage_faults_total",
        "Calls to storage that raised or answered nonsense (error), or came too late (timeout).",
        ("pool", "op", "reason"),
        _by_outcome(_faults),
    ),
    Family(
        "storage_calls_running", "Calls that have not ended.", ("pool",), _by_pool(lambda pool: pool.running)
    ),
    Family(
        "storage_calls_lingering",
        "Those past their deadline; no caller waits for them.",
        ("pool",),
        _by_pool(lambda pool: pool.lingering),
    ),
    Family(
        "storage_breaker", "1 for the state that the breaker is in.", ("pool", "state"), _by_state(_breaker)
    ),
    Family(
        "storage_breaker_opened_total",
        "How often the breaker opened.",
        ("pool",),
        _by_pool(lambda pool: pool.opened),
    ),
    Family(
        "storage_full",
        "1 while storage refuses to take more.",
        ("pool",),
        _by_pool(lambda pool: int(pool.full)),
    ),
    Family(
        "storage_known_pages",
        "Pages that storage is known to have (there), or to have damaged.",
        ("pool", "state"),
        _by_state(_known),
    ),
    Family(
        "storage_recalled_pages_total",
        "Pages that storage was not asked for, because they are known.",
        ("pool",),
        _by_pool(lambda pool: pool.known.recalled),
    ),
    # Stages of a chain of stores
    Family(
        "stage_hit_tokens_total",
        "Those of hit_tokens_total from storage, by the farthest stage that a page was read from.",
        ("stage",),
        lambda s: (((stage,), tokens) for stage, tokens in s.served.stage_tokens.items()),
    ),
    Family(
        "storage_stage_pages_total",
        "Pages of calls to a stage, by outcome.",
        ("stage", "pool", "op", "outcome"),
        _by_outcome(_outcomes, _stages),
    ),
    Family(
        "storage_stage_bytes_total",
        "Bytes read from a stage and stored there.",
        ("stage", "pool", "op"),
        _by_call(lambda calls: calls.bytes, _stages),
    ),
    Family(
        "storage_stage_call_seconds",
        "Latency of calls to a stage; late ones up to their deadline.",
        ("stage", "pool", "op"),
        _by_call(lambda calls: calls.latencies, _stages),
    ),
    Family(
        "storage_stage_faults_total",
        "Calls to a stage that raised or answered nonsense (error), or came too late (timeout).",
        ("stage", "pool", "op", "reason"),
        _by_outcome(_faults, _stages),
    ),
    Family(
        "storage_stage_breaker",
        "1 for the state that the breaker of a stage is in.",
        ("stage", "pool", "state"),
        _by_state(_breaker, _stages),
    ),
    Family(
        "storage_stage_shed_pages_total",
        "Pages that a stage did not get from others, or because it was behind.",
        ("stage", "pool"),
        _by_pool(lambda pool: pool.shed, _stages),
    ),
    # Other ranks of a sharded model
    Family(
        "rank_lag_seconds",
        "From an entry of the log to a rank's answer.",
        ("rank",),
        _by_rank(lambda rank: rank.lag),
    ),
    Family(
        "rank_lost", "1 for the rank that ended the group.", ("rank",), _by_rank(lambda rank: int(rank.lost))
    ),
    Family("ranks_failed", "1 if the group goes on cold.", (), _of_group(lambda group: int(group.failed))),
    Family(
        "ranks_log_bytes_total",
        "Bytes of the log; each follower gets all of them.",
        (),
        _of_group(lambda group: group.log_bytes),
    ),
    Family("ranks_steps_total", "Steps that were marked.", (), _of_group(lambda group: group.steps)),
    Family(
        "ranks_open_operations",
        "Operations that some rank has not answered.",
        (),
        _of_group(lambda group: group.open_operations),
    ),
)
