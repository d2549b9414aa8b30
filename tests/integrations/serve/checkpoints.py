"""Small models and tokenizers that tests serve."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from asynchicache.integrations.serve.loading import LoadedModel
from asynchicache.integrations.serve.tokenizers import ByteTokenizer
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


def save_checkpoint(folder: Path, *, template: bool = True, vocabulary: int = 0) -> Path:
    """A checkpoint with tokenizer, as users have them; `vocabulary`: the model's, if not the tokenizer's."""
    tokenizer = bpe_tokenizer()
    config = tiny_config("qwen3_5")
    config.vocab_size = vocabulary or len(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        Qwen3_5ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if template:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
