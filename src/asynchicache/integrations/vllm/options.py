"""The tier's options, and what must be equal for one engine's chunks to be another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asynchicache.errors import ConfigError
from asynchicache.integrations.page_store import PageIdentity, PageStoreConfig
from asynchicache.integrations.vllm.rows import Run
from asynchicache.integrations.vllm.seam import Locality
from asynchicache.options import Positive, Seconds

_REPLICA = "{replica}"


class TierOptions(PageStoreConfig, frozen=True, kw_only=True):
    """What a tier's entry of `secondary_tiers` may hold, besides vLLM's own keys and `PageStoreConfig`'s.

    Attributes:
        weight_version: names the weights, so that chunks of others are never taken for theirs: vLLM's keys
            do not. Required.
        salt: keeps this deployment's chunks apart from others' in the same storage. Default: empty.
        locality: `LOCAL` or `REMOTE`, for vLLM's per-request choice of tiers. Default: None.
        store_bytes: chunks on their way to storage; more is shed. Default: 1 GiB.
        enable_kv_events: tell of chunks stored and lost, where vLLM publishes KV events. Default: False.
        close_seconds: how long shutting down waits for what is under way. Default: 10.
        whole_rows: store rows of the primary tier whole, bytes of other chunks included. Default: False.

    In texts of `storage_options`, `{replica}` stands for the number of the data-parallel replica: each is a
    process of its own, and two cannot write to one folder.
    """

    weight_version: str
    salt: str = ""
    locality: str | None = None
    store_bytes: Positive = 1 << 30
    enable_kv_events: bool = False
    close_seconds: Seconds = 10.0
    whole_rows: bool = False

    def check(self) -> None:
        if not self.weight_version:
            raise ConfigError("weight_version is empty; give a name that changes with the weights")
        if self.locality not in (None, *Locality.__members__):
            raise ConfigError(f"locality {self.locality!r} must be one of {sorted(Locality.__members__)}")


def for_replica(options: Mapping[str, object], replica: int) -> dict[str, object]:
    """A tier's options with the number of this data-parallel replica filled in."""
    found = options.get("storage_options")
    if not isinstance(found, Mapping):
        return dict(options)
    filled = {
        name: value.replace(_REPLICA, str(replica)) if isinstance(value, str) else value
        for name, value in found.items()
    }
    return {**options, "storage_options": filled}


def group_pool(group_id: int) -> str:
    """The pool that holds the chunks of one KV cache group."""
    return f"group{group_id}"


def group_identity(
    config: Any, group: Any, options: TierOptions, runs: Sequence[Run] | None = None
) -> PageIdentity:
    """Whose chunks these are.

    A row of the primary tier holds a chunk of all workers, so it depends on how the model is split,
    unless vLLM says that it does not; which data-parallel replica wrote it does not matter.

    Args:
        config: vLLM's `OffloadingConfig`.
        group: one of its groups.
        options: the tier's.
        runs: which bytes of a row are stored, None for all. Only their sizes matter, not where they lie.
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
        model=config.model.name,
        weight_version=options.weight_version,
        dtype=str(config.model.dtype),
        layout=repr(sorted(layout.items())),
        salt=options.salt,
    )
