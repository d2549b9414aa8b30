"""What vLLM hands to a tier, as far as ours reads it, for tests without vLLM."""

from __future__ import annotations

from mmap import mmap
from types import SimpleNamespace

import numpy as np

CHUNK_BYTES = 8192
ROWS = 10


def aligned_rows() -> np.ndarray:
    """Rows of the primary tier, on a page of memory as vLLM's are."""
    return np.frombuffer(mmap(-1, ROWS * CHUNK_BYTES), np.int8).reshape(ROWS, CHUNK_BYTES)


def offloading_spec(groups: int = 3, *, events: bool = False) -> SimpleNamespace:
    """The part of vLLM's `OffloadingSpec` that the tier reads."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=False, data_parallel_index=0
    )
    config = SimpleNamespace(
        groups=[
            SimpleNamespace(group_id=number, tokens_per_block=16, layer_names=(f"layers.{number}",))
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
    return SimpleNamespace(config=config)
