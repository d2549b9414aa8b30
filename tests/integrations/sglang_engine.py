"""SGLang's classes that our adapters wrap, as far as they are wrapped."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class StandInEngine:
    """One process of SGLang: what updates weights, and what resets its memory.

    Attributes:
        manager, runner, controller: instances of the wrapped classes.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        version: str = "default",
        *,
        folder: Path = Path("/nothing is here"),
        adapters: Mapping[str, Path] | None = None,
        **settings: str,
    ) -> None:
        self.serving = SimpleNamespace(weight_version=version)
        self.model = SimpleNamespace(model_path=str(folder), revision=None, **settings)
        refs = [
            SimpleNamespace(lora_id=f"id of {name}", lora_name=name, lora_path=str(path))
            for name, path in (adapters or {}).items()
        ]
        self.lora = SimpleNamespace(enable_lora=adapters is not None, lora_paths=refs)
        serving = self.serving

        class SchedulerWeightUpdaterManager:
            @contextmanager
            def _observe_weight_load(self, source: str) -> Iterator[None]:
                yield

            def record_weight_version_after_update(self, weight_version: str | None) -> None:
                serving.weight_version = weight_version or serving.weight_version

        class WeightUpdater:
            def begin_weight_update(self) -> None: ...

            def end_weight_update(self, *, run_post_load: bool) -> None: ...

            def update_weights_from_disk(
                self,
                model_path: str,
                load_format: str,
                weight_name_filter: Any = None,
                recapture_cuda_graph: bool = False,
            ) -> tuple[bool, str]:
                return True, ""

        class HiCacheController:
            def reset(self) -> None: ...

        class Req:
            def __init__(self, rid: str, *, lora_id: str | None = None, extra_key: str | None = None) -> None:
                self.extra_key = extra_key if lora_id is None else (extra_key or "") + lora_id

        self.request = Req
        self.classes = {
            "sglang.srt.managers.scheduler_components.weight_updater": SchedulerWeightUpdaterManager,
            "sglang.srt.model_executor.model_runner_components.weight_updater": WeightUpdater,
            "sglang.srt.managers.cache_controller": HiCacheController,
        }
        for name, owner in self.classes.items():
            self._module(monkeypatch, name, **{owner.__name__: owner})
        self._module(monkeypatch, "sglang.srt.managers.schedule_batch", Req=Req)
        self._module(
            monkeypatch,
            "sglang.srt.runtime_context",
            get_serving=lambda: serving,
            get_model=lambda: self.model,
            get_lora=lambda: self.lora,
        )
        self._module(monkeypatch, "sglang")
        self.manager, self.runner = SchedulerWeightUpdaterManager(), WeightUpdater()
        self.controller = HiCacheController()

    @staticmethod
    def _module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace()  # type: ignore[assignment]  # `find_spec` asks for it
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    def update(
        self,
        version: str | None = None,
        *,
        flush: bool = True,
        fails: bool = False,
        folder: Path | None = None,
    ) -> None:
        """Do what SGLang does for `POST /update_weights_from_...`; from disk if a folder is given."""
        with self.manager._observe_weight_load("disk"):
            if folder is not None:
                self.runner.update_weights_from_disk(str(folder), "auto")
            if not fails:
                self.manager.record_weight_version_after_update(version)
            if flush:
                self.controller.reset()
