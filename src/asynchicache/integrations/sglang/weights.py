"""Follows the weights of a running SGLang, which tells no cache when they change.

SGLang updates weights from disk, tensors, a process group or IPC, by `POST /update_weights_from_...`. A
version comes with them (`weight_version`), or by `POST /update_weight_version`, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from asynchicache.errors import ConfigError
from asynchicache.integrations.served_weights import ServedWeights
from asynchicache.integrations.sglang.seam import SUPPORTED

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_NO_VERSION = "default"


class SGLangWeights(ServedWeights):
    """The weights of this process's model.

    Args:
        engine_version: returns SGLang's own `weight_version`.
    """

    def __init__(self, engine_version: Callable[[], str] = lambda: _NO_VERSION) -> None:
        self._engine_version = engine_version
        self._seen = engine_version()
        super().__init__("" if self._seen == _NO_VERSION else self._seen)

    def name(self) -> str:
        """As of `ServedWeights`; reads SGLang's version first, which `/update_weight_version` changes."""
        if (version := self._engine_version()) != self._seen:
            self.changed(version)
        return super().name()

    def changed(self, version: str = "") -> None:
        self._seen = version or self._engine_version()
        super().changed(version)


def follow_weights() -> SGLangWeights:
    """Return the weights of this process's model; the same object at each call.

    SGLang has no hook for it, so methods that every update and every reset goes through are wrapped where
    SGLang looks them up.

    Raises:
        ConfigError: SGLang is another version.
    """
    if find_spec("sglang") is None:
        return SGLangWeights()
    try:
        manager = import_module(_MANAGER).SchedulerWeightUpdaterManager
        runner = import_module(_RUNNER).WeightUpdater
        controller = import_module(_CONTROLLER).HiCacheController
        serving = import_module("sglang.srt.runtime_context").get_serving
        if (known := getattr(manager, "asynchicache_weights", None)) is not None:
            return known  # type: ignore[no-any-return]
        weights = SGLangWeights(lambda: str(serving().weight_version))
        _follow(weights, manager, runner, controller)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the weights of the SGLang that is installed cannot be followed: {error}; install "
            f"sglang=={SUPPORTED}"
        ) from error
    manager.asynchicache_weights = weights
    return weights


def _follow(weights: SGLangWeights, manager: Any, runner: Any, controller: Any) -> None:
    def told(_: Any, weight_version: str | None) -> None:
        if weight_version is not None:
            weights.changed(weight_version)

    def ended(_: Any, run_post_load: bool) -> None:
        if run_post_load:  # nothing was loaded by SGLang, so others wrote the weights
            weights.changed()

    _wrap(manager, "_observe_weight_load", before=lambda *_: weights.changed())
    _wrap(manager, "record_weight_version_after_update", after=told)
    _wrap(runner, "begin_weight_update", before=lambda *_: weights.changed())
    _wrap(runner, "end_weight_update", after=ended)
    _wrap(controller, "reset", after=lambda *_: weights.dropped())


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[..., object] = lambda *_, **__: None,
    after: Callable[..., object] = lambda *_, **__: None,
) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def followed(*arguments: Any, **named: Any) -> Any:
        before(*arguments, **named)
        result = method(*arguments, **named)
        after(*arguments, **named)
        return result

    setattr(owner, name, followed)
