"""The tier's options, and the identity that engines must share to reuse each other's chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asynchicache.errors import ConfigError
from asynchicache.integrations.page_store import PageIdentity, PageStoreConfig
from asynchicache.integrations.vllm.contents import weights_digest
from asynchicache.integrations.vllm.idle import IDLE_WAIT_MS, WaitMs
from asynchicache.integrations.vllm.rows import MemoryRun
from asynchicache.integrations.vllm.seam import Locality
from asynchicache.options import Positive, Seconds

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
        options: the tier's options.
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
