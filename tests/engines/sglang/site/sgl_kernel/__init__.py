"""In place of SGLang's package of kernels, which has no build for a CPU: the few that tiny models need.

Without `convert_weight_packed` SGLang takes its own fall-backs in torch for everything else.
"""

from __future__ import annotations

from typing import Any

import torch
from standins import Nothing

from sgl_kernel.gated_delta_net import gates, rms_norm, rms_norm_gated, step_of_each

__version__ = "0"


def _gate_in_place(values: torch.Tensor, gate: torch.Tensor) -> None:
    values.mul_(torch.sigmoid(gate.reshape(values.shape)))


def _normalise(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each head of `width` channels; Gemma's weights are offsets from 1."""
    heads = [
        rms_norm(each.reshape(-1, width), 1 + weight.float(), eps).to(each.dtype).contiguous()
        for each, weight in ((query, query_weight), (key, key_weight))
    ]
    return heads[0], heads[1]


def _normalise_beside_gate(
    query_and_gate: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    width: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, gate = query_and_gate.view(-1, heads, 2, width).unbind(2)
    return (
        *_normalise(query, key, query_weight, key_weight, eps, width),
        gate.reshape(-1, width).contiguous(),
    )


def _part(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, heads: int, key_width: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = key_heads * key_width
    mixed, gate = qkvz.split([2 * keys + heads * width, heads * width], dim=1)
    beta, decay = ba.split(heads, dim=1)
    return (
        mixed.contiguous(),
        gate.reshape(-1, heads, width).contiguous(),
        beta.contiguous(),
        decay.contiguous(),
    )


class _Operators:
    """What `torch.ops.sgl_kernel` has; SGLang asks it which kernels there are."""

    fused_gdn_gating_cpu = staticmethod(gates)
    fused_sigmoid_gating_delta_rule_update_cpu = staticmethod(step_of_each)
    fused_rmsnorm_gated_cpu = staticmethod(rms_norm_gated)
    fused_sigmoid_mul_cpu = staticmethod(_gate_in_place)
    fused_qk_gemma_rmsnorm_cpu = staticmethod(_normalise)
    fused_qk_gemma_rmsnorm_with_gate_cpu = staticmethod(_normalise_beside_gate)
    fused_qkvzba_split_reshape_cat_contiguous_cpu = staticmethod(_part)


torch.ops.sgl_kernel = _Operators()


def __getattr__(name: str) -> Any:
    """Other kernels are imported by name, and never called."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing
