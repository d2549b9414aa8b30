"""Load the model to serve: a tiny model with random weights, or a checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.tokenizers import ByteTokenizer, CheckpointTokenizer, Tokenizer
from asynchicache.integrations.transformers.demo_model import build_demo_model

TINY = "tiny"

_BYTES = 256


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer and defaults.

    Attributes:
        name: model name for clients.
        model: the model, in evaluation mode.
        tokenizer: the model's tokenizer.
        stop_ids: tokens that end a text.
        context: most positions of the model.
        temperature, top_p: the checkpoint's recommended values, or OpenAI's defaults.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    context: int
    temperature: float = 1.0
    top_p: float = 1.0

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(_text_config(self.model).vocab_size)


def load_tiny(seed: int) -> LoadedModel:
    """Return the model of `asynchicache demo`: Qwen3.5 with random weights and one token per byte."""
    model, config = build_demo_model(seed)
    tokenizer = ByteTokenizer(config.vocab_size)
    return LoadedModel(TINY, model, tokenizer, frozenset(), config.max_position_embeddings)


def load_checkpoint(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    as_bytes: bool = False,
    template: Path | None = None,
) -> LoadedModel:
    """Load a checkpoint in the format of `save_pretrained`. Nothing is downloaded.

    Args:
        folder: the checkpoint's folder.
        dtype: dtype of the weights, or `auto` for that of the file.
        device: torch device of the model.
        as_bytes: use one token per byte instead of the checkpoint's tokenizer.
        template: file with a chat template that replaces the tokenizer's.

    Raises:
        ConfigError: the folder has no model or tokenizer, or they cannot be loaded.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {str(folder)!r} is no checkpoint: give a folder with config.json and weights, "
            f"as save_pretrained writes them, or {TINY!r}"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"model {str(folder)!r} cannot be loaded: {error}") from error
    model = model.to(torch.device(device)).eval()
    defaults, stop_ids = model.generation_config, _stop_ids(model)
    return LoadedModel(
        name=folder.resolve().name,
        model=model,
        tokenizer=_byte_tokenizer(model) if as_bytes else _tokenizer(folder, template, stop_ids),
        stop_ids=stop_ids,
        context=int(getattr(_text_config(model), "max_position_embeddings", 0) or 1 << 20),
        temperature=1.0 if defaults.temperature is None else float(defaults.temperature),
        top_p=1.0 if defaults.top_p is None else float(defaults.top_p),
    )


def _byte_tokenizer(model: PreTrainedModel) -> ByteTokenizer:
    vocabulary = _text_config(model).vocab_size
    if not _BYTES <= vocabulary <= ByteTokenizer.MAX_VOCABULARY:
        raise ConfigError(
            f"--tokenizer bytes needs a vocabulary of {_BYTES} to {ByteTokenizer.MAX_VOCABULARY}; "
            f"the model's has {vocabulary}"
        )
    return ByteTokenizer(vocabulary)


def _tokenizer(folder: Path, template: Path | None, stop_ids: frozenset[int]) -> CheckpointTokenizer:
    try:
        text = None if template is None else template.read_text("utf-8")
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"model {str(folder)!r}: its tokenizer cannot be loaded ({error}); save it beside the weights, "
            "or serve with --tokenizer bytes"
        ) from error
    return CheckpointTokenizer(found, text, stop_ids)


def _stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the end-of-text tokens of the model's generation config and model config."""
    configs = (model.generation_config, _text_config(model))
    return frozenset(token for config in configs for token in _ids(getattr(config, "eos_token_id", None)))


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _ids(value: int | list[int] | None) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    else:
        yield from value or ()
