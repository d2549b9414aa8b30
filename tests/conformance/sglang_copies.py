"""Copies between SGLang's device and host pools by torch, where its kernels need a GPU: the same bytes go to
the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def _copy_down(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Pages of all layers, device `[tokens, ...]` a layer, to host `[pages, layers, page, ...]`."""
    layers = len(src_ptrs) // len(dst_ptrs)
    pages = dst_indices[::page_size] // page_size
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[pages, number % layers] = source[src_indices].reshape(-1, *target.shape[2:])


def _copy_up(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Pages of one layer, the other way."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].reshape(-1, *target.shape[1:])


def _copy_layers(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Tokens between buffers that have layers first on both sides, either way."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].reshape(-1, *target.shape[1:])


def stand_in_for_copies(module: Any) -> None:
    """Give one of the modules of `sglang.srt.mem_cache.pool_host` these copies."""
    module.transfer_kv_all_layer_direct_lf_pf = _copy_down
    module.transfer_kv_per_layer_direct_pf_lf = _copy_up
    module.transfer_kv_direct = _copy_layers
