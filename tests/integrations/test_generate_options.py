"""Every option of transformers' `generate`, cached and not: the same results, or a refusal that names it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    ByT5Tokenizer,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import TransformersKwargs

from asynchicache import CacheConfig, UsageError
from asynchicache.errors import ConfigError
from asynchicache.integrations.transformers.generate import CachedGenerate, prefix_cached
from integrations.zoo import PAGE, random_tokens, tiny_model, tiny_spec
from soaking import first

PROMPT = torch.tensor([random_tokens(50)])
NEW = 6
FIELDS = sorted(
    name for name in vars(GenerationConfig()) if not name.startswith("_") and name != "transformers_version"
)
ARGUMENTS = sorted(
    (
        {*inspect.signature(GenerationMixin.generate).parameters, *TransformersKwargs.__optional_keys__}
        | {*inspect.signature(tiny_model("llama").forward).parameters, "tokenizer", "token_type_ids"}
        | {"pixel_values", "adapter_names", "trust_remote_code", "assistant_tokenizer", "what_is_to_come"}
    )
    - {"self", "kwargs"}
)


class Forbids(LogitsProcessor):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, ids[0, -20:], -1e9)


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.told: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.told += value.flatten().tolist()

    def end(self) -> None:
        self.told.append(-1)


SAMPLED: dict[str, Any] = {"do_sample": True}
TRIALS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 53, "max_new_tokens": None},
    "max_time": {"max_time": 1e-9},
    "min_length": {"min_length": 55},
    "min_new_tokens": {"min_new_tokens": NEW},
    "stop_strings": {"stop_strings": ["a", "b", "0"], "tokenizer": ByT5Tokenizer(extra_ids=0)},
    "num_beams": {"num_beams": 2},
    "num_beam_groups": {"num_beam_groups": 2},
    "num_return_sequences": {"num_return_sequences": 2, **SAMPLED},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "cache_config": {"cache_config": {"backend": "quanto"}},
    "max_cache_len": {"max_cache_len": 999},
    "temperature": {"temperature": 0.3, **SAMPLED},
    "top_k": {"top_k": 3, **SAMPLED},
    "top_p": {"top_p": 0.3, **SAMPLED},
    "min_p": {"min_p": 0.1, **SAMPLED},
    "top_h": {"top_h": 0.4, **SAMPLED},
    "typical_p": {"typical_p": 0.4, **SAMPLED},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01, **SAMPLED},
    "eta_cutoff": {"eta_cutoff": 0.01, **SAMPLED},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "length_penalty": {"length_penalty": 2.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[5], [6, 7]]},
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (1, 1.5)},
    "suppress_tokens": {"suppress_tokens": [3, 4, 5, 6]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [3, 4, 5, 6]},
    "sequence_bias": {"sequence_bias": [[[5], 9.0]]},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "pad_token_id": {"pad_token_id": 3},
    "bos_token_id": {"bos_token_id": 3},
    "eos_token_id": {"eos_token_id": list(range(0, 200, 3))},
    "decoder_start_token_id": {"decoder_start_token_id": 3},
    "num_assistant_tokens": {"num_assistant_tokens": 3},
    "num_assistant_tokens_schedule": {"num_assistant_tokens_schedule": "constant"},
    "assistant_confidence_threshold": {"assistant_confidence_threshold": 0.1},
    "assistant_lookbehind": {"assistant_lookbehind": 3},
    "target_lookbehind": {"target_lookbehind": 3},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.4},
    "max_matching_ngram_size": {"max_matching_ngram_size": 3},
    "compile_config": {"compile_config": None},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "diversity_penalty": {"diversity_penalty": 0.5},
    "dola_layers": {"dola_layers": "low"},
    "prefill_chunk_size": {"prefill_chunk_size": 8},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    # Arguments
    "inputs": {},
    "input_ids": {},
    "attention_mask": {"attention_mask": torch.ones_like(PROMPT)},
    "generation_config": {"generation_config": GenerationConfig(max_new_tokens=3, repetition_penalty=1.3)},
    "logits_processor": {"logits_processor": [Forbids()]},
    "stopping_criteria": {"stopping_criteria": [MaxLengthCriteria(53)]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda batch, ids: [len(ids) % 9 + 3]},
    "negative_prompt_ids": {"negative_prompt_ids": PROMPT[:, :9], "guidance_scale": 1.5},
    "negative_prompt_attention_mask": {
        "negative_prompt_ids": PROMPT[:, :9],
        "negative_prompt_attention_mask": torch.ones(1, 9, dtype=torch.int64),
        "guidance_scale": 1.5,
    },
    "tokenizer": {"tokenizer": ByT5Tokenizer(extra_ids=0)},
    "position_ids": {"position_ids": torch.arange(50)[None] + 7},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 50, 64)},
    "past_key_values": {"past_key_values": DynamicCache()},
}
"""What each is tried with; others are set to True."""
SERVED = (
    "temperature",
    "stop_strings",
    "max_time",
    "output_scores",
    "logits_processor",
    "streamer",
    "attention_mask",
)


@pytest.fixture(scope="module", params=first(2, ["llama", "qwen3_5", "gemma3"]))
def cached(request: pytest.FixtureRequest) -> Iterator[tuple[str, CachedGenerate]]:
    slots = {pool.name: 32 for pool in tiny_spec(request.param).owners}
    with prefix_cached(
        tiny_model(request.param), config=CacheConfig(device_slots=slots), page_size=PAGE
    ) as model:
        model.generate(PROMPT, max_new_tokens=NEW)
        yield request.param, model


def run(generate: Any, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    streamer = Streamed() if "streamer" in options else None
    options = {name: streamer if name == "streamer" else value for name, value in options.items()}
    found = generate(PROMPT, **options)
    return found if streamer is None else (found, streamer.told)


def plain(name: str, options: dict[str, Any]) -> Any:
    return run(tiny_model(name).generate, {"attention_mask": torch.ones_like(PROMPT), **options})


def assert_equal(ours: Any, theirs: Any) -> None:
    """In every field: the same kind, the same lengths, the same values."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    elif isinstance(ours, DynamicCache):
        for one, other in zip(ours.layers, theirs.layers, strict=True):
            assert_equal(vars(one), vars(other))
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_equal(ours[name], theirs[name])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("option", [*FIELDS, *ARGUMENTS])
def test_an_option_gives_the_same_or_is_refused_by_name(
    cached: tuple[str, CachedGenerate], option: str
) -> None:
    name, model = cached
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        **TRIALS.get(option, {option: True}),
    }
    refusal = ""
    try:
        ours = run(model.generate, options)
    except UsageError as error:
        refusal = str(error)
    if refusal:
        assert option in refusal, "refused for another reason"
        assert option not in SERVED
        return
    assert model.hit.tokens == 3 * PAGE
    assert_equal(ours, plain(name, options))


def test_a_cache_of_none_says_nothing(cached: tuple[str, CachedGenerate]) -> None:
    name, model = cached
    options = {"max_new_tokens": NEW, "do_sample": False, "past_key_values": None}
    assert_equal(run(model.generate, options), plain(name, options))


REFUSED = {"num_beams": 2, "output_attentions": True, "output_hidden_states": True, "use_cache": False}


@pytest.mark.parametrize("option", REFUSED)
@pytest.mark.parametrize("where", ["call", "given", "model"])
def test_a_field_is_seen_wherever_it_is_set(option: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = tiny_model("llama"), {option: REFUSED[option]}
    if where == "model":
        monkeypatch.setattr(model.generation_config, option, options.pop(option))
    elif where == "given":
        options = {"generation_config": GenerationConfig(**options)}
    with (
        prefix_cached(model, config=CacheConfig(device_slots={"kv": 8}), page_size=PAGE) as cached,
        pytest.raises(UsageError, match=option),
    ):
        cached.generate(PROMPT, **options)


def test_a_field_of_a_later_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(self: GenerationConfig, **options: Any) -> None:
        first(self, **options)
        self.brand_new = options.get("brand_new")

    first = GenerationConfig.__init__
    monkeypatch.setattr(GenerationConfig, "__init__", later)
    with (
        prefix_cached(
            tiny_model("llama"), config=CacheConfig(device_slots={"kv": 8}), page_size=PAGE
        ) as cached,
        pytest.raises(UsageError, match="brand_new 5 is not served: a cache may change its result"),
    ):
        cached.generate(PROMPT, brand_new=5)


def test_a_generate_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "generate", lambda self, *args, **options: None)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has a generate of its own"), prefix_cached(model):
        pass
