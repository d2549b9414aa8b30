"""A secondary tier for vLLM's `TieringOffloadingManager`, on any storage backend of this package.

vLLM calls from its scheduler thread, which must not block: calls submit work to an event loop in another
thread, or collect finished work (vllm/v1/kv_offload/tiering/base.py in vLLM 0.33).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from asynchicache.errors import CacheError, ClosedError
from asynchicache.integrations.bridge import Job, JobState, LoopBridge
from asynchicache.integrations.vllm.chunks import ChunkStore, Moved, is_there
from asynchicache.integrations.vllm.contents import follow_weights, hash_contents
from asynchicache.integrations.vllm.hints import RequestHints, read_hints
from asynchicache.integrations.vllm.metrics import DEFINITIONS, TierCounters
from asynchicache.integrations.vllm.options import IdleWait, TierOptions, for_replica
from asynchicache.integrations.vllm.seam import (
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingEvent,
    OffloadingMetricMetadata,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    TransferJob,
)
from asynchicache.types import Outcome


@dataclass(slots=True, eq=False)
class _Lookup:
    """The lookup of one chunk.

    Attributes:
        present: the answer; None until it is known.
        requests: requests that asked; the answer is kept until all of them have ended.
    """

    present: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Pending and answered lookups of chunks: sent in batches, answered in a later scheduler step.

    The scheduler must not block, so the first lookup of a chunk returns "not known yet", and all first
    lookups of a step go to storage in one batch. Bookkeeping only: never blocks; one thread at a time.
    """

    def __init__(self) -> None:
        self._lookups: dict[bytes, _Lookup] = {}
        self._asked_by: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []

    def ask(self, key: bytes, request: str) -> bool | None:
        """Return whether storage has the chunk; None until the answer arrives."""
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = _Lookup()
            self._new.append(key)
        lookup.requests.add(request)
        self._asked_by.setdefault(request, set()).add(key)
        return lookup.present

    def take_new(self) -> list[bytes]:
        """Return the lookups that have not been sent to storage, each once."""
        new, self._new = self._new, []
        return [key for key in dict.fromkeys(new) if key in self._lookups]

    def answer(self, keys: Iterable[bytes], present: Iterable[bool]) -> None:
        """Record storage's answers; values already set by `learn` take precedence."""
        for key, there in zip(keys, present, strict=True):
            lookup = self._lookups.get(key)
            if lookup is not None and lookup.present is None:
                lookup.present = there

    def learn(self, keys: Iterable[bytes], *, present: bool) -> None:
        """Record that chunks were stored, or could not be read.

        A read that failed must become a miss, or the scheduler would look up and read the chunk forever.
        """
        for key in keys:
            lookup = self._lookups.get(key)
            if lookup is not None:
                lookup.present = present

    def forget(self, request: str) -> None:
        """Drop a request that has ended, and the answers that no other request uses."""
        for key in self._asked_by.pop(request, ()):
            lookup = self._lookups[key]
            lookup.requests.discard(request)
            if not lookup.requests:
                del self._lookups[key]

    def __len__(self) -> int:
        return len(self._lookups)


logger = logging.getLogger(__name__)

_NO_HINTS = RequestHints()
_CLOSINGS = 5  # steps of closing a store; each takes up to `PoolLimits.closing`
_LOST = frozenset({Outcome.MISS, Outcome.CORRUPT})


class _Kind(Enum):
    LOOKUP = "lookup"
    LOAD = "load"
    SAVE = "save"


class _JobTag(NamedTuple):
    """The tag of a bridge job: the operation, its chunks, and vLLM's job id."""

    kind: _Kind
    keys: list[bytes]
    job_id: int = -1


class AsynchicacheTier(SecondaryTierManager):
    """KV and state chunks in storage.

    Configured in `secondary_tiers` of vLLM's `kv_connector_extra_config`; see docs/howto/vllm_tier.md. Once
    the tier is open, a storage failure never raises: it is a miss, or a store that fails.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """
        Args:
            offloading_spec: vLLM's spec; its `config` describes the model and the KV cache groups. An
                `AsynchicacheTieringSpec` also gives the byte ranges of a row that each group uses.
            primary_kv_view: rows of the primary tier, `[chunks, bytes]`.
            tier_type: the tier's name in metrics.
            backpressure_detector: vLLM's detector, which receives store results; or None.
            options: see `TierOptions`.

        Raises:
            ConfigError: an option is unknown, missing or invalid (the message names it), or bytes of other
                chunks would be stored.
            StorageError: the storage cannot be used.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        hash_contents()
        self._weights = follow_weights()
        config = offloading_spec.config
        chosen = TierOptions.of(for_replica(options, config.parallel.data_parallel_index))
        self.locality = Locality[chosen.locality] if chosen.locality is not None else None
        self._options = chosen
        self._groups = frozenset(group.group_id for group in config.groups)
        self._lookups = Lookups()
        self._counters = TierCounters(chosen.storage)
        self._events: list[OffloadingEvent] | None = (
            [] if chosen.enable_kv_events and config.enable_kv_cache_events else None
        )
        self._results: list[JobResult] = []
        self._news = True  # the bridge was not polled in this scheduler step
        self._bridge = LoopBridge(name="asynchicache-vllm", max_bytes=chosen.store_bytes)
        self._idle = IdleWait(self._bridge, chosen.idle_wait_ms)
        try:
            group_runs = getattr(offloading_spec, "group_runs", lambda: None)
            self._chunks = self._bridge.call(ChunkStore.open(chosen, config, primary_kv_view, group_runs()))
        except BaseException:
            self._bridge.close(0)
            raise

    # Lookups.

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Return HIT, MISS, or RETRY while the lookup is in flight: the scheduler retries in a later step."""
        if self._hints(req_context).no_load:
            return LookupResult.MISS
        if self._news:
            self._take_finished()
            self._news = False
        present = self._lookups.ask(key, req_context.req_id)
        if present is None:
            return LookupResult.RETRY
        return LookupResult.HIT if present else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the step's lookups to storage in one batch; if the step computed nothing, wait for answers."""
        self._take_finished()
        self._news = True
        self._ask_storage()
        self._idle.end_step()

    def _ask_storage(self) -> None:
        keys = self._lookups.take_new()
        if keys:
            self._submit(_JobTag(_Kind.LOOKUP, keys), self._chunks.exists(self._named(keys)))

    def _named(self, keys: list[bytes]) -> list[bytes]:
        """Return the names of chunks with the weights that vLLM has now."""
        weights = self._weights.name().encode()
        return [weights + key for key in keys] if weights else keys

    # Requests.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Read the request's hints, and look up the chunks that it wants prefetched."""
        hints = read_hints(
            req_context.kv_transfer_params, getattr(req_context, "kv_hints", None), self._groups
        )
        if hints != _NO_HINTS:
            req_context.set_state(hints)
            taken = hints.no_load + hints.no_store + bool(hints.prefetch)
            self._counters.hinted("taken", taken)
            self._counters.hinted("ignored", hints.ignored)
        for key in hints.prefetch:
            self._lookups.ask(key, req_context.req_id)
        self._ask_storage()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)

    def _hints(self, req_context: ReqContext) -> RequestHints:
        return req_context.get_state(RequestHints) or _NO_HINTS

    # Jobs.

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read chunks into rows of the primary tier."""
        keys = list(job_metadata.keys)
        rows = job_metadata.chunk_ids.tolist()
        self._submit(
            _JobTag(_Kind.LOAD, keys, job_metadata.job_id), self._chunks.load(self._named(keys), rows)
        )

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store rows of the primary tier; shed if more than `store_bytes` are in flight."""
        keys = list(job_metadata.keys)
        if self._hints(job_metadata.req_context).no_store:
            self._results.append(JobResult(job_metadata.job_id, success=True, transfer_bytes=0))
            return
        rows = job_metadata.chunk_ids.tolist()
        work = _JobTag(_Kind.SAVE, keys, job_metadata.job_id)
        self._submit(work, self._chunks.save(self._named(keys), rows), nbytes=self._chunks.nbytes(keys))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return results of loads and stores that finished since the last call."""
        self._take_finished()
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        """Wait until no call uses rows of the primary tier; bounded by the deadlines of storage calls.

        vLLM calls it where it drops the rows and its own blocks, and nowhere else.
        """
        self._bridge.drain()
        self._weights.dropped()

    def _submit(self, work: _JobTag, coro: Coroutine[Any, Any, Any], *, nbytes: int = 0) -> None:
        try:
            self._bridge.submit(coro, nbytes=nbytes, tag=work, wait=False)
        except ClosedError as error:
            logger.warning("%s of %d chunks: %s", work.kind.value, len(work.keys), error)
            self._fail(work)

    def _take_finished(self) -> None:
        for job in self._bridge.finished():
            self._end(job)

    def _end(self, job: Job[Any]) -> None:
        work: _JobTag = job.tag  # type: ignore[assignment]  # set by `_submit`
        if job.state is not JobState.DONE:
            if job.state is JobState.SHED:
                self._counters.shed(job.nbytes)
            else:
                logger.warning("%s of %d chunks: %s", work.kind.value, len(work.keys), job.exception())
            self._fail(work)
        elif work.kind is _Kind.LOOKUP:
            self._lookups.answer(work.keys, job.result())
        elif work.kind is _Kind.LOAD:
            self._loaded(work, job.result())
        else:
            self._saved(work, job.result())

    def _fail(self, work: _JobTag) -> None:
        """Record a job that failed as a whole: a lookup or load is a miss, and no chunk was moved."""
        if work.kind is not _Kind.SAVE:
            self._lookups.learn(work.keys, present=False)
        if work.kind is not _Kind.LOOKUP:
            self._results.append(JobResult(work.job_id, success=False))

    def _loaded(self, work: _JobTag, moved: Moved) -> None:
        """Report a load. Chunks that did not arrive become misses, or vLLM would load them again forever."""
        by_key = dict(zip(work.keys, moved.outcomes, strict=True))
        arrived = [key for key, outcome in by_key.items() if outcome is Outcome.HIT]
        lost = [key for key, outcome in by_key.items() if outcome in _LOST]
        self._lookups.learn([key for key in by_key if by_key[key] is not Outcome.HIT], present=False)
        self._tell(lost, removed=True)
        whole = len(arrived) == len(by_key)
        self._results.append(
            JobResult(
                work.job_id,
                success=whole,
                successful_keys=None if whole or not arrived else arrived,
                transfer_time=moved.seconds,
                transfer_bytes=self._chunks.nbytes(arrived),
            )
        )

    def _saved(self, work: _JobTag, moved: Moved) -> None:
        by_key = dict(zip(work.keys, moved.outcomes, strict=True))
        there = [key for key, outcome in by_key.items() if is_there(outcome)]
        stored = [key for key, outcome in by_key.items() if outcome is Outcome.STORED]
        self._lookups.learn(there, present=True)
        self._tell(stored, removed=False)
        self._results.append(
            JobResult(
                work.job_id,
                success=len(there) == len(by_key),
                transfer_time=moved.seconds,
                transfer_bytes=self._chunks.nbytes(stored),
            )
        )

    # Events, metrics, the end.

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return events since the last call: chunks stored, and chunks found missing or corrupt."""
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def _tell(self, keys: Collection[bytes], *, removed: bool) -> None:
        if self._events is not None and keys:
            medium = Medium.STORAGE
            self._events.append(OffloadingEvent(list(keys), medium, removed, locality=self.locality))

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return the tier's metrics, for vLLM's registry."""
        return dict(DEFINITIONS)

    def get_stats(self) -> OffloadingConnectorStats:
        """Return the counts since the last call."""
        return self._counters.report(self._chunks.statistics)

    @classmethod
    def config_info_keys(cls, tier_config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the labels of the tier's series of `vllm:kv_offload_config_info`."""
        return ("asynchicache_storage",)

    def config_info(self) -> dict[str, str]:
        return {"asynchicache_storage": self._options.storage}

    def shutdown(self) -> None:
        """Wait for calls in flight, up to a time limit, and close the storage. Idempotent.

        If the storage does not close, this logs a warning and abandons it.

        Raises:
            CacheError: a call did not end and may still use rows of the primary tier; vLLM then keeps them.
        """
        if self._bridge.closed:
            return
        patience = self._options.close_seconds
        try:
            self._bridge.drain(patience)
            rows_are_free = self._close_storage(patience + _CLOSINGS * self._options.storage_limits.closing)
        finally:
            ended = self._bridge.close(patience)
        if not (rows_are_free and ended):
            raise CacheError(f"tier {self.tier_type!r}: a storage call did not end, and may still use rows")

    def _close_storage(self, seconds: float) -> bool:
        """Close within `seconds`; return whether no storage call can use rows any more."""
        job = self._bridge.submit(self._chunks.aclose(), queued=False)
        try:
            return job.result(seconds)
        except (CacheError, OSError, CancelledError) as error:  # a TimeoutError is an OSError
            logger.warning("tier %r: its storage was not closed: %r", self.tier_type, error)
            return False
