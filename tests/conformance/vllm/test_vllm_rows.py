"""Rows that groups share, laid out by vLLM's own region: what of them goes to storage, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rig import CHUNK_BYTES, FULL, MAMBA, TIER, Rig, content, key, kv_caches, offloading_config
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from asynchicache.errors import ConfigError

# Qwen3-Next: a state fills 67/128 of a page, attention all of it.
PAGE, STATE = CHUNK_BYTES // 2, CHUNK_BYTES // 2 * 67 // 128
STATES = OffloadingGroupConfig(16, ("layers.3.mixer", "layers.4.mixer"), 2, sliding_window_size_in_chunks=1)
POISON = b"another tenant's"
KEYS = [key(f"block {number}", group) for number, group in enumerate([0] * 4 + [2] * 6)]


class PaddedRig(Rig):
    """Its worker writes to vLLM's own views of rows that were full of somebody else's bytes."""

    def __init__(self, folder: Path, **tier: object) -> None:
        options = {"storage": "file", "storage_options": {"path": str(folder)}, **tier}
        caches = kv_caches([PAGE, PAGE], [(0, PAGE), (1, PAGE)], [(0, STATE), (1, STATE)])
        super().__init__(options, groups=(FULL, STATES), chunks=10, caches=caches)
        self.rows[:] = np.resize(np.frombuffer(POISON, np.int8), CHUNK_BYTES)
        region = SharedOffloadRegion(
            engine_id=self.spec.config.engine_id,
            num_chunks=self.spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.spec.kv_bytes_per_chunk,
            cpu_page_size=self.spec.cpu_page_size_per_worker,
        )
        self._region = region
        self._views = [region.create_next_worker_view(PAGE) for _ in range(2)]

    def write(self, key: OffloadKey, row: int) -> None:
        for place, view in self._parts(key, row):
            place.copy_(view)

    def holds(self, key: OffloadKey, row: int) -> bool:
        return all(torch.equal(place, part) for place, part in self._parts(key, row))

    def _parts(self, key: OffloadKey, row: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        used = STATE if key[-1] else PAGE
        whole = torch.from_numpy(content(key).copy())
        for number, view in enumerate(self._views):
            yield view[row][:used], whole[number * PAGE : number * PAGE + used]


def holds_poison(folder: Path) -> bool:
    return any(POISON in path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("whole_rows", [False, True])
def test_bytes_of_others_stay_out_of_storage(tmp_path: Path, whole_rows: bool) -> None:
    rig = PaddedRig(tmp_path, whole_rows=whole_rows)
    rig.store_and_evict(KEYS)
    rig.rows[:] = 0

    assert rig.fetch(KEYS) == ["HIT"] * len(KEYS)

    counted = rig.manager.get_stats().data["data"]["vllm:asynchicache_tier_bytes"]
    put = sum(value for labels, value in counted.items() if labels[-1] == "put")
    assert put == 10 * CHUNK_BYTES if whole_rows else 4 * CHUNK_BYTES + 6 * 2 * STATE  # 40 % more
    rig.shutdown()
    assert holds_poison(tmp_path) == whole_rows


def test_the_next_process_finds_them(tmp_path: Path) -> None:
    first = PaddedRig(tmp_path)
    first.store_and_evict(KEYS)
    first.shutdown()

    second = PaddedRig(tmp_path)

    assert second.fetch(KEYS) == ["HIT"] * len(KEYS)
    second.shutdown()


def test_without_our_specification_shared_rows_are_refused(tmp_path: Path) -> None:
    tier = {**TIER, "storage": "file", "storage_options": {"path": str(tmp_path)}}
    config = offloading_config(tier, groups=(FULL, MAMBA), spec_name="TieringOffloadingSpec")
    with pytest.raises(ConfigError, match="AsynchicacheTieringSpec"):
        OffloadingSpecFactory.create_spec(config).get_manager()
