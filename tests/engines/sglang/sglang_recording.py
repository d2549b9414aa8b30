"""Our adapters, writing down what SGLang calls and what they answer: see `test_sglang_calls.py`.

`tests/data/calls/sglang-*.json` are such records; `make test` plays them again without SGLang.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from enum import Enum
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch

from asynchicache.integrations.sglang.linker import AsynchicacheLinker
from asynchicache.integrations.sglang.storage import AsynchicacheStorage

RECORD = "ASYNCHICACHE_CALLS"
PAGE = 64
_LOCK = Lock()

T = TypeVar("T", bound=type)


def plain(value: Any, size: int = PAGE) -> Any:
    """Return a value as JSON has it; indices become numbers of pages, and of states."""
    if isinstance(value, torch.Tensor):
        return [int(index) // size for index in value.flatten()[::size].tolist()]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [plain(each, size) for each in value]
    if isinstance(value, dict):
        return {str(plain(name)): plain(each, size) for name, each in value.items()}
    if hasattr(value, "device_indices"):  # a transfer
        name = plain(value.name)
        size = 1 if name == "mamba" else PAGE
        fields = ("keys", "device_indices", "host_indices", "hit_policy")
        return {"name": name} | {field: plain(getattr(value, field), size) for field in fields}
    if hasattr(value, "kv_hit_pages"):
        return [value.kv_hit_pages, plain(value.restorable_prefix_pages)]
    return value if isinstance(value, str | int | bool | None) else type(value).__name__


def recording(*names: str) -> Callable[[T], T]:
    """Make a class write down calls of some of its methods, a line each."""

    def change(kind: T) -> T:
        for name in names:
            setattr(kind, name, _recorded(name, getattr(kind, name)))
        return kind

    return change


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        given = plain([*arguments, *named.values()])
        answer = method(self, *arguments, **named)
        if name != "num_completed_offloads" or answer:
            line = json.dumps({"call": name, "arguments": given, "answer": plain(answer)})
            with _LOCK, Path(os.environ[RECORD]).open("a") as file:
                file.write(line + "\n")
        return answer

    return call


@recording("batch_get_v1", "batch_set_v1", "batch_exists_v2", "batch_get_v2", "batch_set_v2")
class RecordingStorage(AsynchicacheStorage):
    """The storage backend of a model with states."""


@recording(
    "path_before",
    "path_of",
    "lookup",
    "load",
    "start_layer_wise_loading",
    "finish_layer_wise_loading",
    "offload",
    "num_completed_offloads",
    "pop_completed_offload",
)
class RecordingLinker(AsynchicacheLinker):
    """The linker."""
