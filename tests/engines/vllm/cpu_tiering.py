"""Lets vLLM's tiering run where its KV cache is in host memory: vLLM's own worker copies on GPUs only."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from asynchicache.integrations.vllm.spec import AsynchicacheTieringSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks to rows and back at once, each layer's own bytes only, as vLLM's worker does."""

    def __init__(self, caches: Any, region: Any) -> None:
        self._refs = caches.group_data_refs
        self._region = region
        self._blocks = [_pages(tensor) for tensor in caches.tensors]
        self._rows = [region.create_next_worker_view(tensor.page_size_bytes) for tensor in caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, blocks: Any, rows: Any, *, store: bool) -> bool:
        started = time.perf_counter()
        pairs = list(zip(blocks.block_ids, rows.block_ids, strict=True))
        moved = place = 0
        for group, size in enumerate(blocks.group_sizes):
            for block, row in pairs[place : place + size]:
                for ref in self._refs[group]:
                    on_device = self._blocks[ref.tensor_idx][int(block), : ref.page_size_bytes]
                    in_row = self._rows[ref.tensor_idx][int(row), : ref.page_size_bytes]
                    (in_row if store else on_device).copy_(on_device if store else in_row)
                    moved += ref.page_size_bytes
            place += size
        self._finished.append(TransferResult(job_id, True, moved, time.perf_counter() - started))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Iterable[int]) -> None:
        """Everything has ended."""

    def shutdown(self) -> None:
        self._blocks, self._rows = [], []
        self._region.cleanup()


def _pages(tensor: Any) -> torch.Tensor:
    """Return a view `[blocks, bytes]` of a canonical tensor."""
    found: torch.Tensor = tensor.tensor
    return found.view(torch.int8).view((-1, tensor.page_size_bytes)) if found.is_contiguous() else found


class OnHost(TieringOffloadingSpec):
    """vLLM's spec with that worker."""

    _copier: CopyingWorker | None = None

    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        if self._copier is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copier = CopyingWorker(kv_caches, region)
        return self._copier


class CpuTieringSpec(AsynchicacheTieringSpec, OnHost):
    """Ours, with it."""
