"""Memory that an engine gives: what is none of the pool's is refused when it is given, in words."""

from __future__ import annotations

import pytest
import torch

from asynchicache.errors import ConfigError
from asynchicache.pools.engine import EnginePages, PagePlace
from asynchicache.pools.host import HostPool
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.transfer.copies import PoolMemory

PAGE, PAGES, BYTES = 4, 3, 4 * 8 * 2  # of a page of one layer
KV = PoolSpec("kv", tuple(TensorSpec(name, (0, 1), (8,), "bfloat16") for name in ("keys", "values")))


def _pages(*places: tuple[int, int]) -> EnginePages:
    """Of (address, bytes from page to page) of keys, then values, layer by layer."""
    return EnginePages(KV, PAGE, [PagePlace(*place, BYTES) for place in places], PAGES)


def _memory(nbytes: int = 64 * BYTES) -> tuple[torch.Tensor, int]:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    return memory, memory.data_ptr()


@pytest.mark.parametrize(
    ("offsets", "strides"),
    [
        ([0, 3, 6, 9], [1] * 4),  # each layer for itself
        ([0, 1, 2, 3], [4] * 4),  # all layers of a page beside each other
        ([3, 0, 2, 1], [4] * 4),
        ([0, 1, 6, 7], [2] * 4),  # keys apart from values
        ([0, 1, 2, 12], [3, 3, 3, 1]),
        ([0, 1, 10, 14], [2, 4, 1, 1]),  # in the gaps of another
    ],
)
def test_layers_may_lie_between_each_other(offsets: list[int], strides: list[int]) -> None:
    memory, start = _memory()
    places = [(start + BYTES * at, BYTES * step) for at, step in zip(offsets, strides, strict=True)]
    ours = {at + step * page for at, step in zip(offsets, strides, strict=True) for page in range(PAGES)}
    assert len(ours) == 4 * PAGES, "the case is as it says"

    pages = _pages(*places)

    for name in pages.copy_spec.tensors:
        pages.items(name.name).add_(1)
    assert set(memory.tolist()) == {0, 1}
    assert int(memory.sum()) == 4 * PAGES * BYTES


@pytest.mark.parametrize(
    ("offsets", "strides", "which"),
    [
        ([0, 3, 0, 3], [1] * 4, "0 and 2"),  # values where the keys are
        ([0, 3, 5, 9], [1] * 4, "1 and 2"),  # in their last page
        ([0, 1, 2, 1], [4] * 4, "1 and 3"),
        ([0, 1, 2, 2.5], [4] * 4, "2 and 3"),
        ([0, 1, 2, 3.5], [4] * 4, "0 and 3"),  # in the next page
        ([0, 20, 30, 2], [2, 1, 1, 3], "0 and 3"),  # in one page of three
    ],
)
def test_layers_that_have_bytes_in_common_are_refused(
    offsets: list[float], strides: list[int], which: str
) -> None:
    """What one is loaded with would be lost when the other is."""
    _, start = _memory()
    places = [(start + int(BYTES * at), BYTES * step) for at, step in zip(offsets, strides, strict=True)]

    with pytest.raises(
        ConfigError, match=f"pool 'kv': places {which} have bytes in common.* memory of its own"
    ):
        _pages(*places)


def test_pages_that_overlap_and_layers_that_are_not_contiguous_are_refused() -> None:
    _, start = _memory()
    with pytest.raises(ConfigError, match=f"pages {BYTES - 1} bytes apart.*must not overlap"):
        _pages((start, BYTES - 1), *[(start + 8 * n * BYTES, BYTES) for n in (1, 2, 3)])

    layers = [torch.zeros(PAGES, PAGE, 8, dtype=torch.bfloat16) for _ in range(4)]
    turned = torch.zeros(PAGES, 8, PAGE, dtype=torch.bfloat16).transpose(1, 2)
    with pytest.raises(ConfigError, match=r"strides \(32, 1, 4\); it must be .* and a page of it contiguous"):
        EnginePages.of_tensors(KV, PAGE, {"keys": [layers[0], turned], "values": layers[2:]})


def test_memory_at_an_odd_address_is_copied_as_any_other() -> None:
    memory, start = _memory()
    pages = _pages(*[(start + 1 + 8 * n * BYTES, BYTES) for n in range(4)])
    host = HostPool(KV, PAGE, PAGES, pin=False)

    items = PoolMemory(pages, host).items()

    assert items.host[0].dtype == torch.uint8
    memory.copy_(torch.arange(len(memory)) % 251)
    for ours, theirs in zip(items.host, items.device, strict=True):
        ours.copy_(theirs)
    expected = torch.arange(1, 1 + PAGES * BYTES) % 251
    assert torch.equal(host.items("keys")[0].flatten(), expected.to(torch.uint8))
    host.close()
