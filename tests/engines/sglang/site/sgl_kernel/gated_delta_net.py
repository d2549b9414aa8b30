"""Gated delta nets (arXiv 2412.06464) token by token: slow, and equal whatever the batch or the chunk."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

CHUNK = 64
"""Tokens between the states that SGLang asks for, to keep them as checkpoints."""

_EPS = 1e-6


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = values.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def rms_norm_gated(
    values: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    return (rms_norm(values, weight.float(), eps) * functional.silu(gate.float())).to(values.dtype)


def gates(
    log_a: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the decay and the rate of learning, each [1, tokens, heads]."""
    decay = -log_a.float().exp() * functional.softplus(a.float() + bias.float())
    return decay[None], b.float().sigmoid()[None]


# The convolution in front.


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: Any = None,
    cache_indices: Any = None,
    has_initial_state: Any = None,
    conv_states: Any = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    **unused: object,
) -> torch.Tensor:
    """Convolve sequences that lie one after the other, `x` [channels, tokens]; keep their last inputs."""
    result = torch.empty_like(x)
    kept = weight.shape[1] - 1
    starts = query_start_loc.tolist()
    for number, (start, end) in enumerate(pairwise(starts)):
        slot = int(cache_indices[number])
        known = has_initial_state is not None and bool(has_initial_state[number])
        before = conv_states[slot].to(x.dtype) if known else x.new_zeros(x.shape[0], kept)
        inputs = torch.cat([before, x[:, start:end]], dim=1)
        channels = functional.conv1d(inputs[None], weight[:, None].to(x.dtype), bias, groups=x.shape[0])
        result[:, start:end] = _activate(channels[0], activation)
        if slot != pad_slot_id:
            conv_states[slot] = inputs[:, -kept:].to(conv_states.dtype)
    return result


def convolve_step(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: object = None,
    conv_state_indices: Any = None,
    **unused: object,
) -> torch.Tensor:
    """Convolve one token of each sequence, `x` [sequences, channels]."""
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_state[slots].to(x.dtype), x[:, :, None]], dim=2)
    channels = torch.einsum("bck,ck->bc", inputs, weight.to(x.dtype))
    conv_state[slots] = inputs[:, :, 1:].to(conv_state.dtype)
    return _activate(channels if bias is None else channels + bias, activation)


def _activate(values: torch.Tensor, activation: str | None) -> torch.Tensor:
    return functional.silu(values) if activation in ("silu", "swish") else values


# The recurrence.


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state_indices: Any = None,
    use_qk_l2norm_in_kernel: bool = True,
    **unused: object,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Run sequences that lie one after the other, [1, tokens, heads, width]; states change in place.

    Returns:
        Outputs; None; the states before each chunk of each sequence, [1, chunks, heads, values, keys].
    """
    query, key, value, decay, rate = (each[0].float() for each in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    share = value.shape[1] // query.shape[1]  # value heads of one key head
    query = (query * query.shape[-1] ** -0.5).repeat_interleave(share, dim=1)
    key = key.repeat_interleave(share, dim=1)
    factor = decay.exp()[..., None, None]
    result = torch.empty_like(value)
    chunks: list[torch.Tensor] = []
    starts = cu_seqlens.tolist()
    for number, (start, end) in enumerate(pairwise(starts)):
        slot = int(initial_state_indices[number])
        state = initial_state[slot].float()
        for token in range(start, end):
            if (token - start) % CHUNK == 0:
                chunks.append(state)
            state = state * factor[token]
            column = key[token][:, :, None]
            wrong = (value[token][:, :, None] - state @ column) * rate[token][:, None, None]
            state = torch.baddbmm(state, wrong, column.mT)
            result[token] = (state @ query[token][:, :, None]).squeeze(-1)
        initial_state[slot] = state.to(initial_state.dtype)
    return result[None].to(v.dtype), None, torch.stack(chunks)[None]


def step_of_each(
    A_log: torch.Tensor,  # noqa: N803 - SGLang's names
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **unused: object,
) -> torch.Tensor:
    """Decode one token of each sequence."""
    decay, rate = gates(A_log, a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), dt_bias)
    return scan(q, k, v, decay, rate, initial_state_source, cu_seqlens, initial_state_indices)[0]


def _unit(values: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + _EPS)
