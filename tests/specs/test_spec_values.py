"""Specs that are written by hand: what cannot be a size, a layer or a name is refused where it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asynchicache.errors import CapacityError, ConfigError
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import Coverage, trailing_pages

KEYS = TensorSpec("keys", (0, 1), (2,), "uint8")
POOL = PoolSpec("kv", (KEYS,))


@pytest.mark.parametrize(
    ("layers", "shape", "sections", "words"),
    [
        ((0.5,), (2,), (), r"layers \(0.5,\): expected int, got float in \[0\]"),
        (("a",), (2,), (), r"layers \('a',\): expected int, got str"),
        ((0, 1), (1.5,), (), r"shape \(1.5,\): expected int, got float"),
        ((0, 1), (2,), (1.0, 1.0), r"sections \(1.0, 1.0\): expected int, got float"),
    ],
)
def test_tensors_of_broken_numbers(
    layers: tuple[int, ...], shape: tuple[int, ...], sections: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"tensor 'keys': {words}"):
        TensorSpec("keys", layers, shape, "uint8", sections)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(0, "0 tokens_per_entry; 1 at least"), (1.5, "tokens_per_entry 1.5: expected int")],
)
def test_entries_of_broken_numbers(tokens: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor 'keys': {words}"):
        TensorSpec("keys", (0,), (2,), "uint8", tokens_per_entry=tokens)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PoolSpec("kv", KEYS), "pool 'kv': tensors TensorSpec.*: expected array, got TensorSpec"),
        (lambda: PoolSpec("kv", ("keys",)), "pool 'kv': tensors .*: expected object, got str"),
        (lambda: PoolSpec("kv", (KEYS,), "all"), "pool 'kv': coverage 'all': expected object, got str"),
        (lambda: PoolSpec("kv", (KEYS,), per_token=1), "pool 'kv': per_token 1: expected bool, got int"),
        (lambda: PoolSpec("kv", (KEYS,), slots_of=3), "pool 'kv': slots_of 3: expected str"),
        (lambda: TensorSpec("keys", 3, (2,), "uint8"), "tensor 'keys': layers 3: expected array, got int"),
        (
            lambda: TensorSpec("keys", (0,), (2,), torch.float32),
            "dtype torch.float32 is none of",
        ),
        (lambda: ModelSpec("m", 4, "2", (POOL,)), "model 'm': layers '2': expected int, got str"),
        (lambda: ModelSpec("m", 4, True, (POOL,)), "model 'm': layers True: expected int, got bool"),
        (lambda: ModelSpec("m", 4, 2, POOL), "model 'm': pools PoolSpec.*: expected array"),
        (lambda: Coverage("1"), "coverage: pages '1' must be a whole number"),
    ],
)
def test_fields_of_another_type(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_lists_are_taken_as_tuples() -> None:
    tensor = TensorSpec("keys", range(2), [2], "uint8")  # type: ignore[arg-type]
    assert (tensor, PoolSpec("kv", [tensor])) == (KEYS, POOL)  # type: ignore[arg-type]
    assert hash(tensor) == hash(KEYS)


def test_pages_hold_whole_entries() -> None:
    pool = PoolSpec(
        "kv",
        (
            TensorSpec("four", (0,), (2,), "uint8", tokens_per_entry=4),
            TensorSpec("six", (0,), (2,), "uint8", tokens_per_entry=6),
        ),
    )
    assert ModelSpec("m", 24, 1, (pool,)).pools[0].slot_bytes(24) == 2 * 6 + 2 * 4
    with pytest.raises(
        ConfigError, match=r"'kv': 6 tokens share .* page_size 16; multiples of 12 fit: 12, 24"
    ):
        ModelSpec("m", 16, 1, (pool,))
    with pytest.raises(ConfigError, match=r"holds states; tokens_per_entry of \['four', 'six'\] must be 1"):
        PoolSpec("mamba", pool.tensors, coverage=trailing_pages(1), per_token=False)


def test_scales_are_shared_like_the_entries_that_they_belong_to() -> None:
    entries = TensorSpec("hca", (0,), (2,), "bfloat16", tokens_per_entry=4)
    quantised = ModelSpec("m", 8, 1, (PoolSpec("kv", (entries,)),)).with_quantised_kv().pools[0]
    assert [(t.name, t.tokens_per_entry, t.shape) for t in quantised.tensors] == [
        ("hca", 4, (2,)),
        ("hca_scale", 4, ()),
    ]
    assert quantised.slot_bytes(8) == 2 * 2 + 2 * 4


def states(**widths: int) -> PoolSpec:
    tensors = tuple(TensorSpec(name, (1,), (width,), "uint8") for name, width in widths.items())
    return PoolSpec("mamba", tensors, coverage=trailing_pages(1), per_token=False)


def test_states_without_bytes_are_left_out() -> None:
    """A linear attention without a convolution has one of shape (0,)."""
    assert states(recurrent=8, conv=0) == states(recurrent=8)
    assert ModelSpec("m", 4, 2, (POOL, states(conv=0))) == ModelSpec("m", 4, 2, (POOL,))


def test_pages_without_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor 'keys': shape \(0,\) has an empty dimension"):
        PoolSpec("kv", (TensorSpec("keys", (0,), (0,), "uint8"),))
    with pytest.raises(ConfigError, match=r"shape \(-1,\) has a negative dimension"):
        TensorSpec("keys", (0,), (-1,), "uint8")


@pytest.mark.parametrize("name", ["", "KV", "../kv", "k v", "kv\n", "é", "²", "a" * 65, 7, None, b"kv"])
def test_names_that_storage_could_not_keep(name: str) -> None:
    with pytest.raises(ConfigError, match="must be 1 to 64 of a-z, 0-9 and _"):
        PoolSpec(name, (KEYS,))


@pytest.mark.parametrize("page_size", [0, -1, 1.5, "64", None, True])
def test_pages_of_no_tokens(page_size: int) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        ModelSpec("m", page_size, 2, (POOL,))
    for pool in (lambda: HostPool(POOL, page_size, 4, pin=False), lambda: DevicePool(POOL, page_size, 4)):
        with pytest.raises(ConfigError, match="page"):
            pool()


@pytest.mark.parametrize("slots", [-1, 1.5, "4", None])
def test_pools_of_broken_sizes(slots: int) -> None:
    for pool in (lambda: HostPool(POOL, 4, slots, pin=False), lambda: DevicePool(POOL, 4, slots)):
        with pytest.raises(ConfigError, match="slots"):
            pool()


def test_pools_in_places_and_layouts_that_do_not_exist() -> None:
    for device in ("gpu", "meta"):
        with pytest.raises(ConfigError, match=f"device '{device}' must be cpu, cuda or cuda:N"):
            DevicePool(POOL, 4, 4, device)
    with pytest.raises(ConfigError, match="layout 'page_first' must be a HostLayout"):
        HostPool(POOL, 4, 4, pin=False, layout="page_first")  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="no room for a slab"):
        HostPool(POOL, 4, 2**62, pin=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(CapacityError, match="no room on cuda"):
        DevicePool(POOL, 4, 4, "cuda")
