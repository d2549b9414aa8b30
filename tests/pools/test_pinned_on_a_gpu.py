"""Host memory that a real CUDA runtime pins."""

from __future__ import annotations

import pytest
import torch

from asynchicache.cuda_driver import CudaDriver
from asynchicache.layouts import HostLayout
from asynchicache.pools.host import HostPool
from asynchicache.pools.slabs import Pinner
from asynchicache.specs import PoolSpec, TensorSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KV = PoolSpec("kv", (TensorSpec("keys", (0, 1), (256,), "float32"),))


@pytest.mark.parametrize("layout", list(HostLayout), ids=lambda layout: layout.value)
def test_every_slot_of_a_grown_pool_can_be_reached(layout: HostLayout) -> None:
    pinner = Pinner.of("cuda:0")
    assert pinner is not None
    pinner.step_bytes = 1 << 20
    pool = HostPool(KV, 64, 40, pin=pinner, layout=layout)
    while pool.growing:
        pool.grow()
    driver, items = CudaDriver.load(0), pool.items("keys")

    assert (pool.ready, pool.pinned) == (40, True)
    for slot in range(40):
        assert driver.device_address(items[1, slot].data_ptr()) > 0
    items.fill_(7)
    assert (items[:, 39, 0].contiguous().cuda() == 7).all()
    pool.close()
