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
    assert [(t.name, t.shape) for t in kv.tensors] == [("latent", (1, 512)), ("rope_keys", (1, 64))]
    assert kv.slot_bytes(1) == 61 * 1152


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


def test_the_model_may_be_named() -> None:
    assert ModelSpec.from_config(tiny_config("llama"), model="acme-1b").model == "acme-1b"


SLIDING = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("MistralConfig", {}, "mistral layer 0 is 'sliding_attention'"),
        ("Gemma3TextConfig", SLIDING, "gemma3_text layer 3 is 'sliding_attention'"),
        ("GptOssConfig", {}, "gpt_oss layer 0 is 'sliding_attention'"),
        ("Llama4TextConfig", {}, "llama4_text layer 0 is 'chunked_attention'"),
        ("Gemma4TextConfig", {}, "gemma4_text sets kv_sharing_modes"),
        ("DeepseekV32Config", {}, "deepseek_v32 layer 0 is 'indexed_attention'"),
        ("GlmMoeDsaConfig", {}, "glm_moe_dsa layer 0 is 'indexed_attention'"),
        ("JambaConfig", {}, "jamba layer 0 is 'linear_attention': no recipe"),
        ("FalconMambaConfig", {}, "falcon_mamba layer 0 is 'linear_attention': no recipe"),
        ("Mamba2Config", {}, "mamba2 layer 0 is 'linear_attention': no recipe"),
        ("MiniMaxConfig", {}, "minimax layer 1 is 'linear_attention': no recipe"),
        ("Qwen4ExpTextConfig", {}, "qwen4_exp_text layer 0 is 'linear_attention': no recipe"),
        ("LongcatFlashConfig", {}, "longcat_flash layer 0 is 'full_attention': whether"),
        ("FalconConfig", {}, "falcon layer 0 is 'full_attention': its head counts"),
        ("T5Config", {}, "t5 sets is_encoder_decoder"),
        ("MllamaConfig", {}, "mllama_text_model sets cross_attention_layers"),
        ("GraniteMoeHybridConfig", {}, "granitemoehybrid has no attention layer"),
    ],
)
def test_models_without_pools_are_refused_by_name(name: str, sizes: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ModelSpec.from_config(getattr(transformers, name)(**sizes))


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
