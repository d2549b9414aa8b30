"""Signatures of everything that an adapter implements or uses of an engine, as plain data.

They are recorded from each engine's version (`scripts/conformance.py --record`), so that an upgrade that
would break an adapter is seen in one test, and so that adapters are checked where no engine is installed.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import runpy
import sys
from enum import Enum
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import msgspec

TIERING = "vllm.v1.kv_offload.tiering"
HICACHE = "sglang.srt.mem_cache.hicache_storage"
LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
MODEL_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater:WeightUpdater"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
KV_CACHE = "vllm.v1.kv_cache_interface"
TRANSFORMERS_CACHE = "transformers.cache_utils"

CONNECTOR_SEAM = (
    f"{CONNECTOR}.base:KVConnectorBase_V1",
    f"{CONNECTOR}.base:SupportsHMA",
    f"{CONNECTOR}.base:KVConnectorRole",
    f"{CONNECTOR}.base:KVConnectorTransferResults",
    f"{CONNECTOR}.metrics:KVConnectorStats",
    f"{CONNECTOR}.metrics:KVConnectorPromMetrics",
    "vllm.v1.metrics.cache_hit_source:CacheHitSource",
    "vllm.v1.core.sched.output:KVConnectorBlockState",
    "vllm.v1.core.sched.output:SchedulerOutput",
    "vllm.v1.core.block_pool:BlockPool",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock",
    "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys",
    "vllm.v1.core.kv_cache_utils:_gen_mm_extra_hash_keys",
    f"{KV_CACHE}:KVCacheConfig",
    f"{KV_CACHE}:KVCacheGroupSpec",
    f"{KV_CACHE}:FullAttentionSpec",
    f"{KV_CACHE}:MLAAttentionSpec",
    f"{KV_CACHE}:SlidingWindowSpec",
    f"{KV_CACHE}:MambaSpec",
    f"{KV_CACHE}:UniformTypeKVCacheSpecs",
)
"""What vLLM's connector extends and reads; 0.32 and 0.33 have it."""

SEAMS: dict[str, tuple[str, ...]] = {
    "vllm": (
        *CONNECTOR_SEAM,
        f"{TIERING}.base:SecondaryTierManager",
        f"{TIERING}.base:ParentManager",
        f"{TIERING}.base:TransferJob",
        f"{TIERING}.base:JobResult",
        f"{TIERING}.factory:SecondaryTierFactory",
        f"{TIERING}.spec:TieringOffloadingSpec",
        "vllm.v1.kv_offload.base:ReqContext",
        "vllm.v1.kv_offload.base:RequestOffloadingContext",
        "vllm.v1.kv_offload.base:ScheduleEndContext",
        "vllm.v1.kv_offload.base:LookupResult",
        "vllm.v1.kv_offload.base:OffloadPolicy",
        "vllm.v1.kv_offload.base:OffloadingEvent",
        "vllm.v1.kv_offload.base:Medium",
        "vllm.v1.kv_offload.base:Locality",
        "vllm.v1.kv_offload.base:OffloadingCounterMetadata",
        "vllm.v1.kv_offload.base:OffloadingGaugeMetadata",
        "vllm.v1.kv_offload.base:CanonicalKVCaches",
        "vllm.v1.kv_offload.base:CanonicalKVCacheTensor",
        "vllm.v1.kv_offload.base:CanonicalKVCacheRef",
        "vllm.v1.kv_offload.base:CanonicalPageMapping",
        "vllm.v1.kv_offload.base:make_offload_key",
        "vllm.v1.kv_offload.base:get_offload_block_hash",
        "vllm.v1.kv_offload.base:get_offload_group_idx",
        "vllm.v1.kv_offload.config:OffloadingConfig",
        "vllm.v1.kv_offload.config:OffloadingGroupConfig",
        "vllm.v1.kv_offload.config:OffloadingModelConfig",
        "vllm.v1.kv_offload.config:OffloadingCacheConfig",
        "vllm.v1.kv_offload.config:OffloadingParallelConfig",
        "vllm.v1.kv_hints.protocol:KvHintsEnvelope",
        "vllm.v1.kv_hints.protocol:KvHintAction",
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics:OffloadingConnectorStats",
        "vllm.distributed.kv_events:KVEventBatch",
        "vllm.distributed.kv_events:BlockStored",
        "vllm.distributed.kv_events:BlockRemoved",
        "vllm.distributed.kv_events:AllBlocksCleared",
    ),
    "sglang": (
        f"{HICACHE}:HiCacheStorage",
        f"{HICACHE}:HiCacheStorageConfig",
        f"{HICACHE}:HiCacheStorageExtraInfo",
        f"{HICACHE}:PoolTransfer",
        f"{HICACHE}:PoolTransferResult",
        f"{HICACHE}:PoolHitPolicy",
        f"{HICACHE}:PoolName",
        "sglang.srt.mem_cache.storage.backend_factory:StorageBackendFactory",
        f"{LINKER}:UnifiedCacheLinker",
        f"{LINKER}:LayerWiseLoadCounter",
        f"{LINKER}:UnifiedCacheLinkerWrapper._tail_hashes",
        f"{LINKER}:UnifiedCacheLinkerWrapper.release_request",
        f"{SCHEDULER}._prefetch_kvcache",
        f"{SCHEDULER}._get_new_batch_prefill_raw",
        f"{LINKER}:UnifiedCacheLinkerWrapper._offload_node",
        f"{UPDATER}._observe_weight_load",
        f"{UPDATER}.record_weight_version_after_update",
        f"{MODEL_UPDATER}.begin_weight_update",
        f"{MODEL_UPDATER}.end_weight_update",
        f"{MODEL_UPDATER}.update_weights_from_disk",
        "sglang.srt.managers.cache_controller:HiCacheController.reset",
        "sglang.srt.managers.schedule_batch:Req.__init__",
        "sglang.srt.disaggregation.kv_events:KVEventBatch",
        "sglang.srt.disaggregation.kv_events:BlockStored",
        "sglang.srt.disaggregation.kv_events:BlockRemoved",
        "sglang.srt.disaggregation.kv_events:AllBlocksCleared",
    ),
    "transformers": (
        f"{TRANSFORMERS_CACHE}:Cache",
        f"{TRANSFORMERS_CACHE}:CacheLayerMixin",
        f"{TRANSFORMERS_CACHE}:DynamicLayer",
        f"{TRANSFORMERS_CACHE}:DynamicSlidingWindowLayer",
        f"{TRANSFORMERS_CACHE}:DynamicIndexedLayer",
        f"{TRANSFORMERS_CACHE}:LinearAttentionLayer",
        f"{TRANSFORMERS_CACHE}:LinearAttentionAndFullAttentionLayer",
    ),
}
"""By engine: what is recorded of it, as `module:name`."""

_INIT = "__init__"


def describe(found: Any) -> dict[str, Any]:
    """What callers and implementers of a class or function rely on."""
    if inspect.isfunction(found):
        return {"kind": "function", "signature": signature(found)}
    if issubclass(found, Enum):
        return {"kind": "enum", "members": {member.name: str(member.value) for member in found}}
    described: dict[str, Any] = {"kind": "class", "methods": methods(found)}
    if fields := fields_of(found):
        described["fields"] = fields
    if abstract := sorted(getattr(found, "__abstractmethods__", ())):
        described["abstract"] = abstract
    return described


def signature(function: Any) -> list[str]:
    """Its parameters, in order: `*name`, `**name`, `/` and `*` as written, `name=` where it has a default.

    Annotations are left out: they are how a version says things, not what it asks for.
    """
    parts: list[str] = []
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        parts.append(f"{star}{parameter.name}{'' if parameter.default is parameter.empty else '='}")
    return parts


def methods(owner: type) -> dict[str, list[str]]:
    """Public methods and the constructor, inherited ones of the engine included."""
    found = {}
    for name, member in inspect.getmembers(
        owner, lambda one: inspect.isfunction(one) or inspect.ismethod(one)
    ):
        ours = member.__module__.partition(".")[0] == owner.__module__.partition(".")[0]
        if ours and (name == _INIT or not name.startswith("_")):
            found[name] = signature(member)
    return found


def fields_of(owner: type) -> list[str]:
    """Fields of a dataclass, struct or named tuple, in order; `name=` where one has a default."""
    if dataclasses.is_dataclass(owner):
        missing = dataclasses.MISSING
        return [
            f"{one.name}{'' if one.default is missing and one.default_factory is missing else '='}"
            for one in dataclasses.fields(owner)
        ]
    if issubclass(owner, msgspec.Struct):
        return [f"{one.encode_name}{'' if one.required else '='}" for one in msgspec.structs.fields(owner)]
    names: tuple[str, ...] = getattr(owner, "_fields", ())
    defaults = getattr(owner, "_field_defaults", {})
    return [f"{name}{'=' if name in defaults else ''}" for name in names]


def record(engine: str) -> dict[str, dict[str, Any]]:
    """Everything in `SEAMS` of one engine, as it is installed here."""
    return {name: describe(resolve_name(name)) for name in SEAMS[engine]}


def accepts(ours: Any, asked: list[str]) -> bool:
    """Whether a method of ours can be called in every way that the engine's signature allows."""
    names = [part.rstrip("=") for part in asked if part not in ("*", "self", "cls") and part[0] != "*"]
    parameters = inspect.signature(ours).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return True
    taken = [name for name in parameters if name not in ("self", "cls")]
    return taken[: len(names)] == names and all(
        parameters[name].default is not inspect.Parameter.empty for name in taken[len(names) :]
    )


def main(engine: str) -> None:
    entrance = Path(__file__).parent / engine / "conftest.py"
    if entrance.exists():
        runpy.run_path(str(entrance))  # makes the engine importable
    text = json.dumps(record(engine), indent=1, sort_keys=True)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
