"""What the bytes of SGLang's pages depend on, and its own keys do not say.

SGLang knows an adapter of `--lora-paths` by name and path. One that is loaded later has a number of its own,
which is never used again.
"""

from __future__ import annotations

import hashlib
import json
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asynchicache.errors import ConfigError
from asynchicache.integrations.model_files import adapter_digest, checkpoint_digest, local_folder
from asynchicache.integrations.sglang.seam import SUPPORTED

_SETTINGS = (
    "dtype",
    "json_model_override_args",
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
)
_AFTER_OTHERS = "/"  # no number of an adapter ends with it


def settings_digest() -> str:
    """Identify SGLang's options that change what a model computes, or how its KV is written."""
    if find_spec("sglang") is None:
        return ""
    model = import_module("sglang.srt.runtime_context").get_model()
    found = {name: str(getattr(model, name, None)) for name in _SETTINGS}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32]


def weights_digest(model_path: str, revision: str | None = None) -> str:
    """Identify the weights of a checkpoint; empty if it is not on this machine."""
    folder = local_folder(model_path, revision)
    return "" if folder is None else checkpoint_digest(folder)


def key_adapters_by_content() -> None:
    """Put what adapters hold into the keys of requests. Later calls do nothing.

    SGLang has no hook for it, so the constructor of its requests is wrapped. It appends the adapter's number
    to `extra_key`; what a client writes there cannot end like such a number any more.

    Raises:
        ConfigError: the files of an adapter are not here, or SGLang is another version.
    """
    if find_spec("sglang") is None:
        return
    lora = import_module("sglang.srt.runtime_context").get_lora()
    if not lora.enable_lora:
        return
    request = import_module("sglang.srt.managers.schedule_batch").Req
    if hasattr(request, "asynchicache_contents"):
        return
    contents = {one.lora_id: _content(one.lora_name, one.lora_path) for one in lora.lora_paths or ()}
    begin = request.__init__

    @wraps(begin)
    def with_content(
        self: Any, *arguments: Any, lora_id: str | None = None, extra_key: str | None = None, **named: Any
    ) -> None:
        if lora_id is not None:
            extra_key = (extra_key or "") + contents.get(lora_id, "")
        elif extra_key is not None:
            extra_key += _AFTER_OTHERS
        begin(self, *arguments, lora_id=lora_id, extra_key=extra_key, **named)

    request.__init__, request.asynchicache_contents = with_content, contents


def _content(name: str, path: str) -> str:
    folder = local_folder(path)
    digest = "" if folder is None else adapter_digest(Path(folder))
    if not digest:
        raise ConfigError(
            f"adapter {name}: no files in {path}, so its pages could not be told from those of another "
            f"training: give a folder of this machine, or load it by /load_lora_adapter ({SUPPORTED})"
        )
    return digest
