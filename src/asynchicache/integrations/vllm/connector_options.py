"""Options of the connector, and settings of vLLM's that lose data or hits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError
from asynchicache.integrations.vllm.idle import IDLE_WAIT_MS, WaitMs
from asynchicache.integrations.vllm.options import for_replica
from asynchicache.options import Options

_OWN = frozenset({"idle_wait_ms"})
_NOT_OURS = frozenset(
    {"device", "inline", "page_keys", "device_slots", "device_bytes", "host_ratio", "rank", "ranks"}
)
_XXHASH = "xxhash"
_RESUME_TOKENS = 512  # between two states: turns are shorter than in a cache that chooses where it keeps them


class ConnectorOptions(Options, frozen=True, kw_only=True):
    """Options of the connector itself; all others are those of `CacheConfig`.

    Attributes:
        idle_wait_ms: longest wait in a step that computed nothing; 0 for none. Default: 2.
    """

    idle_wait_ms: WaitMs = IDLE_WAIT_MS


class ConnectorConfig(NamedTuple):
    """The connector's options, and the cache's."""

    own: ConnectorOptions
    cache: CacheConfig


def read_options(given: Mapping[str, Any], *, replica: int) -> ConnectorConfig:
    """Read `kv_connector_extra_config`.

    Args:
        given: as in vLLM's JSON.
        replica: number of the data-parallel replica, for `{replica}` in `storage_options`.

    Raises:
        ConfigError: an option is unknown, missing or outside its rule; names it.
    """
    fixed = sorted(_NOT_OURS & set(given))
    if fixed:
        raise ConfigError(f"{fixed[0]} is not an option of vLLM's connector: vLLM owns the device memory")
    if not {"host_bytes", "host_slots"} & set(given):
        raise ConfigError("host_bytes is missing: the bytes of host memory for KV and states")
    own = ConnectorOptions.read({name: value for name, value in given.items() if name in _OWN})
    rest = {name: value for name, value in for_replica(given, replica).items() if name not in _OWN}
    rest.setdefault("tokens_per_state", _RESUME_TOKENS)
    return ConnectorConfig(own, CacheConfig.read({**rest, "page_keys": True}))


def check_engine(vllm_config: Any, *, hash_seed: str | None, told_of_sleep: bool = True) -> None:
    """Refuse settings of vLLM's with which the connector would lose data or hits.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        hash_seed: the environment's PYTHONHASHSEED.
        told_of_sleep: whether vLLM tells connectors before it unmaps blocks.

    Raises:
        ConfigError: names the setting and the cure.
    """
    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    if not cache.enable_prefix_caching:
        raise ConfigError("prefix caching is off, and blocks have no hashes: set --enable-prefix-caching")
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy {transfer.kv_load_failure_policy!r} ends requests whose copy fails: add "
            '"kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if str(cache.prefix_caching_hash_algo).startswith(_XXHASH) and hash_seed is None:
        raise ConfigError(
            f"prefix_caching_hash_algo {cache.prefix_caching_hash_algo} differs in every process: set "
            "PYTHONHASHSEED, or keep sha256"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales takes the scales of the KV cache from the first prompt, so that blocks mean "
            "something else in every process: leave it out, or use a checkpoint with scales"
        )
    drafts = vllm_config.speculative_config
    if drafts is not None and drafts.uses_draft_kv_cache():
        raise ConfigError(
            f"speculative decoding by {drafts.method!r} has KV of a draft model, whose last block changes: "
            "use a method without one (ngram, suffix), or vLLM's OffloadingConnector with AsynchicacheTier"
        )
    if vllm_config.model_config.enable_sleep_mode and not told_of_sleep:
        raise ConfigError(
            "this vLLM unmaps blocks in sleep mode without telling connectors, while copies may read them: "
            "leave out --enable-sleep-mode, or use vLLM 0.33"
        )
    _check_workers(parallel)


def _check_workers(parallel: Any) -> None:
    if parallel.world_size != parallel.tensor_parallel_size or parallel.decode_context_parallel_size != 1:
        raise ConfigError(
            f"{parallel.world_size} workers share a model by pipeline or context parallelism, so that blocks "
            "have different layers or tokens: use vLLM's OffloadingConnector with AsynchicacheTier instead"
        )
    if parallel.world_size > 1 and (parallel.nnodes > 1 or parallel.distributed_executor_backend != "mp"):
        raise ConfigError(
            f"workers on {parallel.nnodes} nodes, with distributed_executor_backend "
            f"{parallel.distributed_executor_backend!r}: all must map the scheduler's host memory, so run "
            "them on its machine, with --distributed-executor-backend mp"
        )
