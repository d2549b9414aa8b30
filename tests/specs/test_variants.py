"""Quantised pages and draft models are data: further tensors, or pools that share slots."""

from __future__ import annotations

import pytest

from asynchicache.errors import ConfigError
from asynchicache.layouts import SlotLayout
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import ALL_PAGES, trailing_pages
from integrations.zoo import PAGE, tiny_spec


def shapes(pool: PoolSpec) -> list[tuple[str, tuple[int, ...], str]]:
    return [(tensor.name, tensor.shape, tensor.dtype) for tensor in pool.tensors]


def test_scales_are_further_tensors_of_a_page() -> None:
    spec = tiny_spec("qwen3_5", "bfloat16")
    quantised = spec.with_quantised_kv()
    assert shapes(quantised.pool("kv")) == [
        ("keys", (2, 16), "float8_e4m3fn"),
        ("keys_scale", (2,), "float32"),
        ("values", (2, 16), "float8_e4m3fn"),
        ("values_scale", (2,), "float32"),
    ]
    assert {tensor.layers for tensor in quantised.pool("kv").tensors} == {spec.pool("kv").tensors[0].layers}
    assert quantised.pool("mamba") == spec.pool("mamba")
    assert quantised.pool("kv").slot_bytes(1) == 2 * 2 * (16 + 4)


def test_latent_and_rope_key_have_scales_of_their_own() -> None:
    kv, dsa = tiny_spec("deepseek_v32").with_quantised_kv("int8", scale_dtype="float16").pools
    assert shapes(kv) == [("latent", (1, 40), "int8"), ("latent_scale", (1, 2), "float16")]
    assert kv.tensors[0].sections == (32, 8)
    assert shapes(dsa) == [("index_keys", (16,), "float32")]
    (only,) = tiny_spec("glm5_next").with_quantised_kv().pool("kv").tensors[1:]
    assert only.shape == (1,)


def test_the_pools_may_be_named() -> None:
    spec = tiny_spec("qwen4_exp").with_quantised_kv("uint8", pools=["dsa"])
    assert spec.pool("kv") == tiny_spec("qwen4_exp").pool("kv")
    assert shapes(spec.pool("dsa")) == [
        ("index_keys", (16,), "uint8"),
        ("index_keys_scale", (), "float32"),
        ("index_positions", (3,), "int64"),  # no number to be rounded
    ]


def test_windows_are_quantised_too() -> None:
    spec = tiny_spec("gemma3").with_quantised_kv()
    assert all(tensor.dtype == "float8_e4m3fn" for pool in spec.pools for tensor in pool.tensors[::2])


def test_quantised_pages_are_no_hit_for_others() -> None:
    pools = (tiny_spec("llama").pool("kv"), tiny_spec("llama").with_quantised_kv().pool("kv"))
    assert len({SlotLayout.of(pool, PAGE).signature() for pool in pools}) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float16"}, r"quantised to 'float16'; it must be one of \['float8_e4m3fn'"),
        ({"scale_dtype": "int8"}, "scales of 'int8'; it must be one of"),
        ({"pools": ["mamba"]}, r"pool 'mamba' cannot be quantised; pools with pages are \['kv'\]"),
        ({"pools": ["swa"]}, "pool 'swa' cannot be quantised"),
    ],
)
def test_bad_quantisation_is_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_spec("qwen3_5").with_quantised_kv(**options)


def test_nothing_is_quantised_twice() -> None:
    with pytest.raises(ConfigError, match="pool 'kv': keys is float8_e4m3fn already"):
        tiny_spec("llama").with_quantised_kv().with_quantised_kv()


def test_a_draft_shares_the_slots_of_its_target() -> None:
    target, draft = tiny_spec("qwen3_5"), tiny_spec("llama")
    spec = target.with_draft(draft)
    assert [(pool.name, pool.slots_of) for pool in spec.pools] == [
        ("kv", None),
        ("mamba", None),
        ("draft_kv", "kv"),
    ]
    assert (spec.layers, spec.owners) == (8, target.owners)
    assert spec.pool("draft_kv").tensors[0].layers == (4, 5, 6, 7)
    assert spec.identity not in (target.identity, target.with_draft(tiny_spec("qwen2")).identity)


def test_each_pool_of_a_draft_finds_the_narrowest_that_keeps_enough() -> None:
    target = tiny_spec("lfm3")
    spec = target.with_draft(tiny_spec("qwen4_exp")).with_draft(tiny_spec("gemma3_narrow"), prefix="small")
    found = {pool.name: (pool.slots_of, pool.coverage) for pool in spec.pools[3:]}
    assert found == {
        "draft_kv": ("kv", ALL_PAGES),
        "draft_dsa": ("kv", ALL_PAGES),
        "draft_mamba": ("mamba", trailing_pages(1)),
        "small_kv": ("kv", ALL_PAGES),
        "small_swa": ("swa", trailing_pages(3)),  # more than its own one page
    }
    plain = tiny_spec("llama").with_draft(tiny_spec("gemma3"))
    assert plain.pool("draft_swa").slots_of == "kv"


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        ("llama", "qwen3_5", "draft pool 'mamba' needs a state; no pool of the target keeps as much"),
        ("gemma3_narrow", "bamba", r"'mamba' needs a state; .* \['kv', 'swa'\]"),
    ],
)
def test_a_draft_that_needs_more_than_its_target_is_refused(target: str, draft: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_spec(target).with_draft(tiny_spec(draft))


def test_a_draft_has_pages_as_large_as_its_target() -> None:
    draft = ModelSpec("draft", 2 * PAGE, 1, (PoolSpec("kv", (TensorSpec("keys", (0,), (4,), "int8"),)),))
    with pytest.raises(ConfigError, match="pages of 32 tokens in the draft, of 16 in its target"):
        tiny_spec("llama").with_draft(draft)


@pytest.mark.parametrize("sections", [(8, 9), (16, 16), (-1, 17), (17,)])
def test_sections_add_up(sections: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"sections .* must add up to \(2, 16\)"):
        TensorSpec("latent", (0,), (2, 16), "int8", sections)


def test_states_do_not_share_the_slots_of_pages() -> None:
    window = PoolSpec("swa", (TensorSpec("keys", (0,), (4,), "int8"),), trailing_pages(1))
    state = PoolSpec(
        "mamba",
        (TensorSpec("conv", (0,), (4,), "int8"),),
        trailing_pages(1),
        per_token=False,
        slots_of="swa",
    )
    kv = PoolSpec("kv", (TensorSpec("keys", (1,), (4,), "int8"),))
    with pytest.raises(ConfigError, match="'mamba' shares slots of 'swa'"):
        ModelSpec("mixed", PAGE, 2, (kv, window, state))
