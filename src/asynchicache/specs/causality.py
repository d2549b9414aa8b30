"""Which configurations describe a model whose cached bytes follow from the tokens up to them alone.

A prefix is known by its tokens. Where keys also depend on an encoder's input, or on later tokens, equal
tokens have other bytes, so such models have no pools.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name

from asynchicache.errors import UnsupportedModelError
from asynchicache.specs.identity import HuggingFaceConfig

_CROSS = "its keys also depend on an encoder's input, and a prefix is known by its tokens"
_BOTH_WAYS = "a page would depend on the tokens after it"
_CURE = "compute its prompts whole, without this cache"

_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "is_encoder_decoder": ((True,), f"only decoders have pools, {_CROSS}"),
    "add_cross_attention": ((True,), _CROSS),
    "is_decoder": ((False,), _BOTH_WAYS),
    "is_causal": ((False,), _BOTH_WAYS),
    "causal": ((False,), _BOTH_WAYS),
    "attn_type": (("bi",), _BOTH_WAYS),
    "prefix_lm": ((True,), _BOTH_WAYS),
    "use_bidirectional_attention": ((True, "all"), _BOTH_WAYS),
}
"""Attributes that a configuration may not set, the refused values, and why."""

_SAYS_NOTHING = frozenset({("gpt_neox", "is_decoder"), ("gpt_neox_japanese", "is_decoder")})
"""Attributes that a model has but does not read."""

_NOT_SAID: Mapping[str, str] = {
    "blip": _CROSS,
    "cpmant": _BOTH_WAYS,
    "diffusion_gemma": _BOTH_WAYS,
    "evolla": _CROSS,
    "idefics": _CROSS,
    "musicgen": _CROSS,
    "musicgen_melody": _CROSS,
    "openai": "it computes every token again, and caches nothing",
    "trocr": _CROSS,
}
"""Packages of transformers whose configurations do not say what their models do."""

_GENERATING = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")


def check_causal(config: HuggingFaceConfig, text: HuggingFaceConfig) -> None:
    """
    Args:
        config: of the whole model.
        text: of its decoder.

    Raises:
        UnsupportedModelError: the bytes of a page depend on more than the tokens up to its end; says on what.
    """
    for one in (config, text):
        for attribute, (values, why) in _REFUSED.items():
            value = getattr(one, attribute, None)
            if value in values and (one.model_type, attribute) not in _SAYS_NOTHING:
                cure = ", or set is_decoder=True if its weights are a causal decoder's"
                raise _refused(
                    f"{one.model_type} sets {attribute} {value!r}: {why}",
                    cure if attribute == "is_decoder" else "",
                )
        package = _package(one)
        if package in _NOT_SAID:
            raise _refused(f"{one.model_type} has no pools: {_NOT_SAID[package]}")
        if package and _of_encoder_decoder(one):
            raise _refused(f"{one.model_type} is a part of an encoder-decoder: {_CROSS}")
    if getattr(text, "cross_attention_layers", None):
        raise _refused(
            f"{text.model_type} sets cross_attention_layers: their keys follow an image, not the tokens"
        )
    if _package(config) and not _generates(config):
        raise _refused(
            f"{config.model_type}: transformers has no class of it that generates text from a cache"
        )


def _refused(why: str, cure: str = "") -> UnsupportedModelError:
    return UnsupportedModelError(f"{why}; {_CURE}{cure}")


def _package(config: HuggingFaceConfig) -> str:
    """The package of transformers that has the model's code; empty for code from elsewhere."""
    module = type(config).__module__
    return module.split(".")[2] if module.startswith("transformers.models.") else ""


def _of_encoder_decoder(config: HuggingFaceConfig) -> bool:
    """Whether a configuration stands beside that of an encoder-decoder, so that it is one of its halves."""
    return any(vars(one).get("is_encoder_decoder") is True for one in _beside(config))


def _generates(config: HuggingFaceConfig) -> bool:
    """Whether transformers can make a model of the configuration, or of the one it is the text part of, that
    generates."""
    known = set(_generating_types())
    wrappers = (one for one in _beside(config) if getattr(one, "model_type", None) in known)
    return config.model_type in known or any(
        getattr(one, "sub_configs", {}).get("text_config") is type(config) for one in wrappers
    )


def _beside(config: HuggingFaceConfig) -> Iterator[type]:
    """The classes in the module of a configuration's class."""
    for value in vars(sys.modules[type(config).__module__]).values():
        if isinstance(value, type):
            yield value


def _generating_types() -> Iterator[str]:
    for task in _GENERATING:
        yield from resolve_name(f"transformers.models.auto.modeling_auto:MODEL_FOR_{task}_MAPPING_NAMES")
