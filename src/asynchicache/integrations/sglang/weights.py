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
from asynchicache.integrations.sglang.contents import weights_digest
from asynchicache.integrations.sglang.seam import SUPPORTED

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_NO_VERSION = "default"


class SGLangWeights(ServedWeights):
    """The weights of this process's model.

    Args:
        engine_version: returns SGLang's own `weight_version`.
        content: digest of the checkpoint that was loaded; empty if its files are not here.
    """

    def __init__(self, engine_version: Callable[[], str] = lambda: _NO_VERSION, content: str = "") -> None:
        self._engine_version = engine_version
        self._content = content
        self._seen = engine_version()
        super().__init__(self._both(self._seen))

    def name(self) -> str:
        """As of `ServedWeights`; reads SGLang's version first, which `/update_weight_version` changes."""
        if (version := self._engine_version()) != self._seen:
            self.told(version)
        return super().name()

    def begun(self) -> None:
        """Something writes the weights."""
        self._content = ""
        self.changed()

    def loaded(self, content: str) -> None:
        """They are those of a checkpoint."""
        self._content = content
        self.changed(content and self._both(self._seen))

    def told(self, version: str) -> None:
        """They are called `version`."""
        self._seen = version
        self.changed(self._both(version))

    def _both(self, version: str) -> str:
        return "/".join(part for part in (self._content, version) if part not in ("", _NO_VERSION))


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
        model = import_module("sglang.srt.runtime_context").get_model()
        content = weights_digest(model.model_path, model.revision)
        weights = SGLangWeights(lambda: str(serving().weight_version), content)
        _follow(weights, manager, runner, controller)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the weights of the SGLang that is installed cannot be followed: {error}; install "
            f"sglang=={SUPPORTED}"
        ) from error
    manager.asynchicache_weights = weights
    return weights


def _follow(weights: SGLangWeights, manager: Any, runner: Any, controller: Any) -> None:
    def recorded(_: object, __: Any, weight_version: str | None) -> None:
        if weight_version is not None:
            weights.told(weight_version)

    def loaded(result: tuple[bool, str], _: Any, model_path: str, *more: Any, **named: Any) -> None:
        if result[0]:
            weights.loaded(weights_digest(model_path))

    def ended(_: object, __: Any, run_post_load: bool) -> None:
        if run_post_load:  # nothing was loaded by SGLang, so others wrote the weights
            weights.begun()

    _wrap(manager, "_observe_weight_load", before=weights.begun)
    _wrap(manager, "record_weight_version_after_update", after=recorded)
    _wrap(runner, "update_weights_from_disk", after=loaded)
    _wrap(runner, "begin_weight_update", before=weights.begun)
    _wrap(runner, "end_weight_update", after=ended)
    _wrap(controller, "reset", after=lambda *_: weights.dropped())


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[..., object] = lambda *_, **__: None,
) -> None:
    """Call `before()`, the method, and `after(result, ...)` with what the method was called with."""
    method = getattr(owner, name)

    @wraps(method)
    def followed(*arguments: Any, **named: Any) -> Any:
        before()
        result = method(*arguments, **named)
        after(result, *arguments, **named)
        return result

    setattr(owner, name, followed)
