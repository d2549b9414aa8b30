"""A model is asked what it keeps: specs are compared with it, and made for classes that no recipe knows."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from asynchicache import CacheConfig, ModelSpec, PoolSpec, PrefixCachedModel
from asynchicache.errors import ConfigError, UnsupportedModelError
from asynchicache.integrations.transformers.asking import check_spec, spec_from_model
from asynchicache.integrations.transformers.demo_model import randomize_weights
from asynchicache.specs import huggingface
from integrations.zoo import PAGE, SLICE, tiny_config, tiny_model, tiny_spec

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "heads under another name": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "values narrower than keys, windows with more heads": (
        "mimo_v2_flash",
        {
            "num_key_value_heads": 1,
            "head_dim": 12,
            "v_head_dim": 8,
            "sliding_window": 32,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "latents of a class that is not listed": ("glm4_moe_lite", LATENT),
    "another class with latents": ("youtu", LATENT),
}


def tiny(name: str) -> PreTrainedModel:
    """A model of a class that no recipe knows, with weights under which its whole cache matters."""
    kind, sizes = UNKNOWN[name]
    config = type(transformers.AutoConfig.for_model(kind))(**SIZES, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
    randomize_weights(model, seed=1)
    return model.eval()


def shapes(spec: ModelSpec) -> list[object]:
    return [
        (
            pool.name,
            pool.coverage,
            pool.per_token,
            pool.slots_of,
            pool.replicated,
            [
                (tensor.name, tensor.layers, tensor.shape, tensor.dtype, tensor.sections)
                for tensor in pool.tensors
            ],
        )
        for pool in spec.pools
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SLICE)
def test_the_recipes_say_what_the_models_keep(
    name: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert spec_from_model(tiny_model(name, dtype), page_size=PAGE) == tiny_spec(name, dtype)
    assert "first page only" not in caplog.text, "it was asked"


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "deepseek_v32"])
def test_a_model_says_what_the_recipes_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States, windows, latents and index keys, with all names, as if no recipe knew them."""
    known = tiny_spec(name)
    monkeypatch.setattr(huggingface, "_RECIPES", {})
    assert shapes(spec_from_model(tiny_model(name), page_size=PAGE)) == shapes(known)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", UNKNOWN)
async def test_a_class_that_no_recipe_knows_is_served(name: str) -> None:
    model = tiny(name)
    with pytest.raises(UnsupportedModelError, match="spec_from_model"):
        ModelSpec.from_config(model.config)
    prompt = [(index * 7) % 200 + 3 for index in range(90)]
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    config = CacheConfig(device_slots={"kv": 32, "swa": 16} if "windows" in name else {"kv": 32})
    async with PrefixCachedModel.open(model, page_size=PAGE, config=config) as served:
        for cached in (0, 80):
            answer = served.generate(prompt, max_new_tokens=8)
            assert [token async for token in answer] == expected[0, 90:].tolist()
            assert answer.cached_tokens == cached


CHANGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another window": ("gemma3", {"sliding_window": 16}, "self_attn: sliding_window is 40 .* 16 by its"),
    "other heads": ("qwen3_5", {"num_key_value_heads": 4}, "self_attn: .* in the model, .* by its"),
    "other kinds of layers": (
        "gemma3",
        {"layer_types": ["full_attention"] * 4},
        "'sliding_attention' in the",
    ),
    "layers taken away": ("llama", {"num_hidden_layers": 1}, r"layers\.\d\.self_attn is in the model, not"),
    "layers added": ("llama", {"num_hidden_layers": 9}, r"layers\.\d\.self_attn is in the configuration,"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_configuration_that_was_changed_after_loading_is_refused(name: str) -> None:
    kind, changes, why = CHANGED[name]
    model = copy.deepcopy(tiny_model(kind))
    spec = spec_from_model(model, page_size=PAGE)
    for field, value in changes.items():
        setattr(model.config, field, value)
    for asked in (lambda: spec_from_model(model, page_size=PAGE), lambda: check_spec(model, spec)):
        with pytest.raises(ConfigError, match=f"{why}.*load it with the configuration"):
            asked()


@pytest.mark.asyncio
async def test_a_window_that_a_model_reads_from_its_configuration_may_be_changed() -> None:
    """Mistral computes with what its configuration says at the time; so does what is cached."""
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
    randomize_weights(model, seed=1)
    model.config.sliding_window = 20
    prompt = [(index * 7) % 200 + 3 for index in range(90)]
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    settings = CacheConfig(device_slots={"kv": 32})
    async with PrefixCachedModel.open(model, page_size=PAGE, config=settings) as served:
        for cached in (0, 80):
            answer = served.generate(prompt, max_new_tokens=8)
            assert [token async for token in answer] == expected[0, 90:].tolist()
            assert answer.cached_tokens == cached


def test_a_class_is_asked_by_its_configuration_alone() -> None:
    config = tiny("heads under another name").config
    spec = spec_from_model(config, page_size=PAGE, dtype="bfloat16")
    assert [(t.name, t.shape, t.dtype) for t in spec.pools[0].tensors] == [
        ("keys", (4, 8), "bfloat16"),
        ("values", (4, 8), "bfloat16"),
    ]
    with pytest.raises(ConfigError, match="does not say how ranks divide it"):
        spec.shard(tp=(0, 2))


def changed(spec: ModelSpec, pool: str, **changes: object) -> ModelSpec:
    """A spec whose first tensor of a pool is another one."""
    pools: list[PoolSpec] = []
    for one in spec.pools:
        first, *others = one.tensors
        tensors = (replace(first, **changes), *others) if one.name == pool else one.tensors
        pools.append(replace(one, tensors=tuple(tensors)))
    return replace(spec, pools=tuple(pools))


@pytest.mark.parametrize(
    ("pool", "changes", "words"),
    [
        (
            "kv",
            {"shape": (4, 16)},
            r"layer 3: keys is torch.float32 \[2, 16\] in the model .* \[4, 16\] in the pool",
        ),
        ("kv", {"dtype": "bfloat16"}, r"layer 3: keys is torch.float32 .* torch.bfloat16"),
        ("mamba", {"shape": (8, 4)}, r"layer 0: conv 0 is torch.float32 .* \[8, 4\] in the pool"),
        ("mamba", {"layers": (0, 1)}, r"layer 2 keeps states \[0\] and \[0\], its pool \[0\]"),
    ],
)
def test_a_spec_that_its_model_contradicts(pool: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_spec(tiny_model("qwen3_5"), changed(tiny_spec("qwen3_5"), pool, cut=(), **changes))


@pytest.mark.parametrize(("model", "pool"), [("llama", "kv"), ("qwen3_5", "mamba")])
def test_a_layer_that_the_model_does_not_have(model: str, pool: str) -> None:
    more = changed(replace(tiny_spec(model), layers=5), pool, layers=(0, 4), cut=())
    with pytest.raises(ConfigError, match="has layer 4, and the model layers 0 to 3: spec_from_"):
        check_spec(tiny_model(model), more)


def test_a_layer_without_a_pool() -> None:
    spec = tiny_spec("llama")
    (kv,) = spec.pools
    fewer = replace(kv, tensors=tuple(replace(tensor, layers=tensor.layers[:-1]) for tensor in kv.tensors))
    with pytest.raises(ConfigError, match=r"layer 3 keeps \['keys', 'values'\], and no pool"):
        check_spec(tiny_model("llama"), replace(spec, pools=(fewer,)))


def test_a_model_that_cannot_be_asked_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(self: object, **inputs: object) -> None:
        raise RuntimeError("it reads its weights")

    monkeypatch.setattr(type(tiny_model("llama")), "forward", forward)
    with caplog.at_level(logging.WARNING):
        spec = spec_from_model(tiny_config("llama"), page_size=PAGE)
    assert spec == tiny_spec("llama")
    assert "compared with its first page only: RuntimeError: it reads its weights" in caplog.text


def test_a_model_without_pages() -> None:
    config = transformers.FalconMambaConfig(num_hidden_layers=2, hidden_size=32, state_size=4)
    with pytest.raises(UnsupportedModelError, match="0 attention layers"):
        spec_from_model(config)
