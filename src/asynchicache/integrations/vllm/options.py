"""Options of the tier and of the connector, and settings of vLLM's that lose data or hits.

With them the identity that engines must share to reuse each other's chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

from msgspec import Meta

from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError
from asynchicache.integrations.bridge import LoopBridge
from asynchicache.integrations.page_store import PageIdentity, PageStoreConfig
from asynchicache.integrations.vllm.contents import weights_digest
from asynchicache.integrations.vllm.rows import MemoryRun
from asynchicache.integrations.vllm.seam import Locality
from asynchicache.options import Options, Positive, Seconds

WaitMs: TypeAlias = Annotated[float, Meta(ge=0, le=100)]  # a request that arrives meanwhile waits as long
IDLE_WAIT_MS = 2.0
"""Default of the longest wait in one step."""

_EMPTY_STEP_S = 0.001
"""A step that follows the last one faster than this computed nothing: no model's forward is so short."""


class IdleWait:
    """Waits for jobs in steps that computed nothing.

    A scheduler in the program's own process makes its next step at once if a step computed nothing. Thousands
    of such steps a second compete for the interpreter with the threads that read from storage.

    Args:
        wait_ms: most milliseconds of one wait; 0 for none.
        clock: seconds.
    """

    def __init__(
        self, bridge: LoopBridge, wait_ms: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bridge = bridge
        self._wait_s = wait_ms / 1000
        self._clock = clock
        self._stepped = float("-inf")

    def end_step(self) -> None:
        """Wait for a job to end if this step came right after the last one."""
        if self._wait_s and self._clock() - self._stepped < _EMPTY_STEP_S:
            self._bridge.wait_finished(self._wait_s)
        self._stepped = self._clock()


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


_REPLICA = "{replica}"


class TierOptions(PageStoreConfig, frozen=True, kw_only=True):
    """Options of an entry of `secondary_tiers`, besides vLLM's own keys and those of `PageStoreConfig`.

    Attributes:
        weight_version: identifies the weights, so that chunks of other weights never match: vLLM's keys
            do not cover the weights. Required.
        salt: separates the chunks of deployments that share a storage. Default: empty.
        locality: `LOCAL` or `REMOTE`, for vLLM's per-request choice of tiers. Default: None.
        store_bytes: most bytes of stores in flight; further stores are shed. Default: 1 GiB.
        enable_kv_events: report chunks stored and lost, if vLLM publishes KV events. Default: False.
        close_seconds: how long shutdown waits for calls in flight. Default: 10.
        idle_wait_ms: longest wait for storage in a step that computed nothing; 0 for none. Default: 2.
        whole_rows: store rows of the primary tier whole, including bytes of other chunks. Default: False.

    In strings of `storage_options`, `{replica}` is replaced by the number of the data-parallel replica: each
    replica is a separate process, and two cannot write to one folder.
    """

    weight_version: str
    salt: str = ""
    locality: str | None = None
    store_bytes: Positive = 1 << 30
    enable_kv_events: bool = False
    close_seconds: Seconds = 10.0
    idle_wait_ms: WaitMs = IDLE_WAIT_MS
    whole_rows: bool = False

    def check(self) -> None:
        if not self.weight_version:
            raise ConfigError("weight_version is empty; give a name that changes with the weights")
        if self.locality not in (None, *Locality.__members__):
            raise ConfigError(f"locality {self.locality!r} must be one of {sorted(Locality.__members__)}")


def for_replica(options: Mapping[str, object], replica: int) -> dict[str, object]:
    """Return a tier's options with `{replica}` replaced by this data-parallel replica's number."""
    found = options.get("storage_options")
    if not isinstance(found, Mapping):
        return dict(options)
    filled = {
        name: value.replace(_REPLICA, str(replica)) if isinstance(value, str) else value
        for name, value in found.items()
    }
    return {**options, "storage_options": filled}


def group_pool(group_id: int) -> str:
    """Return the name of the pool that holds the chunks of one KV cache group."""
    return f"group{group_id}"


def group_identity(
    config: Any, group: Any, options: TierOptions, runs: Sequence[MemoryRun] | None = None
) -> PageIdentity:
    """Return the identity of one group's chunks.

    A row of the primary tier holds a chunk of all workers. The identity therefore includes how the model is
    split across them, unless vLLM declares the layout independent of it. The data-parallel replica that wrote
    the row is not part of the identity.

    Args:
        config: vLLM's `OffloadingConfig`.
        group: one of its groups.
        runs: byte ranges of a row that are stored; None for all. Only sizes enter the identity, not offsets.
    """
    parallel = config.parallel
    split = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    portable = parallel.is_parallelism_agnostic or config.replicated_layout
    layout = {
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_block": group.tokens_per_block,
        "layers": list(group.layer_names),
        "split": "any" if portable else split,
        "replicated": config.replicated_layout,
        "canonical": config.kv_cache_layout if config.canonical_layout else None,
    }
    if runs is not None:
        layout["runs"] = [run.nbytes for run in runs]
    return PageIdentity(
        engine="vllm",
        settings=weights_digest(config.model.name),
        model=config.model.name,
        weight_version=options.weight_version,
        dtype=str(config.model.dtype),
        layout=repr(sorted(layout.items())),
        salt=options.salt,
    )
