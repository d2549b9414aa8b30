"""Small models and tokenizers that tests serve."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from asynchicache.integrations.serve.loading import LoadedModel
from asynchicache.integrations.serve.tokenizers import ByteTokenizer
from asynchicache.integrations.transformers.demo_model import randomize_weights
from integrations.zoo import tiny_config, tiny_model

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_SENTENCES = ["a cache keeps what a model has computed", "and brings it back before it is needed"]


@cache
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens, trained here; shared, so leave it unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def tiny_loaded(name: str = "qwen3_5") -> LoadedModel:
    """A tiny model that reads and writes bytes, and never ends by itself."""
    model = tiny_model(name)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return LoadedModel(name, model, ByteTokenizer(vocabulary), frozenset(), 2048)


def save_checkpoint(
    folder: Path,
    name: str = "qwen3_5",
    *,
    template: str = CHAT_TEMPLATE,
    vocabulary: int = 0,
    max_shard_size: str = "1GB",
) -> Path:
    """A checkpoint with tokenizer, as users have them; `vocabulary`: the model's, if not the tokenizer's."""
    tokenizer = bpe_tokenizer()
    config = tiny_config(name)
    config.vocab_size = vocabulary or len(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def ending_as_its_tokenizer(folder: Path) -> Path:
    """The checkpoint, whose model ends a text with the tokenizer's end token, not with another character."""
    for file in (folder / "config.json", folder / "generation_config.json"):
        end = {"eos_token_id": bpe_tokenizer().eos_token_id}
        file.write_text(json.dumps(json.loads(file.read_text()) | end))
    return folder


_TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_SPLIT = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
WRAPPERS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "mistral3": lambda: transformers.Mistral3Config(
        text_config={**_TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": None},
        vision_config={**_VISION, "model_type": "pixtral", "image_size": 28, "patch_size": 14},
    ),
    "qwen3_vl": lambda: transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 8, "rope_parameters": _SPLIT},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 14,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    ),
    "lfm2_vl": lambda: transformers.Lfm2VlConfig(
        text_config={**_TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        vision_config={**_VISION, "model_type": "siglip2_vision_model", "patch_size": 14, "num_patches": 16},
        projector_hidden_size=32,
    ),
}
"""Models for text and images that have no class for text alone."""


def save_wrapper(folder: Path, name: str) -> Path:
    """A checkpoint of one of `WRAPPERS`, with tokenizer."""
    config = WRAPPERS[name]()
    config.get_text_config(decoder=True).eos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForImageTextToText.from_config(config)
    randomize_weights(model, seed=3)
    model.save_pretrained(folder)
    bpe_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
