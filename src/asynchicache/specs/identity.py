"""The identity of a model's cached bytes, as a string for the fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Protocol

from asynchicache.errors import ConfigError


class HuggingFaceConfig(Protocol):
    """The interface used of a `transformers.PreTrainedConfig`; sizes are read by attribute name."""

    model_type: str

    def to_diff_dict(self) -> dict[str, object]: ...


_VOLATILE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def identity(config: HuggingFaceConfig) -> str:
    """Return the model type and a digest of all fields of `config` that may affect cached bytes.

    The digest is the SHA-256 of `config.to_diff_dict()` as sorted, compact JSON, without fields for the
    model's origin, its outputs, or its dtype (part of the layout). Unknown fields are included: a superfluous
    field costs a miss, a missing one gives wrong bytes.
    """
    text = json.dumps(_canonical(config.to_diff_dict()), sort_keys=True, separators=(",", ":"))
    return f"{config.model_type}:{hashlib.sha256(text.encode()).hexdigest()}"


def _canonical(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError(f"configuration value {value!r} is not plain data; its identity is unknown")
