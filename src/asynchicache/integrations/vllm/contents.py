"""What the bytes of vLLM's blocks depend on, and its block hashes do not say.

vLLM hashes an adapter's name and path, and an image's name as the client gives it; durable storage outlives
what such a name meant. There is no hook for it, so two functions are wrapped where vLLM looks them up. So its
own prefix cache gets the same keys. And vLLM tells no connector when its weights change, so this follows it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import uuid
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

from asynchicache.errors import ConfigError
from asynchicache.integrations.model_files import (
    adapter_digest,
    checkpoint_digest,
    file_states,
    local_folder,
)
from asynchicache.integrations.served_weights import ServedWeights

_READS = ("check_", "get_", "has_", "is_", "list_", "num_", "profile", "report_", "synchronize")
"""What names of methods begin with that change no weights."""


class VllmWeights(ServedWeights):
    """The weights of one engine.

    Whatever changes them goes through `EngineCore.collective_rpc`: reloads, transfers from a trainer, methods
    of the user's. `set_weight_version` names them.
    """

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


logger = logging.getLogger(__name__)

_HASHES = "vllm.v1.core.kv_cache_utils"
_ADAPTERS, _IMAGES = "_gen_lora_extra_hash_keys", "_gen_mm_extra_hash_keys"
_OF_CONTENT = re.compile(r"(?:.*:)?[0-9a-f]{64,128}", re.DOTALL)  # as vLLM's hashers write it
_WHERE = frozenset({"_name_or_path", "transformers_version"})  # of a configuration: not of the model
_PROCESS = uuid.uuid4().hex


def weights_digest(model: str, revision: str | None = None) -> str:
    """Identify the weights of a checkpoint; empty if it is not on this machine."""
    folder = local_folder(model, revision)
    return "" if folder is None else checkpoint_digest(folder)


def model_digest(model_config: Any, cache_config: Any) -> str:
    """Identify a model's weights and the settings that change what it computes, or how its KV is written.

    Args:
        model_config: vLLM's `ModelConfig`; overrides of the configuration are in its `hf_config`.
        cache_config: vLLM's `CacheConfig`.
    """
    config = {name: value for name, value in model_config.hf_config.to_dict().items() if name not in _WHERE}
    found = {
        "weights": weights_digest(model_config.model, model_config.revision),
        "config": config,
        "quantization": model_config.quantization,
        "dtype": str(model_config.dtype),
        "cache_dtype": str(cache_config.cache_dtype),
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:32]


def hash_contents() -> None:
    """Make vLLM hash what adapters hold; called when an engine starts, which has loaded none yet.

    Raises:
        ConfigError: vLLM is another version.
    """
    if find_spec("vllm") is None:
        return
    module: Any = import_module(_HASHES)
    if hasattr(module, "asynchicache_adapters"):
        module.asynchicache_adapters.forget()
        return
    try:
        adapters, images = getattr(module, _ADAPTERS), getattr(module, _IMAGES)
    except AttributeError as error:
        raise ConfigError(
            f"this vLLM hashes blocks in another way ({error}), so that retrained adapters could not be told "
            "apart: use vLLM 0.32 or 0.33"
        ) from error
    contents = module.asynchicache_adapters = AdapterContents()

    @wraps(adapters)
    def of_adapters(request: Any) -> list[Any]:
        return [(*key, contents.of_request(request)) for key in adapters(request)]

    @wraps(images)
    def of_images(request: Any, *arguments: Any, **named: Any) -> tuple[list[Any], int]:
        keys, place = images(request, *arguments, **named)
        return [(kind, image_name(name), *rest) for kind, name, *rest in keys], place

    setattr(module, _ADAPTERS, of_adapters)
    setattr(module, _IMAGES, of_images)


def image_name(identifier: str) -> str:
    """Return an image's name for keys: vLLM's hash of its content, or a client's name, in this process."""
    return identifier if _OF_CONTENT.fullmatch(identifier) else f"{identifier}:{_PROCESS}"


class AdapterContents:
    """What adapters held when they were first used.

    vLLM loads an adapter once for each `lora_int_id`. If its files change afterwards, nobody knows which ones
    vLLM has: the adapter then has a name that no other process finds.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[object, str]] = {}

    def forget(self) -> None:
        """No adapter is loaded."""
        self._known.clear()

    def of_request(self, request: Any) -> str:
        """Return what names the content of a request's adapter; it stays the same for the request."""
        name = getattr(request, "asynchicache_adapter", None)
        if name is None:
            name = request.asynchicache_adapter = self.of(request.lora_request)
        return str(name)

    def of(self, adapter: Any) -> str:
        """
        Args:
            adapter: vLLM's `LoRARequest`.
        """
        place = (adapter.lora_int_id, adapter.lora_path)
        folder = local_folder(adapter.lora_path)
        states = None if folder is None else file_states(folder)
        known, name = self._known.get(place, (None, ""))
        if name and known == states:
            return name
        digest = "" if name or folder is None else adapter_digest(folder)
        if digest and folder is not None and file_states(folder) == states:
            name = digest
        else:
            logger.warning(
                "adapter %s: its files in %s changed while it was in use, or are not there; pages that it "
                "computes are found by this process only. Load it under another name or path",
                adapter.lora_name,
                adapter.lora_path,
            )
            name = f"unnamed-{uuid.uuid4().hex}"
        self._known[place] = (states, name)
        return name
