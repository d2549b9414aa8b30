"""A KV connector for vLLM: this package's cache behind vLLM's own blocks.

`kv_connector` is `AsynchicacheConnector`, `kv_connector_module_path` this module; see docs/howto/vllm.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asynchicache.config import python_hash_seed
from asynchicache.integrations.vllm.connector_scheduler import ConnectorScheduler
from asynchicache.integrations.vllm.connector_worker import ConnectorWorker, StepOrders, StepResults
from asynchicache.integrations.vllm.contents import follow_weights, hash_contents, model_digest
from asynchicache.integrations.vllm.kv_groups import KvGroups, kv_groups
from asynchicache.integrations.vllm.metrics import (
    ConnectorMetrics,
    ConnectorStats,
    StatisticsDeltas,
)
from asynchicache.integrations.vllm.options import check_engine, read_options
from asynchicache.integrations.vllm.seam import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from asynchicache.types import Tier

_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.STORAGE: CacheHitSource.DISK}


class AsynchicacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV and states in host memory and storage, and brings them back before vLLM computes them.

    vLLM makes one in its scheduler and one in each worker. The scheduler's has the cache; the workers' copy.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """
        Raises:
            ConfigError: a setting of vLLM's loses data or hits, an option is wrong, or a KV cache group is
                not supported; names it and the cure.
            CapacityError: there is not enough host memory.
            StorageError: the storage cannot be used.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        told_of_sleep = hasattr(KVConnectorBase_V1, "unregister_kv_caches")  # since 0.33
        check_engine(vllm_config, hash_seed=python_hash_seed(), told_of_sleep=told_of_sleep)
        decides = role is KVConnectorRole.SCHEDULER
        content = model_digest(vllm_config.model_config, vllm_config.cache_config) if decides else ""
        groups = _groups(vllm_config, kv_cache_config, content)
        config = read_options(
            vllm_config.kv_transfer_config.kv_connector_extra_config,
            replica=vllm_config.parallel_config.data_parallel_index,
        )
        idle_s = config.own.idle_wait_ms / 1000
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._deltas = StatisticsDeltas()
        if decides:
            hash_contents()
            self._scheduler = ConnectorScheduler(groups, config.cache, idle_s, follow_weights())
        else:
            self._worker = ConnectorWorker(groups, idle_s, vllm_config.parallel_config.rank)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not kept is a miss, and nothing worse."""
        return False

    # Scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._deciding.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._deciding.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens more host memory has; None while storage is asked."""
        return self._deciding.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._deciding.allocated(request, blocks.blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        tiers = self._deciding.tiers(request, num_external_tokens)
        return {_SOURCES[tier]: tokens for tier, tokens in tiers.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self._deciding.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        results = connector_output.kv_connector_worker_meta
        if isinstance(results, StepResults):
            self._deciding.reported(results)

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, None]:
        """Keep the request's last blocks; vLLM frees them at once, our references stay."""
        self._deciding.request_finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether copies need further steps although no request does."""
        return self._scheduler is not None and self._scheduler.busy

    def reset_cache(self) -> bool:
        """Find nothing any more that is cached now, as after a change of weights."""
        self._deciding.forget()
        return True

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._copying.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Let go of the blocks: vLLM falls asleep, and unmaps them."""
        self._copying.unregister()

    def restore_kv_caches(self) -> None:
        """vLLM wakes up, and the blocks are where they were."""
        self._copying.restore()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._copying.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are copied when they are complete, after the forward."""

    def wait_for_save(self) -> None:
        self._copying.start_backups(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._copying.ended(idle=self._step.idle)

    def build_connector_worker_meta(self) -> StepResults | None:
        return self._copying.results()

    # Both.

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return what the scheduler's half has counted since the last call."""
        return None if self._scheduler is None else self._deltas.report(self._scheduler.statistics)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Wait for copies and writes, up to `close_seconds`. Idempotent."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def _deciding(self) -> ConnectorScheduler:
        assert self._scheduler is not None, "vLLM calls this method in the scheduler only"
        return self._scheduler

    @property
    def _copying(self) -> ConnectorWorker:
        assert self._worker is not None, "vLLM calls this method in the worker only"
        return self._worker

    @property
    def _step(self) -> StepOrders:
        step = self._connector_metadata
        assert isinstance(step, StepOrders), "vLLM binds a step's metadata before its other calls"
        return step


def _groups(vllm_config: Any, kv_cache_config: Any, content: str) -> KvGroups:
    model = vllm_config.model_config
    dtype = vllm_config.cache_config.cache_dtype
    return kv_groups(
        kv_cache_config,
        model=model.model,
        dtype=str(model.dtype) if dtype == "auto" else str(dtype),
        layout=kv_cache_config.kv_cache_layout,
        workers=vllm_config.parallel_config.world_size,
        content=content,
    )
