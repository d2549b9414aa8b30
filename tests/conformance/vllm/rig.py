"""vLLM's own `TieringOffloadingManager` with our tier below it, and a scheduler's part played by hand."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import shake_128
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from asynchicache.integrations.vllm.spec import AsynchicacheTieringSpec
from asynchicache.integrations.vllm.tier import AsynchicacheTier

CHUNK_BYTES = 8192
TIER: Mapping[str, Any] = {
    "type": "AsynchicacheTier",
    "module_path": "asynchicache.integrations.vllm.tier",
    "weight_version": "w1",
}
FULL = OffloadingGroupConfig(16, ("layers.0.attn", "layers.2.attn"), 0)
WINDOW = OffloadingGroupConfig(16, ("layers.1.attn",), 1, sliding_window_size_in_chunks=2)
MAMBA = OffloadingGroupConfig(16, ("layers.3.mixer",), 2, sliding_window_size_in_chunks=1)


def key(name: str, group: int = 0) -> OffloadKey:
    """A chunk's key, as vLLM makes it of a block hash of 32 bytes and a group."""
    return make_offload_key(shake_128(name.encode()).digest(32), group)


def content(of: bytes) -> np.ndarray:
    """What the chunk with this key holds."""
    return np.frombuffer(shake_128(b"content" + of).digest(CHUNK_BYTES), np.int8)


def offloading_config(
    tier: Mapping[str, Any],
    *,
    chunks: int = 8,
    groups: Sequence[OffloadingGroupConfig] = (FULL,),
    model: str = "org/tiny",
    tp_size: int = 1,
    events: bool = False,
    replica: int = 0,
    **extra: Any,
) -> OffloadingConfig:
    """What vLLM derives from its own configuration and the JSON of the how-to page."""
    return OffloadingConfig(
        groups=tuple(groups),
        worker_kv_bytes_per_block=CHUNK_BYTES // tp_size,
        enable_kv_cache_events=events,
        extra_config={
            "spec_name": "RigSpec",
            "spec_module_path": "rig",
            "cpu_bytes_to_use": chunks * CHUNK_BYTES,
            "secondary_tiers": [dict(tier)],
            **extra,
        },
        engine_id=f"test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig(model, "bfloat16", 4096),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(0, tp_size, tp_size, 1, 1, 1, replica, 2, None, False),
    )


class HostSpec(TieringOffloadingSpec):
    """Of a worker that copies nothing: vLLM's own wants a GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> None:
        pass


class RigSpec(AsynchicacheTieringSpec, HostSpec):
    """Ours, with that worker."""


def kv_caches(pages: Sequence[int], *groups: Sequence[tuple[int, int]]) -> CanonicalKVCaches:
    """A worker's caches.

    Args:
        pages: bytes of a block of each tensor, padded.
        groups: of each group, the tensors of its layers and the bytes that a block of each fills.
    """
    tensors = [CanonicalKVCacheTensor(torch.zeros((1, nbytes), dtype=torch.int8), nbytes) for nbytes in pages]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in groups])


class Rig:
    """A manager, and what a scheduler and its workers do with one.

    Args:
        tier: the entry of `secondary_tiers`, without what all tests share.
        caches: of each worker; by default every layer fills all of a row.
        options: of `offloading_config`.
    """

    def __init__(
        self, tier: Mapping[str, Any], *, caches: CanonicalKVCaches | None = None, **options: Any
    ) -> None:
        config = offloading_config({**TIER, **tier}, **options)
        self.spec = OffloadingSpecFactory.create_spec(config)
        area = config.worker_kv_bytes_per_block
        filled = [[(0, area)] * len(group.layer_names) for group in config.groups]
        for rank in range(config.parallel.world_size):
            worker = replace(config, parallel=replace(config.parallel, rank=rank))
            RigSpec(worker).get_worker(caches or kv_caches([area], *filled))
        manager = self.spec.get_manager()
        assert isinstance(manager, TieringOffloadingManager)
        self.manager = manager
        (self.tier,) = manager.secondary_tiers
        assert isinstance(self.tier, AsynchicacheTier)
        self.rows = np.asarray(manager.primary_tier.get_kv_memoryview())
        self._requests = 0

    def request(self, parameters: Any = None, hints: Any = None) -> ReqContext:
        """A new request."""
        self._requests += 1
        context = ReqContext(f"request-{self._requests}", kv_transfer_params=parameters, kv_hints=hints)
        self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def compute(self, keys: Sequence[OffloadKey], context: ReqContext | None = None) -> ReqContext:
        """Chunks come from the GPU: into the primary tier, and on to ours."""
        context = context or self.request()
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None, "the primary tier is full"
        assert isinstance(prepared.store_spec, CPULoadStoreSpec)
        for stored, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.write(stored, row)
        self.manager.complete_store(prepared.keys_to_store, context)
        return context

    def write(self, key: OffloadKey, row: int) -> None:
        """A worker copies a chunk into a row."""
        self.rows[row] = content(key)

    def holds(self, key: OffloadKey, row: int) -> bool:
        """Whether a worker would find it there."""
        return np.array_equal(self.rows[row], content(key))

    def end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """A step ends, and all that it began."""
        self.end_step()
        self.tier.drain_jobs()

    def ask(self, keys: Iterable[OffloadKey], context: ReqContext) -> list[str]:
        """What the manager says of each chunk now."""
        return [self.manager.lookup(one, context).name for one in keys]

    def ask_to_the_end(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[str]:
        """What it says once it has stopped to say that it does not know yet."""
        for _ in range(5):
            answers = self.ask(keys, context)
            if not {"RETRY", "HIT_PENDING"} & set(answers):
                return answers
            self.settle()
        raise AssertionError(f"no end: {answers}")

    def fetch(self, keys: Sequence[OffloadKey]) -> list[str]:
        """A new request wants these chunks; bytes of hits are compared where a GPU would read them."""
        context = self.request()
        answers = self.ask_to_the_end(keys, context)
        hits = [one for one, answer in zip(keys, answers, strict=True) if answer == "HIT"]
        if hits:
            spec = self.manager.prepare_load(hits, context)
            assert isinstance(spec, CPULoadStoreSpec)
            for one, row in zip(hits, spec.chunk_ids, strict=True):
                assert self.holds(one, row), f"wrong bytes in row {row}"
            self.manager.complete_load(hits, context)
        self.finish(context)
        return answers

    def evict_all(self) -> None:
        """The primary tier gives up everything, as after a reset; our tier keeps its own."""
        self.settle()
        self.manager.reset_cache()
        self.manager.on_reset_flushed()

    def store_and_evict(self, keys: Sequence[OffloadKey]) -> None:
        self.finish(self.compute(keys))
        self.evict_all()

    def shutdown(self) -> None:
        self.manager.shutdown()

    def memory_is_unmapped(self) -> bool:
        """Whether vLLM could let go of the primary tier: nobody holds its rows any more."""
        region = self.manager.primary_tier._mmap_region
        self.rows = np.empty(0)
        gc.collect()
        region.cleanup()
        return region.mmap_obj is None


Open = Callable[..., Rig]
KEYS = [key(f"block {number}") for number in range(6)]
