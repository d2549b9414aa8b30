"""What `CachedGenerate.generate` takes: options known to give the same result from a restored prefix.

The lists name what is served. Anything else is refused, also fields and inputs that a later version of
transformers adds, until somebody has seen that a cache changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from asynchicache.errors import ConfigError, UsageError
from asynchicache.integrations.transformers.forward import known_tokens, vocabulary_of

_ARGUMENTS = frozenset(
    {"generation_config", "logits_processor", "negative_prompt_attention_mask", "negative_prompt_ids"}
    | {"prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "tokenizer"}
)
"""Arguments of `generate` that are passed on; `_checked_ids` takes those that give the prompt."""

_SAME = frozenset(
    # How long
    {"begin_suppress_tokens", "early_stopping", "exponential_decay_length_penalty", "length_penalty"}
    | {"max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "stop_strings"}
    # Which token: from its logits, and the ids of the whole prompt
    | {"bad_words_ids", "do_sample", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"}
    | {
        "epsilon_cutoff",
        "eta_cutoff",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "guidance_scale",
        "min_p",
    }
    | {"no_repeat_ngram_size", "remove_invalid_values", "renormalize_logits", "repetition_penalty"}
    | {"sequence_bias", "suppress_tokens", "temperature", "top_h", "top_k", "top_p", "typical_p"}
    | {"watermarking_config"}
    # What is returned: of new tokens alone
    | {"output_logits", "output_scores", "return_dict_in_generate"}
    # Ids
    | {"bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"}
    # Read only by a mode, or for a cache, that is refused
    | {
        "assistant_confidence_threshold",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "compile_config",
    }
    | {"disable_compile", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens"}
    | {"num_assistant_tokens_schedule", "target_lookbehind"}
)
"""Fields of a generation configuration that may have any value."""

_ONE = "one sequence is served at a time"
_ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "diversity_penalty": ((0,), _ONE),
    "num_beam_groups": ((1,), _ONE),
    "num_beams": ((1,), _ONE),
    "num_return_sequences": ((1,), _ONE),
    "use_cache": ((True,), "it leaves nothing to cache"),
    "cache_implementation": ((None, "hybrid"), "the cache reads DynamicCache only"),  # hybrid is ignored
}
"""Further fields, the values that are served besides None, and why no others are. Of all others, False is."""

_REFUSED: Mapping[str, str] = {
    "past_key_values": "the cache gives it",
    "inputs_embeds": "prefixes are known by their token ids",
    "assistant_model": "it takes back tokens that the cache has seen",
    "prompt_lookup_num_tokens": "it takes back tokens that the cache has seen",
    "use_mtp": "it takes back tokens that the cache has seen",
    "token_healing": "it takes back tokens that the cache has seen",
    "output_attentions": "there are none of the part of the prompt that is not computed",
    "output_hidden_states": "there are none of the part of the prompt that is not computed",
    "custom_generate": "what it does with a cache is not known",
    "position_ids": "positions are those of the tokens",
}
"""Why not, of what people ask for. Everything else has one of two other reasons."""


def check_generates(model: PreTrainedModel) -> None:
    """
    Raises:
        ConfigError: the model's `generate` is not the one that the lists are for.
    """
    for name in ("generate", "_sample", "_prefill"):
        if getattr(type(model), name, None) is not getattr(GenerationMixin, name, None):
            raise ConfigError(
                f"{type(model).__name__} has a {name} of its own; whether it gives the same with a cache "
                "is not known"
            )


def checked_ids(model: PreTrainedModel, inputs: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor:
    """Check the options, and return the prompt's ids `[1, length]`; removes ids, mask and
    cache from `options`.

    Raises:
        UsageError, InvalidTokensError: invalid ids, or an option that is not served; names it.
    """
    if inputs is not None and options.get("input_ids") is not None:
        raise UsageError("inputs and input_ids are both given: pass one of them")
    ids = options.pop("input_ids", None) if inputs is None else inputs
    options.pop("input_ids", None)
    mask = options.pop("attention_mask", None)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != 1:
        shape = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise UsageError(
            f"token ids are {shape}; generate takes a tensor [1, length]: call it for each prompt, or serve "
            "many at once with PrefixCachedModel"
        )
    known_tokens(ids[0], vocabulary_of(model))
    whole = isinstance(mask, torch.Tensor) and mask.shape == ids.shape and bool((mask == 1).all())
    if mask is not None and not whole:
        raise UsageError("attention_mask hides tokens; prefixes have no padding: leave it out")
    _check_arguments(options)
    _check_fields(dict(_fields(model, options)))
    options.pop("past_key_values", None)  # None, which says nothing: the cache gives it
    return ids


def _check_arguments(options: Mapping[str, Any]) -> None:
    known = vars(GenerationConfig())
    for name, value in options.items():
        if name in _ARGUMENTS or name in known or value is None or value is False:
            continue
        why = _REFUSED.get(name, "a prefix is known by its tokens, and results with other inputs may differ")
        raise UsageError(f"generate({name}=...) is not served: {why}")


def _fields(model: PreTrainedModel, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of the generation configuration that a call will have; later ones count."""
    known = vars(GenerationConfig())
    for source in (model.generation_config, options.get("generation_config")):
        if source is not None:
            yield from ((name, value) for name, value in vars(source).items() if value is not None)
    yield from ((name, value) for name, value in options.items() if name in known)


def _check_fields(fields: Mapping[str, Any]) -> None:
    known = vars(GenerationConfig())
    for name, value in fields.items():
        if name in _SAME or name.startswith("_") or name == "transformers_version" or name not in known:
            continue  # what GenerationConfig does not know, a checkpoint has for code of its own
        values, why = _ONLY.get(name, ((False,), _REFUSED.get(name, "a cache may change its result")))
        if value is not None and value not in values:
            rule = f"must be {values[0]}" if name in _ONLY else "is not served"
            raise UsageError(f"{name} {value!r} {rule}: {why}")
