"""Pools read off Hugging Face configurations: shapes, refusals, contradictions, identity.

That the shapes are those of real caches is checked beside the bridge to transformers, on real models.
"""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from asynchicache.errors import ConfigError, UnsupportedModelError
from asynchicache.specs import ModelSpec
from asynchicache.types import ALL_PAGES, trailing_pages
from integrations.zoo import ALL, tiny_config


def test_a_real_hybrid() -> None:
    """Qwen3-Next 80B: 12 attention layers of 48; 2 MiB of memory and 64 KiB of convolution a layer."""
    config = transformers.Qwen3NextConfig(dtype=torch.bfloat16)
    spec = ModelSpec.from_config(config, page_size=64)
    assert (spec.model, spec.layers, spec.page_size) == ("qwen3_next", 48, 64)
    kv, mamba = spec.pools
    assert (kv.name, kv.coverage, kv.per_token, kv.replicated) == ("kv", ALL_PAGES, True, False)
    assert [(t.name, t.shape, t.dtype) for t in kv.tensors] == [
        ("keys", (2, 256), "bfloat16"),
        ("values", (2, 256), "bfloat16"),
    ]
    assert kv.tensors[0].layers == tuple(range(3, 48, 4))
    assert (mamba.name, mamba.coverage, mamba.per_token) == ("mamba", trailing_pages(1), False)
    conv, recurrent = mamba.tensors
    assert (conv.name, conv.shape, conv.dtype, conv.unit_bytes) == ("conv", (8192, 4), "bfloat16", 64 << 10)
    assert (recurrent.shape, recurrent.dtype, recurrent.unit_bytes) == ((32, 128, 128), "float32", 2 << 20)
    assert len(conv.layers) == len(recurrent.layers) == 36


def test_a_latent_cache_is_the_same_on_every_rank() -> None:
    spec = ModelSpec.from_config(transformers.DeepseekV3Config(), dtype="bfloat16")
    (kv,) = spec.pools
    assert kv.replicated
    (latent,) = kv.tensors
    assert (latent.name, latent.shape, latent.sections) == ("latent", (1, 576), (512, 64))
    assert kv.slot_bytes(1) == 61 * 1152


def test_compressed_entries_and_what_the_end_of_a_prefix_needs() -> None:
    """DeepSeek-V4 Flash: 21 layers of an entry for 4 tokens, 20 of one for 128, two of windows alone."""
    ratios = [0, 0, *[4, 128] * 20, 4]
    config = transformers.DeepseekV4Config(compress_ratios=ratios, dtype=torch.bfloat16)
    spec = ModelSpec.from_config(config, page_size=256)
    kv, tail = spec.pools
    assert (kv.name, kv.coverage, kv.per_token, kv.replicated) == ("kv", ALL_PAGES, True, True)
    assert [(t.name, t.shape, t.dtype, len(t.layers), t.tokens_per_entry) for t in kv.tensors] == [
        ("csa", (512,), "bfloat16", 21, 4),
        ("csa_index", (128,), "bfloat16", 21, 4),
        ("hca", (512,), "bfloat16", 20, 128),
    ]
    assert kv.slot_bytes(256) == 21 * 64 * (512 + 128) * 2 + 20 * 2 * 512 * 2
    assert (tail.name, tail.coverage, tail.per_token, tail.replicated) == (
        "tail",
        trailing_pages(1),
        False,
        True,
    )
    assert [(t.name, t.shape, t.dtype, len(t.layers)) for t in tail.tensors] == [
        ("window", (127, 512), "bfloat16", 43),
        ("overlap_kv", (4, 512), "bfloat16", 21),
        ("overlap_gate", (4, 512), "float32", 21),
        ("overlap_index_kv", (4, 128), "bfloat16", 21),
        ("overlap_index_gate", (4, 128), "float32", 21),
    ]
    assert spec.owners == (kv, tail)


def test_pages_within_a_compressed_entry_are_refused_with_those_that_fit() -> None:
    with pytest.raises(
        ConfigError, match=r"128 tokens .* hca, .* page_size 64; multiples of 128 fit: 128, 256"
    ):
        ModelSpec.from_config(transformers.DeepseekV4Config())


@pytest.mark.parametrize(
    "rates", [None, {}, {"heavily_compressed_attention": 0}, {"heavily_compressed_attention": True}]
)
def test_compression_without_a_rate(rates: object) -> None:
    config = Changed(transformers.DeepseekV4Config(), {"compress_rates": rates})
    with pytest.raises(
        ConfigError, match="layer 0 is 'heavily_compressed_attention', but its compress_rates"
    ):
        ModelSpec.from_config(config)


def test_a_composite_configuration_is_read_for_its_text() -> None:
    text = tiny_config("qwen3_5")
    composite = transformers.Qwen3_5Config(text_config=text.to_dict())
    whole = ModelSpec.from_config(composite, page_size=16)
    assert whole.model == "qwen3_5"
    assert whole.pools == ModelSpec.from_config(text, page_size=16).pools


def test_dtype_is_the_arguments_then_the_configurations_then_float32() -> None:
    config = tiny_config("llama")
    assert ModelSpec.from_config(config).pools[0].tensors[0].dtype == "float32"
    config.dtype = torch.bfloat16
    assert ModelSpec.from_config(config).pools[0].tensors[0].dtype == "bfloat16"
    assert ModelSpec.from_config(config, dtype="float16").pools[0].tensors[0].dtype == "float16"
    with pytest.raises(ConfigError, match="dtype 'float12'"):
        ModelSpec.from_config(config, dtype="float12")


@pytest.mark.parametrize("source", [{"name_or_path": "folder"}, {"architectures": ["GptOssForCausalLM"]}])
def test_a_checkpoint_without_a_dtype_is_not_guessed(source: dict[str, object]) -> None:
    config = transformers.GptOssConfig(**source)
    with pytest.raises(ConfigError, match="gpt_oss checkpoint has no dtype: pass dtype="):
        ModelSpec.from_config(config)
    assert ModelSpec.from_config(config, dtype="bfloat16").pools[0].tensors[0].dtype == "bfloat16"


def test_a_checkpoint_with_a_quantised_cache_points_to_the_spec_for_it() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    config = transformers.LlamaConfig(
        dtype="bfloat16", quantization_config={"quant_method": "modelopt", "kv_cache_scheme": scheme}
    )
    with pytest.warns(UserWarning, match="spec.with_quantised_kv"):
        assert ModelSpec.from_config(config).pools[0].tensors[0].dtype == "bfloat16"


def test_the_model_may_be_named() -> None:
    assert ModelSpec.from_config(tiny_config("llama"), model="acme-1b").model == "acme-1b"


@pytest.mark.parametrize(
    ("window", "pages"), [(2, 1), (17, 1), (18, 2), (33, 2), (34, 3), (128, 8), (129, 8), (130, 9)]
)
def test_a_window_is_the_pages_of_all_but_its_last_token(window: int, pages: int) -> None:
    config = transformers.Gemma3TextConfig(sliding_window=window)
    spec = ModelSpec.from_config(config, page_size=16)
    assert [(pool.name, pool.coverage) for pool in spec.pools] == [
        ("kv", ALL_PAGES),
        ("swa", trailing_pages(pages)),
    ]
    assert spec.owners == spec.pools
    assert not set(spec.pool("kv").tensors[0].layers) & set(spec.pool("swa").tensors[0].layers)


def test_a_chunk_is_a_window() -> None:
    spec = ModelSpec.from_config(transformers.Llama4TextConfig(), page_size=64)
    assert spec.pool("swa").coverage == trailing_pages(128)
    assert spec.pool("kv").tensors[0].layers == tuple(range(3, 48, 4))


def test_windows_of_two_widths_are_covered_by_the_wider() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=32)
    config.per_layer_config = {1: {"sliding_window": 100}}
    assert ModelSpec.from_config(config, page_size=16).pool("swa").coverage == trailing_pages(7)


def test_a_model_of_windows_only_keeps_every_page() -> None:
    (kv,) = ModelSpec.from_config(transformers.MistralConfig(sliding_window=4096)).pools
    assert (kv.name, kv.coverage, len(kv.tensors[0].layers)) == ("kv", ALL_PAGES, 32)


def test_index_keys_share_the_slots_of_attention_pages() -> None:
    """DeepSeek-V3.2: 256 more bytes a token and layer, the same on every rank."""
    spec = ModelSpec.from_config(transformers.DeepseekV32Config(), dtype="bfloat16")
    kv, dsa = spec.pools
    assert spec.owners == (kv,)
    assert (dsa.name, dsa.slots_of, dsa.coverage, dsa.replicated) == ("dsa", "kv", ALL_PAGES, True)
    assert dsa.slot_bytes(1) == 61 * 256


def test_layers_without_an_indexer_have_no_index_keys() -> None:
    kv, dsa = ModelSpec.from_config(tiny_config("glm_moe_dsa")).pools
    assert kv.tensors[0].layers == (0, 1, 2, 3)
    assert dsa.tensors[0].layers == (0, 2)


def test_layers_that_read_anothers_cache_have_none() -> None:
    spec = ModelSpec.from_config(tiny_config("gemma4"))
    assert spec.layers == 6
    assert [(p.name, p.tensors[0].layers, p.tensors[0].shape) for p in spec.pools] == [
        ("kv", (2,), (2, 32)),
        ("swa", (0, 1), (2, 16)),
    ]


def test_a_model_of_three_pools_and_five_kinds_of_tensor() -> None:
    """Qwen4-Exp: index keys, their positions, and in some layers what n-grams look back on."""
    kv, dsa, mamba = ModelSpec.from_config(tiny_config("qwen4_exp")).pools
    assert [(t.name, t.layers, t.shape, t.dtype) for t in (*dsa.tensors, *mamba.tensors)] == [
        ("index_keys", (3,), (16,), "float32"),
        ("index_positions", (3,), (3,), "int64"),
        ("conv", (0, 1, 2), (96, 4), "float32"),
        ("recurrent", (0, 1, 2), (4, 16, 8), "float32"),
        ("ngram_conv", (1,), (128, 9), "float32"),
        ("ngram_tokens", (1,), (2,), "int64"),
    ]
    assert not kv.replicated


def test_windows_and_states_in_one_model() -> None:
    spec = ModelSpec.from_config(transformers.Lfm3Config(), page_size=64)
    assert [(pool.name, pool.coverage.pages, pool.per_token) for pool in spec.pools] == [
        ("kv", None, True),
        ("swa", 4, True),
        ("mamba", 1, False),
    ]


COMPRESSED = {"num_hidden_layers": 2, "layer_types": ["full_attention", "heavily_compressed_attention"]}
SPARSE = {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("LlamaConfig", SPARSE, "llama layer 1 is 'minimax_m3_sparse': only full_attention, sliding"),
        ("ZayaConfig", {}, "zaya layer 0 is 'hybrid"),
        ("LlamaConfig", COMPRESSED, "llama layer 1 is 'heavily_compressed_attention': no recipe"),
        (
            "DeepseekV4Config",
            {"layer_types": ["sliding_attention"] * 43},
            "deepseek_v4 has 0 attention layers",
        ),
        ("AXK2Config", {}, "axk2 layer 0 is 'indexed_attention': whether"),
        ("MistralLarge4Config", {}, "mistral_large4"),
        ("EmbeddingGemma2Config", {"text_config": {"use_bidirectional_attention": "all"}}, "tokens after it"),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "sets use_bidirectional_attention"),
        ("FalconMambaConfig", {}, "falcon_mamba layer 0 is 'linear_attention': no recipe"),
        ("Mamba2Config", {}, "mamba2 layer 0 is 'linear_attention': no recipe"),
        ("MiniMaxConfig", {}, "minimax layer 1 is 'linear_attention': no recipe"),
        ("LongcatFlashConfig", {}, "longcat_flash layer 0 is 'full_attention': whether"),
        ("FalconConfig", {}, "falcon layer 0 is 'full_attention': its head counts"),
        ("T5Config", {}, "t5 sets is_encoder_decoder"),
        ("MllamaConfig", {}, "mllama_text_model sets cross_attention_layers"),
        ("GraniteMoeHybridConfig", {}, "granitemoehybrid has 0 attention layers; it needs 1"),
    ],
)
def test_models_without_pools_are_refused_by_name(name: str, sizes: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ModelSpec.from_config(getattr(transformers, name)(**sizes))


BOTH_WAYS = "would depend on the tokens after it"
CROSS = "also depend on an encoder's input"


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        *[
            (name, {}, f"is_encoder_decoder True: only decoders .*{CROSS}")
            for name in ("t5gemma", "t5gemma2", "musicgen", "bart", "whisper", "encoder-decoder")
        ],
        ("vision-encoder-decoder", {}, CROSS),
        ("speech-encoder-decoder", {}, CROSS),
        *[(name, {}, CROSS) for name in ("t5gemma2_decoder", "idefics", "blip")],
        *[(name, {"is_decoder": True}, CROSS) for name in ("trocr", "musicgen_decoder")],
        ("gpt2", {"add_cross_attention": True}, f"gpt2 sets add_cross_attention True: .*{CROSS}"),
        *[(name, {}, f"is_decoder False: .*{BOTH_WAYS}") for name in ("bert", "roberta", "xlm-roberta")],
        ("xlnet", {}, f"xlnet sets attn_type 'bi': .*{BOTH_WAYS}"),
        ("xlm", {}, BOTH_WAYS),
        ("hrm_text", {}, f"prefix_lm True: .*{BOTH_WAYS}"),
        ("paligemma", {}, BOTH_WAYS),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, BOTH_WAYS),
        ("cpmant", {}, BOTH_WAYS),
        ("openai-gpt", {}, "caches nothing"),
        *[
            (name, {}, f"{name}: transformers has no class of it that generates text")
            for name in ("modernbert", "distilbert", "gte", "siglip_text_model", "clip", "qwen3_vl_vision")
        ],
        ("qwen2_5_omni_talker", {}, "no class of it that generates text"),
    ],
)
def test_bytes_that_follow_from_more_than_the_tokens_before_them(
    name: str, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ModelSpec.from_config(transformers.AutoConfig.for_model(name, **fields))


@pytest.mark.parametrize("name", ["gpt_neox", "qwen3_vl", "qwen3_vl_text", "step3p5", "mistral3", "gpt2"])
def test_decoders_that_look_like_others(name: str) -> None:
    """An attribute that is not read, a decoder within a wrapper, and the text part of one, by themselves."""
    assert ModelSpec.from_config(transformers.AutoConfig.for_model(name)).pools


def test_the_same_tokens_of_an_encoder_decoder_have_other_keys() -> None:
    """Why they are refused, on a real one."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    half = {**sizes, **heads}
    config = transformers.T5GemmaConfig(encoder=half, decoder=half, vocab_size=64)
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    keys = []
    for prompt in (torch.arange(3, 30)[None], torch.arange(30, 60)[None]):
        with torch.no_grad():
            out = model(input_ids=prompt, decoder_input_ids=torch.arange(3, 20)[None], use_cache=True)
        keys.append(out.past_key_values.self_attention_cache.layers[1].keys)
    assert not torch.allclose(*keys, atol=1e-3)


def test_an_unknown_indexer_is_refused() -> None:
    config = Changed(tiny_config("glm_moe_dsa"), {"indexer_types": ["full", "half", "full", "full"]})
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .* indexer type 'half' is neither"):
        ModelSpec.from_config(config)


def test_layers_that_share_what_nobody_keeps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gemma4_unified\w*: The set of layer types"):
        ModelSpec.from_config(transformers.Gemma4UnifiedAssistantConfig())


@pytest.mark.parametrize("size", [0, -16])
def test_pages_of_no_tokens_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size {size} must be 1 at least"):
        ModelSpec.from_config(tiny_config("gemma3"), page_size=size)


def test_several_convolution_states_are_refused() -> None:
    config = tiny_config("qwen3_5")
    config.number_of_conv_states = 3
    with pytest.raises(UnsupportedModelError, match="several convolution states"):
        ModelSpec.from_config(config)


def test_layers_of_different_shapes_are_refused() -> None:
    config = tiny_config("llama")
    config.per_layer_config = {2: {"num_key_value_heads": 4}}
    with pytest.raises(UnsupportedModelError, match=r"keys of layer 2 is float32 \[4, 16\], of layer 0"):
        ModelSpec.from_config(config)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "qwen3: 3 layer_types for 4 layers"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be a positive integer"),
        ("llama", {"head_dim": None, "num_attention_heads": 5}, "5 heads do not divide hidden_size 64"),
        ("qwen3_5", {"linear_key_head_dim": None}, "layer 0 is 'linear_attention', but linear_key_head_dim"),
        ("qwen3_5", {"linear_num_key_heads": 3}, "linear_num_key_heads 3 must divide"),
        ("bamba", {"mamba_d_head": 17}, "mamba_n_heads 8 x mamba_d_head 17 must be the layer's width, 128"),
        ("falcon_h1", {"mamba_d_ssm": 64}, "mamba_n_heads 8 x mamba_d_head 12 .* width, 64"),
        ("zamba2", {"mamba_headdim": 8}, "width, 128"),
        ("lfm2", {"conv_L_cache": -1}, "conv_L_cache is -1"),
        ("gemma3", {"sliding_window": 0}, "sliding_window is 0; it must be an integer of at least 2"),
        ("gemma3", {"sliding_window": -8}, "sliding_window is -8"),
        ("gemma3", {"sliding_window": None}, "layer 0 is 'sliding_attention', but sliding_window is None"),
        ("gemma3", {"sliding_window": 1}, "sliding_window is 1; it must be an integer of at least 2"),
        ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ("deepseek_v32", {"index_head_dim": 0}, "index_head_dim is 0"),
        ("deepseek_v32", {"qk_rope_head_dim": -1}, "qk_rope_head_dim is -1; it must be an integer of at"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "1 indexer_types, but there is layer 1"),
        ("qwen4_exp", {"ngram_size": 1}, "ngram_size is 1"),
        ("jamba", {"mamba_d_state": 0}, "mamba_d_state is 0"),
    ],
)
def test_configurations_that_contradict_themselves(name: str, changes: dict[str, object], words: str) -> None:
    config = Changed(tiny_config(name), changes)
    with pytest.raises(ConfigError, match=words):
        ModelSpec.from_config(config)


class Changed:
    """A configuration with some values replaced, behind the back of its own checks."""

    def __init__(self, config: PreTrainedConfig, changes: dict[str, object]) -> None:
        self._config, self._changes = config, changes
        self.model_type: str = config.model_type

    def get_text_config(self, decoder: bool) -> Changed:
        return self

    @property
    def per_layer_config(self) -> list[Changed]:
        return [self] * self._config.num_hidden_layers

    def __getattr__(self, name: str) -> object:
        return self._changes[name] if name in self._changes else getattr(self._config, name)


def identity(config: PreTrainedConfig) -> str:
    return ModelSpec.from_config(config).identity


@pytest.mark.parametrize("name", ALL)
def test_identity_survives_saving_and_loading(name: str, tmp_path) -> None:
    config = tiny_config(name)
    before = identity(config)
    config.architectures, config.dtype = ["Whatever"], torch.bfloat16
    config.save_pretrained(tmp_path)
    assert identity(type(config).from_pretrained(tmp_path)) == before
    assert before.startswith(f"{config.model_type}:")


def test_identity_survives_another_version_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(tiny_config("qwen3"))
    monkeypatch.setattr(transformers.configuration_utils, "__version__", "9.0.0")
    assert tiny_config("qwen3").to_diff_dict()["transformers_version"] == "9.0.0"
    assert identity(tiny_config("qwen3")) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 1e-5),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
        ("num_attention_heads", 8),
        ("intermediate_size", 96),
        ("hidden_act", "gelu"),
    ],
)
def test_identity_tells_models_apart(key: str, value: object) -> None:
    config = tiny_config("qwen3")
    other = copy.deepcopy(config)
    setattr(other, key, value)
    assert identity(other) != identity(config)


def test_identity_is_of_plain_data_only() -> None:
    config = tiny_config("qwen3")
    config.surprise = object()
    with pytest.raises(ConfigError, match="not plain data"):
        identity(config)


def test_specs_import_no_engine() -> None:
    code = "import sys, asynchicache.specs; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("config", [{"model_type": "llama"}, "meta-llama/Llama-3.1-8B", None])
def test_what_is_no_configuration_is_refused_with_the_way_to_one(config: object) -> None:
    with pytest.raises(ConfigError, match=r"(is no|not a) configuration: AutoConfig\.from_pretrained"):
        ModelSpec.from_config(config)
