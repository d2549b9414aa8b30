"""The pools of one rank, against shapes computed by hand for real models; and which bytes names mean."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import transformers

from asynchicache.errors import ConfigError
from asynchicache.hashing import ObjectKey
from asynchicache.layouts import SlotLayout
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.specs.pools import CutSection
from integrations.zoo import ALL, PAGE, tiny_config, tiny_spec


def llama() -> ModelSpec:
    """Llama-3.3-70B: 80 layers, 8 KV heads of 128."""
    config = transformers.LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, head_dim=128
    )
    return ModelSpec.from_config(config, page_size=64, dtype="bfloat16")


def qwen3_next() -> ModelSpec:
    """Qwen3-Next 80B: 12 attention layers of 2 heads of 256; 36 of 16 key and 32 value heads of 128."""
    return ModelSpec.from_config(transformers.Qwen3NextConfig(), page_size=64, dtype="bfloat16")


def qwen3_5() -> ModelSpec:
    """Qwen3.5 27B as published: 64 layers, 4 KV heads of 256; 16 key and 48 value heads of 128."""
    config = transformers.Qwen3_5TextConfig(
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    return ModelSpec.from_config(config, page_size=64, dtype="bfloat16")


def nemotron_h() -> ModelSpec:
    """Nemotron-H 8B: 128 Mamba heads of 64, 8 groups, states of 128; 8 KV heads of 128."""
    config = transformers.NemotronHConfig(
        hidden_size=4096,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
    )
    return ModelSpec.from_config(config, page_size=64, dtype="bfloat16")


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for pool in spec.pools for tensor in pool.tensors}


def names(spec: ModelSpec) -> dict[str, str]:
    return {pool.name: pool.shard for pool in spec.pools}


def ranks(spec: ModelSpec, size: int) -> list[ModelSpec]:
    return [spec.shard(tp=(rank, size)) for rank in range(size)]


def test_heads_are_divided_or_repeated() -> None:
    spec = llama()
    assert shapes(spec.shard(tp=(3, 4))) == {"keys": (2, 128), "values": (2, 128)}
    assert [one.pools[0].shard for one in ranks(spec, 4)] == ["tp0/4", "tp1/4", "tp2/4", "tp3/4"]
    assert spec.shard(tp=(3, 4)).pools[0].slot_bytes(64) * 4 == spec.pools[0].slot_bytes(64)
    wide = ranks(spec, 16)  # two ranks hold each head
    assert {shapes(one)["keys"] for one in wide} == {(1, 128)}
    assert [one.pools[0].shard for one in wide[:4]] == ["tp0/8", "tp0/8", "tp1/8", "tp1/8"]
    assert [one.pools[0].writes for one in wide[:4]] == [True, False, True, False]


def test_ranks_with_the_same_bytes_have_the_same_keys_at_every_size() -> None:
    """Each of 16 ranks holds one head, as each of 8 ranks does."""
    for rank in range(16):
        wide, narrow = llama().shard(tp=(rank, 16)), llama().shard(tp=(rank // 2, 8))
        assert key(wide.pools[0]) == key(narrow.pools[0])
    latent = ModelSpec.from_config(transformers.DeepseekV3Config(), dtype="bfloat16")
    assert {key(latent.shard(tp=(rank, 8)).pools[0]) for rank in range(8)} == {key(latent.pools[0])}


def key(pool: PoolSpec) -> tuple[str, str]:
    """What of a pool is in its keys."""
    return SlotLayout.of(pool, 64).signature(), pool.shard


def test_a_latent_is_whole_on_every_rank_and_written_by_one() -> None:
    spec = ModelSpec.from_config(transformers.DeepseekV3Config(), dtype="bfloat16")
    for rank in range(8):
        (kv,) = spec.shard(tp=(rank, 8)).pools
        assert (kv.tensors[0].shape, kv.shard, kv.replicated) == ((1, 576), "", True)
        assert kv.writes == (rank == 0)


def test_a_delta_net_is_divided_by_its_heads() -> None:
    """Channels of its convolution are queries, keys and values, each divided by itself."""
    half = qwen3_next().shard(tp=(1, 2))
    assert shapes(half) == {
        "keys": (1, 256),
        "values": (1, 256),
        "conv": (8 * 128 + 8 * 128 + 16 * 128, 4),
        "recurrent": (16, 128, 128),
    }
    assert names(half) == {"kv": "tp1/2", "mamba": "tp1/2"}
    eighth = qwen3_next().shard(tp=(5, 8))  # four ranks hold each KV head, each other heads of the state
    assert shapes(eighth)["keys"] == (1, 256)
    assert shapes(eighth)["recurrent"] == (4, 128, 128)
    assert names(eighth) == {"kv": "tp1/2", "mamba": "tp5/8"}
    assert [pool.writes for pool in eighth.pools] == [False, True]
    assert shapes(qwen3_5().shard(tp=(0, 4))) == {
        "keys": (1, 256),
        "values": (1, 256),
        "conv": (2 * 4 * 128 + 12 * 128, 4),
        "recurrent": (12, 128, 128),
    }


def test_groups_of_mamba_are_divided_or_repeated() -> None:
    spec = nemotron_h()
    assert shapes(spec)["conv"] == (128 * 64 + 2 * 8 * 128, 4)
    assert shapes(spec.shard(tp=(0, 8)))["conv"] == (16 * 64 + 2 * 128, 4)
    wide = spec.shard(tp=(3, 16))  # one of 8 groups on two ranks; heads are not repeated
    assert shapes(wide)["conv"] == (8 * 64 + 2 * 128, 4)
    assert shapes(wide)["recurrent"] == (8, 64, 128)
    assert names(wide) == {"kv": "tp1/8", "mamba": "tp3/16"}
    assert [pool.writes for pool in wide.pools] == [False, True]


def test_a_stage_has_its_layers_with_their_numbers() -> None:
    spec = qwen3_next()
    stages = [spec.shard(pp=(rank, 4)) for rank in range(4)]
    assert [stage.pool("kv").tensors[0].layers for stage in stages] == [
        (3, 7, 11),
        (15, 19, 23),
        (27, 31, 35),
        (39, 43, 47),
    ]
    assert {stage.layers for stage in stages} == {48}
    assert {pool.shard for stage in stages for pool in stage.pools} == {""}
    assert len({SlotLayout.of(stage.pools[0], 64).signature() for stage in stages}) == 4
    given = spec.shard(pp=(0, 2), layers=range(20))
    assert given.pool("mamba").tensors[0].layers == tuple(n for n in range(20) if n % 4 != 3)


def test_a_stage_without_a_pool_has_none() -> None:
    config = transformers.NemotronHConfig(
        layers_block_type=["full_attention", "mlp", "full_attention", "linear_attention"]
    )
    spec = ModelSpec.from_config(config)
    assert names(spec.shard(pp=(0, 2))) == {"kv": ""}
    with pytest.raises(ConfigError, match=r"pp stage 1 of 2 has layers 3 to 3, none of pool 'kv'"):
        spec.shard(pp=(1, 2), layers=range(3, 4))


def test_context_parallel_ranks_hold_a_stripe_of_the_tokens_of_each_page() -> None:
    spec = qwen3_next()
    one = spec.shard(tp=(1, 2), cp=(3, 4))
    kv, states = one.pools
    assert (kv.item_shape(kv.tensors[0], 64), kv.shard, kv.writes) == ((16, 1, 256), "tp1/2-cp3/4", True)
    assert (states.tensors[1].shape, states.shard, states.writes) == ((16, 128, 128), "tp1/2", False)
    assert one.page_size == 64
    latent = ModelSpec.from_config(transformers.DeepseekV3Config(), dtype="bfloat16").shard(cp=(1, 2))
    assert (latent.pools[0].shard, latent.pools[0].replicated) == ("cp1/2", True)


def test_compressed_entries_are_striped_too() -> None:
    spec = ModelSpec.from_config(transformers.DeepseekV4Config(), page_size=256).shard(tp=(1, 2), cp=(1, 2))
    kv, tail = spec.pools
    assert {tensor.name: kv.entries(tensor, 256) for tensor in kv.tensors} == {
        "hca": 1,
        "csa": 32,
        "csa_index": 32,
    }
    assert (kv.shard, kv.writes, tail.shard, tail.writes) == ("cp1/2", False, "", False)


def test_variants_are_divided_like_what_they_vary() -> None:
    spec = llama().with_quantised_kv().shard(tp=(0, 4))
    assert shapes(spec)["keys_scale"] == (2,)
    draft = llama().with_draft(llama()).shard(tp=(1, 4))
    assert names(draft) == {"kv": "tp1/4", "draft_kv": "tp1/4"}


@pytest.mark.parametrize("name", ALL)
def test_every_model_of_the_table_is_divided(name: str) -> None:
    """All ranks together hold every byte of each sharded tensor, once unless heads are repeated."""
    spec = tiny_spec(name)
    parts = ranks(spec, 2)
    for pool in spec.pools:
        for tensor in pool.tensors:
            held = [part.pool(pool.name) for part in parts]
            sizes = [one.tensors[pool.tensors.index(tensor)].shape for one in held]
            whole = pool.replicated or all(section.units == 1 for section in tensor.cut)
            assert sizes == [tensor.shape] * 2 if whole else sum(size[0] for size in sizes) >= tensor.shape[0]
            assert all(one.shard == ("" if pool.replicated else f"tp{n}/2") for n, one in enumerate(held))
    assert {part.layers for part in parts} == {spec.layers}


def test_what_a_model_does_not_divide_is_as_it_was() -> None:
    for name in ALL:
        assert tiny_spec(name).shard() == ModelSpec.from_config(
            tiny_config(name), page_size=PAGE, dtype="float32"
        )


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (
            {"tp": (0, 3)},
            r"tp size 3 must divide or be a multiple of the 2 heads \(or groups\) of tensor 'keys'",
        ),
        ({"tp": (0, 64)}, r"tp size 64 must divide the 16 heads \(or groups\) of tensor 'conv'"),
        ({"tp": (2, 2)}, r"tp \(2, 2\): rank 2 of 2; ranks count from 0"),
        ({"tp": (-1, 2)}, r"tp \(-1, 2\): rank -1 of 2"),
        ({"tp": (0, 0)}, r"tp \(0, 0\): rank 0 of 0"),
        ({"tp": 2}, r"tp 2 must be \(rank, size\)"),
        ({"pp": (0.5, 2)}, r"pp \(0.5, 2\): rank and size 0.5 must be a whole number"),
        ({"pp": (0, 5)}, r"pp: 48 layers in 5 stages are not equal shares; .*pass layers=range"),
        ({"pp": (0, 2), "layers": range(40, 50)}, r"layers range\(40, 50\) must be a range of some of .* 48"),
        ({"cp": (0, 3)}, r"'kv': 3 tokens share an entry of keys, which do not divide page_size 64"),
        ({"cp": (0, 2), "stripe": "page"}, r"stripe 'page' must be 'token': .* each rank has other pages"),
    ],
)
def test_shards_that_the_model_cannot_have(axes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        qwen3_next().shard(**axes)  # type: ignore[arg-type]


def test_a_tensor_that_does_not_say_how_it_is_divided() -> None:
    keys = TensorSpec("keys", (0,), (4, 8), "uint8")
    with pytest.raises(
        ConfigError, match=r"tp: tensor 'keys' does not say how ranks divide it \(TensorSpec.cut\)"
    ):
        ModelSpec("m", 4, 1, (PoolSpec("kv", (keys,)),)).shard(tp=(0, 2))


@pytest.mark.parametrize("cut", [[(3, 3)], [(4, 3)], [(4, 0)]])
def test_cuts_that_do_not_fit(cut: Iterable[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match=r"must add up to|do not divide 4 rows"):
        TensorSpec("keys", (0,), (4, 8), "uint8", cut=tuple(CutSection(*one) for one in cut))


def test_a_shard_is_not_divided_again() -> None:
    with pytest.raises(
        ConfigError, match=r"pools \['kv', 'mamba'\] are those of a rank; shard the whole model"
    ):
        qwen3_next().shard(tp=(0, 2)).shard(cp=(0, 2))


@pytest.mark.parametrize("name", ["1/4", "TP1/4", "tp1", "tp1/4-", "tp1/4_cp0/2", "tp" + "1" * 30 + "/4"])
def test_names_of_shards_that_keys_could_not_hold(name: str) -> None:
    keys = TensorSpec("keys", (0,), (4,), "uint8")
    with pytest.raises(ConfigError, match="must be parts such as tp1/4-cp0/2, of at most 32"):
        PoolSpec("kv", (keys,), shard=name)


def test_names_of_shards_are_apart_as_text() -> None:
    found = {ObjectKey(bytes(32), bytes(32), "kv", one.pools[0].shard).text() for one in ranks(llama(), 8)}
    found |= {ObjectKey(bytes(32), bytes(32), "kv", one.pools[0].shard).text() for one in ranks(llama(), 4)}
    assert len(found) == 12
