"""Under the names that SGLang imports."""

from __future__ import annotations

from typing import Any

from standins import Nothing

from sgl_kernel.gated_delta_net import convolve, convolve_step, scan

causal_conv1d_fn_cpu = convolve
causal_conv1d_update_cpu = convolve_step
chunk_gated_delta_rule_cpu = scan


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing
