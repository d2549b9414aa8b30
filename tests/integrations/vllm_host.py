"""What vLLM hands to a tier, as far as ours reads it, for tests without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np

from asynchicache.integrations.vllm.rows import GroupRuns, MemoryRun

CHUNK_BYTES = 8192
ROWS = 10


def aligned_rows() -> np.ndarray:
    """Rows of the primary tier, on a page of memory as vLLM's are."""
    return np.frombuffer(mmap(-1, ROWS * CHUNK_BYTES), np.int8).reshape(ROWS, CHUNK_BYTES)


def whole_chunks(groups: int) -> GroupRuns:
    """Every group fills all of a row."""
    return {number: (MemoryRun(0, CHUNK_BYTES),) for number in range(groups)}


def kv_caches(pages: Sequence[int], *groups: Sequence[tuple[int, int]]) -> SimpleNamespace:
    """vLLM's `CanonicalKVCaches`.

    Args:
        pages: bytes of a block of each tensor, padded.
        groups: of each group, the tensors of its layers and the bytes that a block of each fills.
    """
    return SimpleNamespace(
        tensors=[SimpleNamespace(page_size_bytes=nbytes) for nbytes in pages],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=index, page_size_bytes=used, mapping=None) for index, used in refs]
            for refs in groups
        ],
    )


def offloading_spec(groups: int = 3, *, events: bool = False, runs: Any = ...) -> SimpleNamespace:
    """The part of vLLM's `OffloadingSpec` that the tier reads, and of ours."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=False, data_parallel_index=0
    )
    config = SimpleNamespace(
        groups=[
            SimpleNamespace(
                group_id=number,
                tokens_per_block=16,
                layer_names=(f"layers.{number}",),
                sliding_window_size_in_chunks=None,
            )
            for number in range(groups)
        ],
        model=SimpleNamespace(name="org/tiny", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
        enable_kv_cache_events=events,
    )
    known = whole_chunks(groups) if runs is ... else runs
    return SimpleNamespace(config=config, group_runs=lambda: known)
