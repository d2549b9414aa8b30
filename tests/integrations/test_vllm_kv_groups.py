"""vLLM's KV cache groups as pools: what they cover, whose bytes they name, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asynchicache.errors import ConfigError
from asynchicache.integrations.vllm.kv_groups import KvGroups, kv_groups
from integrations.vllm_groups import (
    BLOCK,
    BLOCKS,
    FULL,
    STATES,
    WINDOW,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group,
    kv_cache_config,
)


def groups_of(*groups: Any, workers: int = 1, **changes: Any) -> KvGroups:
    config = kv_cache_config(groups, **changes)
    layout = config.kv_cache_layout
    return kv_groups(config, model="tiny", dtype="bfloat16", layout=layout, workers=workers)


def test_groups_are_pools_and_full_attention_comes_first() -> None:
    found = groups_of(STATES, WINDOW, FULL)

    assert [one.number for one in found.groups] == [2, 1, 0]
    assert [pool.name for pool in found.spec.pools] == ["group2", "group1", "group0"]
    assert [pool.coverage.pages for pool in found.spec.pools] == [None, 4, 1]
    assert [pool.per_token for pool in found.spec.pools] == [True, True, False]
    assert found.state_pools == {0: "group0"}
    assert found.pages() == dict.fromkeys(["group2", "group1", "group0"], BLOCKS)
    assert found.block_size == BLOCK


def test_a_pool_has_the_bytes_that_layers_fill_and_no_padding() -> None:
    spec = groups_of(STATES, FULL).spec

    assert spec.pool("group0").slot_bytes(BLOCK) == 2 * 5000
    assert spec.pool("group1").slot_bytes(BLOCK) == 2 * 8192


def test_a_window_needs_the_blocks_of_all_tokens_before_the_next_one() -> None:
    for window, blocks in ((1, 1), (2, 1), (33, 1), (34, 2), (128, 4), (129, 4), (130, 5)):
        found = groups_of(FULL, group(SlidingWindowSpec(sliding_window=window), "layers.0"))
        assert found.spec.pool("group1").coverage.pages == blocks, window


def test_layers_of_several_sizes_are_tensors_of_one_pool() -> None:
    specs = {
        "a": FullAttentionSpec(),
        "b": FullAttentionSpec(unpadded_page_size_bytes=4096),
        "c": FullAttentionSpec(),
    }
    (found,) = groups_of(group(UniformTypeKVCacheSpecs(specs), "a", "b", "c")).groups

    assert [layer.name for layer in found.layers] == ["b", "a", "c"]
    assert [tensor.layers for tensor in found.pool.tensors] == [(0,), (1, 2)]


def test_workers_have_parts_that_share_slots_and_latents_are_the_same_on_all() -> None:
    latents = group(MLAAttentionSpec(), "layers.7")
    found = groups_of(FULL, latents, STATES, workers=2)

    assert [(pool.name, pool.slots_of, pool.shard, pool.replicated) for pool in found.spec.pools] == [
        ("group0", None, "tp0/2", False),
        ("group0_tp1", "group0", "tp1/2", False),
        ("group1", None, "", True),
        ("group2", None, "tp0/2", False),
        ("group2_tp1", "group2", "tp1/2", False),
    ]
    assert list(found.pages()) == ["group0", "group1", "group2"]
    assert [pool.name for pool in found.spec_of(1).pools] == ["group0_tp1", "group1", "group2_tp1"]
    assert found.written_by(0) == {"group0", "group1", "group2"}
    assert found.written_by(1) == {"group0_tp1", "group2_tp1"}
    assert found.spec.identity != groups_of(FULL, latents, STATES).spec.identity


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"dtype": "fp8"},
        {"layout": "LBNHC"},
        {"config": kv_cache_config([FULL, STATES])},
        {"config": kv_cache_config([group(FullAttentionSpec(), "layers.1", "layers.9"), WINDOW])},
    ],
)
def test_what_changes_bytes_changes_the_identity(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "config": kv_cache_config([FULL, WINDOW]),
        "model": "tiny",
        "dtype": "bfloat16",
        "layout": "LBHNC",
    }
    found = []
    for arguments in (given, given, given | change):
        spec = kv_groups(
            arguments["config"], **{name: arguments[name] for name in ("model", "dtype", "layout")}
        ).spec
        found.append((spec.model, spec.identity))

    assert found[0] == found[1] != found[2]


def test_places_leave_out_padding_and_join_kernel_blocks() -> None:
    """Blocks of 8,192 bytes: attention fills them by two kernel blocks each, a state 5,000 bytes of one."""
    memory = torch.zeros(2 * BLOCKS * 8192, dtype=torch.uint8)
    attention = memory[: BLOCKS * 8192].view(torch.float32).view(2 * BLOCKS, 1, 16, 64)
    states = memory[BLOCKS * 8192 :].view(BLOCKS, 1, 1, 8192)
    found = groups_of(group(MambaSpec(), "layers.4"), group(FullAttentionSpec(), "layers.1"))

    pools = found.memory({"layers.1": attention, "layers.4": states}).pools
    for block in range(BLOCKS):
        memory[block * 8192] = block + 1
        memory[(BLOCKS + block) * 8192] = block + 101

    assert pools["group1"].items("blocks0").shape == (1, BLOCKS, 8192)
    assert pools["group0"].items("blocks0").shape == (1, BLOCKS, 5000)
    assert pools["group1"].items("blocks0")[0, :, 0].tolist() == list(range(1, BLOCKS + 1))
    assert pools["group0"].items("blocks0")[0, :, 0].tolist() == list(range(101, BLOCKS + 101))


@pytest.mark.parametrize(
    ("groups", "changes", "message"),
    [
        ([WINDOW, STATES], {}, "no KV cache group has full attention"),
        (
            [FULL, group(ChunkedLocalAttentionSpec(), "a")],
            {},
            "group 1 has specs .'ChunkedLocalAttentionSpec'.",
        ),
        ([FULL, group(SlidingWindowSpec(block_size=16), "a")], {}, r"blocks of \[16, 32\] tokens"),
        ([FULL, group(MambaSpec(mamba_cache_mode="none"), "a")], {}, "set --mamba-cache-mode align"),
        (
            [FULL, group(FullAttentionSpec(), "a", is_eagle_group=True)],
            {},
            "group 1 belongs to a draft model",
        ),
        ([FULL, group(FullAttentionSpec(), "a", host_resident=True)], {}, "group 1 is in host memory"),
        ([FULL, WINDOW], {"prefix_cacheable_group_ids": (0,)}, "group 1 .* has no prefix cache"),
        ([group(FullAttentionSpec(unpadded_page_size_bytes=8190), "a")], {}, "8190 bytes of a block"),
        ([FULL], {"kv_cache_layout": "LHBNC"}, "set VLLM_KV_CACHE_LAYOUT"),
    ],
)
def test_groups_that_cannot_be_restored_by_hash_are_refused(
    groups: list[Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        groups_of(*groups, **changes)


def test_memory_that_is_not_made_of_blocks_is_refused() -> None:
    found = groups_of(group(FullAttentionSpec(), "a"))

    with pytest.raises(ConfigError, match="layer a: 41 kernel blocks for 40 blocks"):
        found.memory({"a": torch.zeros(41, 1, 32, 64)})
