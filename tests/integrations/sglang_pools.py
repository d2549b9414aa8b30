"""SGLang's host pools as recorded from the real ones: same parts at same places, without SGLang."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

RECORD: Mapping[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "sglang_host_pools.json").read_text()
)


class RecordedPool:
    """Answers as the recorded pool did, over memory that is aligned as its was.

    Args:
        name: which one of the record.
    """

    start_layer, end_layer, storage_format_tag = 0, 4, None

    def __init__(self, name: str) -> None:
        self._record = RECORD["pools"][name]
        self.layout: str = self._record["layout"]
        self.dtype = getattr(torch, self._record["dtype"].removeprefix("torch."))
        self.page_size: int = self._record["page_size"]
        self.page_num: int = self._record["pages"]
        self.memory = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for size in self._record["allocations"]]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = [index // self.page_size for index in indices.tolist()[:: self.page_size]]
        bases = [memory.ctypes.data for memory in self.memory]
        parts = self._record["parts"]
        pointers = [
            bases[part["allocation"]] + part["offset"] + page * part["stride"]
            for page in pages
            for part in parts
        ]
        return pointers, [part["nbytes"] for part in parts] * len(pages)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        nbytes = sum(part["nbytes"] for part in self._record["parts"])
        return torch.zeros(nbytes // self.dtype.itemsize, dtype=self.dtype)

    def page(self, number: int) -> bytes:
        """A page's bytes, part after part."""
        return b"".join(view.tobytes() for view in self._views(number))

    def fill(self, number: int, seed: int) -> bytes:
        """Put random bytes into a page; what they are."""
        random = np.random.default_rng(seed)
        for view in self._views(number):
            view[:] = np.frombuffer(random.bytes(len(view)), np.uint8)
        return self.page(number)

    def indices(self, *pages: int) -> torch.Tensor:
        """Token indices of pages, as SGLang gives them."""
        size = self.page_size
        return torch.tensor([page * size + token for page in pages for token in range(size)])

    def _views(self, number: int) -> list[Any]:
        parts = self._record["parts"]
        starts = [part["offset"] + number * part["stride"] for part in parts]
        return [
            self.memory[part["allocation"]][start : start + part["nbytes"]]
            for part, start in zip(parts, starts, strict=True)
        ]


def storage_config(extra: Mapping[str, Any], **changes: Any) -> SimpleNamespace:
    """`HiCacheStorageConfig` of a single rank."""
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "toy",
        "tp_lcm_size": None,
        "should_split_heads": False,
        "dp_rank": 0,
        "extra_config": dict(extra),
        "dcp_size": 1,
        "dcp_rank": 0,
        "logical_page_size": None,
    }
    return SimpleNamespace(**(fields | changes))
