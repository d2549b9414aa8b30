"""Where SGLang's host pools have their pages, and how it names them: recorded for tests without SGLang.

`tests/data/sglang_host_pools.json` is what `record` gives; a test of `make conformance` compares the two.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang_trees import Tree

PAGE_SIZE = 4
WANTED = {
    "mha-page_first_direct": ("full", "page_first_direct", "kv"),
    "mha-page_first": ("full", "page_first", "kv"),
    "mha-layer_first": ("full", "layer_first", "kv"),
    "mha-page_head": ("full", "page_head", "kv"),
    "mla-page_first_direct": ("mla", "page_first_direct", "kv"),
    "mla-layer_first": ("mla", "layer_first", "kv"),
    "mamba-page_first_direct": ("full+mamba", "page_first_direct", "mamba"),
    "swa-page_first_direct": ("full+swa", "page_first_direct", "swa"),
}


def allocations(pool: Any) -> list[torch.Tensor]:
    """The pool's memory, one tensor an allocation."""
    buffers = pool.kv_buffer
    return list(buffers) if isinstance(buffers, list | tuple) else [buffers]


def geometry(pool: Any) -> dict[str, Any]:
    """A pool's pages: which allocation each part lies in, from which byte on, how far apart.

    Addresses are asked of every page, so that parts are proven to lie at even distances.
    """
    pages, size = pool.page_num, pool.page_size
    pointers, sizes = pool.get_page_buffer_meta(torch.arange(pages * size))
    count = len(pointers) // pages
    memory = allocations(pool)
    parts = []
    for part in range(count):
        mine = pointers[part::count]
        (stride,) = {later - earlier for earlier, later in pairwise(mine)}
        number = next(
            at
            for at, tensor in enumerate(memory)
            if tensor.data_ptr() <= mine[0] < tensor.data_ptr() + tensor.nbytes
        )
        offset = mine[0] - memory[number].data_ptr()
        parts.append({"allocation": number, "offset": offset, "stride": stride, "nbytes": sizes[part]})
    return {
        "class": type(pool).__name__,
        "layout": pool.layout,
        "dtype": str(pool.dtype),
        "page_size": size,
        "pages": pages,
        "allocations": [tensor.nbytes for tensor in memory],
        "aligned": [tensor.data_ptr() % 4096 == 0 for tensor in memory],
        "parts": parts,
    }


def record(storage: dict[str, Any]) -> dict[str, Any]:
    """All of them; `storage` are options of a backend that pools are registered with."""
    found: dict[str, Any] = {}
    for name, (kind, layout, pool) in WANTED.items():
        tree = Tree(kind, "python", storage, layout=layout, page_size=PAGE_SIZE, tokens=64)
        found[name] = geometry(tree.cache.host_pool_group.get_pool(pool))
        tree.close()
    return {"pools": found, "hashes": hashes()}


def hashes() -> list[dict[str, Any]]:
    """The names of a prefix's pages, with and without a namespace."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 100_000, 0, 1, 2**32 - 1]
    return [
        {
            "tokens": tokens,
            "page_size": PAGE_SIZE,
            "extra_key": extra_key,
            "cache_salt": salt,
            "hashes": get_storage_hash_str(
                RadixKey(array("q", tokens), extra_key=extra_key, cache_salt=salt), page_size=PAGE_SIZE
            ),
        }
        for extra_key, salt in ((None, None), ("adapter", None), (None, "tenant"), ("adapter", "tenant"))
    ]


OPTIONS = {
    "backend_name": "asynchicache",
    "module_path": "asynchicache.integrations.sglang.storage",
    "class_name": "AsynchicacheStorage",
    "interface_v1": 1,
    "weight_version": "1",
    "storage": "memory",
}
