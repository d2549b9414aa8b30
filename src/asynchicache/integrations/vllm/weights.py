"""Follows the weights of a running vLLM, which tells no connector when they change.

Whatever changes them goes through `EngineCore.collective_rpc`: reloads, transfers from a trainer, methods of
the user's. `set_weight_version` names them.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

from asynchicache.errors import ConfigError
from asynchicache.integrations.served_weights import ServedWeights

_READS = ("check_", "get_", "has_", "is_", "list_", "num_", "profile", "report_", "synchronize")
"""What names of methods begin with that change no weights."""


class VllmWeights(ServedWeights):
    """The weights of one engine."""

    def reset(self) -> None:
        """vLLM drops all pages. If the weights did not change, it is asked to forget them nevertheless."""
        if not self.mixed:
            self.changed()
        self.dropped()


def follow_weights() -> VllmWeights:
    """Return the weights of an engine that starts now in this process.

    vLLM has no hook for it, so two methods are wrapped. Engines of one process are not told apart: what may
    change the weights of one counts for all.

    Raises:
        ConfigError: vLLM is another version.
    """
    weights = VllmWeights()
    if find_spec("vllm") is None:
        return weights
    core: Any = import_module("vllm.v1.engine.core").EngineCore
    if not hasattr(core, "asynchicache_weights"):
        try:
            _follow(core, core.collective_rpc, core.set_weight_version)
        except AttributeError as error:
            raise ConfigError(
                f"this vLLM changes weights in another way ({error}): use 0.32 or 0.33"
            ) from error
    core.asynchicache_weights.add(weights)
    return weights


def _follow(core: Any, collective_rpc: Any, set_weight_version: Any) -> None:
    engines: WeakSet[VllmWeights] = WeakSet()

    @wraps(collective_rpc)
    def calling(self: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        if not (isinstance(method, str) and method.startswith(_READS)):
            for weights in engines:
                weights.changed()
        return collective_rpc(self, method, *arguments, **named)

    @wraps(set_weight_version)
    def naming(self: Any, weight_version: str) -> Any:
        for weights in engines:
            weights.changed(weight_version)
        return set_weight_version(self, weight_version)

    core.collective_rpc, core.set_weight_version = calling, naming
    core.asynchicache_weights = engines
