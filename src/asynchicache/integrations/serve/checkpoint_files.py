"""Read a checkpoint folder in the format of `save_pretrained`. A refusal is one line that names the file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from asynchicache.errors import ConfigError
from asynchicache.integrations.transformers.chat import highest_beyond

_CLASSES = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
)
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_GENERATION = "generation_config.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_AGAIN = "download or save it again"
_CONFIG = "mend config.json, or take that of the weights"
_NO_TOKENIZER = "save the tokenizer beside the weights, or serve with --tokenizer bytes"
_LONGEST = 300
_NAMED = 3

UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, EOFError),
    *(ArithmeticError, AssertionError),
    *(StrictDataclassError, SafetensorError, pickle.UnpicklingError),
)
"""What transformers raises of files that are cut, missing, or contradict each other."""


def refusal(file: Path, why: object, cure: str) -> ConfigError:
    """Return an error of one line: the file, what is wrong with it, and what to do."""
    words = " ".join(str(why).split())
    room = max(80, _LONGEST - len(f"{file}: ; {cure}"))
    if len(words) > room:
        half = room // 2 - 2
        words = f"{words[:half]}...{words[-half:]}"
    return ConfigError(f"{file}: {words}; {cure}")


def read_config(folder: Path) -> PreTrainedConfig:
    """
    Raises:
        ConfigError: config.json is no configuration of a model that transformers knows.
    """
    file = folder / "config.json"
    fields = _json(file)
    kind = fields.get("model_type")
    if kind not in CONFIG_MAPPING:
        version = transformers.__version__
        cure = "convert it to a class of transformers" if "auto_map" in fields else "upgrade transformers"
        code = ", and code of the checkpoint (auto_map) is not run" if "auto_map" in fields else ""
        raise refusal(file, f"model_type {kind!r} is not known to transformers {version}{code}", cure)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UNREADABLE as error:
        raise refusal(file, error, _CONFIG) from error
    return config


def read_model(folder: Path, dtype: str) -> PreTrainedModel:
    """Load the class that generates text; for checkpoints of text and images, the class for both.

    Raises:
        ConfigError: a file is missing, cut, or contradicts the configuration.
    """
    config = read_config(folder)
    auto = next((auto for known, auto in _CLASSES if type(config) in known), None)
    if auto is None:
        why = f"transformers has no class that generates text for model_type {config.model_type!r}"
        raise refusal(folder / "config.json", why, "serve a decoder of text")
    weights = _weights(folder)
    if (folder / _GENERATION).exists():
        _json(folder / _GENERATION)  # transformers goes on without one that it cannot read
    try:
        model, found = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except UNREADABLE as error:
        raise refusal(folder / "config.json", f"the model cannot be loaded: {error}", _CONFIG) from error
    if found["mismatched_keys"]:
        name, held, wanted = min(found["mismatched_keys"])
        why = f"{name} is {list(wanted)} by config.json, but {list(held)} in the weights"
        raise refusal(weights, why, "take both from one checkpoint")
    if found["missing_keys"]:
        raise refusal(weights, f"these weights are missing: {_names(found['missing_keys'])}", _AGAIN)
    return model


def _weights(folder: Path) -> Path:
    """Return the file that has or lists the weights, after a look at each of their files.

    Raises:
        ConfigError: there is none, or a file is missing or cut.
    """
    file = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise refusal(folder, f"no weights: none of {', '.join(_WEIGHTS)} is here", "download or save them")
    parts = [file]
    if file.suffix == ".json":
        listed = _json(file).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise refusal(file, "weight_map is no list of the weights' files", _AGAIN)
        parts = [folder / str(name) for name in sorted(set(listed.values()))]
        lost = [part.name for part in parts if not part.is_file()]
        if lost:
            raise refusal(file, f"{len(lost)} of {len(parts)} files are missing: {_names(lost)}", _AGAIN)
    for part in parts:
        _check_whole(part)
    return file


def _check_whole(file: Path) -> None:
    if file.suffix != ".safetensors":
        return
    try:
        with safe_open(file, framework="pt"):  # reads the header, and compares it with the file's size
            pass
    except (OSError, SafetensorError) as error:
        raise refusal(file, f"not whole ({error})", _AGAIN) from error


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """
    Raises:
        ConfigError: there is no tokenizer, or its files cannot be read.
    """
    for name in _TOKENIZER:
        if (folder / name).exists():
            _json(folder / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        encoded = tokenizer("a b")["input_ids"]  # without files, some classes make one that is empty
    except Exception as error:
        if isinstance(error, UNREADABLE) or type(error) is Exception:  # tokenizers raises bare ones
            raise refusal(folder, f"its tokenizer cannot be loaded: {error}", _NO_TOKENIZER) from error
        raise
    if not set(encoded) - set(tokenizer.all_special_ids):
        raise refusal(
            folder, "no tokenizer: neither tokenizer.json nor another file with a vocabulary", _NO_TOKENIZER
        )
    return tokenizer


def check_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    """
    Raises:
        ConfigError: text may have tokens that the model does not.
    """
    beyond = highest_beyond(tokenizer, vocabulary)
    if beyond:
        why = f"the tokenizer has ids up to {beyond}, but vocab_size of config.json is {vocabulary}"
        raise refusal(folder, why, "take tokenizer and weights from one checkpoint")


def _json(file: Path) -> dict[str, Any]:
    """
    Raises:
        ConfigError: the file holds no JSON object.
    """
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(file, f"no JSON ({error})", _AGAIN) from error
    if not isinstance(fields, dict):
        raise refusal(file, "no JSON object", _AGAIN)
    return fields


def _names(names: Collection[str]) -> str:
    shown = sorted(names)[:_NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
