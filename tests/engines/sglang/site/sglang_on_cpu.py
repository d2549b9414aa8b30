"""Lets SGLang 0.5.23 serve on a machine without an accelerator: what is missing, and what is changed and why.

Modules are changed as they are imported, so that all processes have the same ones. Nothing here belongs to
the product, and nothing of what is tested is changed: scheduler, trees, controllers, threads and host pools.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from standins import stand_in

Change = Callable[[Any], None]

_CHANGES: dict[str, Change] = {}
_MISSING = frozenset({"torchvision", "llguidance", "outlines", "soundfile", "anthropic"})


def prepare() -> None:
    """Change modules of SGLang that this process imports from now on."""
    stand_in(_MISSING)
    sys.meta_path.insert(0, _Changer())


class _Changer(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = _CHANGES.get(fullname)
        if change is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader, change)
        return spec


class _Changed(Loader):
    """Another loader, and a change once it has run."""

    def __init__(self, loader: Loader, change: Change) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _change(*names: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        _CHANGES.update(dict.fromkeys(names, change))
        return change

    return register


# Host memory: no pinning, no kernels that copy, and pools on machines with little memory.


@_change(*(f"sglang.srt.mem_cache.pool_host.{name}" for name in ("mha", "mla", "mamba")))
def _copies(module: Any) -> None:
    from sglang_copies import stand_in_for_copies

    stand_in_for_copies(module)


@_change("sglang.srt.mem_cache.pool_host.base")
def _host_pools(module: Any) -> None:
    module.HostKVCache.pin_memory = property(lambda pool: False, lambda pool, wanted: None)
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


@_change("sglang.srt.mem_cache.pool_host.common")
def _registration(module: Any) -> None:
    module._cuda_host_register = lambda *args, **kwargs: None


@_change("sglang.srt.managers.schedule_batch")
def _batches(module: Any) -> None:
    """Its tensors are pinned wherever torch could; this torch cannot."""
    import torch

    module.is_pin_memory_available = lambda *args, **kwargs: False
    torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Any) -> Any:
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


# Models with states.


@_change("sglang.srt.arg_groups.mamba_hook")
def _checkpoints(module: Any) -> None:
    """States are kept at page boundaries; SGLang has not enabled that for CPUs."""
    module._platform_supports_mamba_cache_extra_buffer = lambda: True


@_change("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
def _kept_states(module: Any) -> None:
    module.track_mamba_states_if_needed = lambda conv, ssm, *rest, **unused: _keep([conv, ssm], *rest[:4])
    module.track_mamba_states_all_layers = lambda conv, ssm, *rest, **unused: _keep(
        [layer for pool in (conv, ssm) for layer in pool], *rest[:4]
    )


def _keep(pools: Sequence[Any], slots: Any, mask: Any, targets: Any, batch: int) -> None:
    """Copy the states of sequences that are at a boundary to their slots for checkpoints."""
    at_boundary = mask[:batch].nonzero().flatten()
    sources, destinations = slots[:batch][at_boundary].long(), targets[:batch][at_boundary].long()
    for pool in pools:
        pool[destinations] = pool[sources]


@_change(
    "sglang.kernels.ops.attention.fla.fused_norm_gate", "sglang.kernels.ops.attention.fla.layernorm_gated"
)
def _gated_norms(module: Any) -> None:
    """The branch that calls our `sgl_kernel`; it is for CPUs with AMX only."""
    module._use_cpu = True


@_change("sglang.kernels.ops.elementwise.elementwise")
def _shared_experts(module: Any) -> None:
    def launch(hidden: Any, weight: Any, shared: Any, output: Any, *, do_add: bool) -> None:
        gated = (hidden * weight).sum(-1, keepdim=True).sigmoid() * shared
        output.copy_(output + gated if do_add else gated)

    module._launch_fused_gate_sigmoid_mul = launch


# Sliding windows.


@_change("sglang.srt.layers.attention.torch_native_backend")
def _windows(module: Any) -> None:
    """0.5.23 writes a window where the window's pool has room, and reads where the full pool has."""
    backend = module.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, _reading_windows(getattr(backend, name)))


def _reading_windows(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        self: Any,
        query: Any,
        output: Any,
        keys: Any,
        values: Any,
        places: Any,
        requests: Any,
        *rest: Any,
        sliding_window_size: int | None = None,
        **more: Any,
    ) -> Any:
        if sliding_window_size is not None and self.use_sliding_window_kv_pool:
            import torch

            rows = places[requests]
            pool = self.token_to_kv_pool
            places = pool.translate_loc_from_full_to_swa(rows.flatten()).view(rows.shape).clamp(min=0)
            requests = torch.arange(len(rows))
        more["sliding_window_size"] = sliding_window_size
        return forward(self, query, output, keys, values, places, requests, *rest, **more)

    return run
