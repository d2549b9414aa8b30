"""What the tier owes vLLM: its methods, its words, and keys that name all that changes a chunk's bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynchicache.integrations.page_memory import PageMemory
from asynchicache.integrations.vllm import words
from asynchicache.integrations.vllm.options import TierOptions, group_identity
from asynchicache.integrations.vllm.tier import AsynchicacheTier
from conformance.seams import accepts
from integrations.vllm_host import CHUNK_BYTES, aligned_rows, offloading_spec

DATA = Path(__file__).parents[1] / "data"
SEAM: dict[str, dict[str, Any]] = json.loads((DATA / "seams" / "vllm-0.33.0.json").read_text())
BASE = "vllm.v1.kv_offload.tiering.base:SecondaryTierManager"


@pytest.fixture
def rows() -> np.ndarray:
    """The primary tier's rows."""
    return aligned_rows()


Change = Callable[[Any, Any], object]


def fingerprint(rows: np.ndarray, change: Change | None = None, **options: Any) -> bytes:
    """Of group 0's keys, after `change` to vLLM's configuration and that group."""
    config = offloading_spec().config
    group = config.groups[0]
    if change is not None:
        change(config, group)
    chosen = TierOptions.of({"storage": "memory", "weight_version": "w1", **options})
    return group_identity(config, group, chosen).fingerprint("group0", PageMemory.of_view(memoryview(rows)))


@pytest.mark.parametrize(
    "change",
    [
        lambda config, group: setattr(config.model, "name", "org/other"),
        lambda config, group: setattr(config.model, "dtype", "float8_e4m3fn"),
        lambda config, group: setattr(config.cache, "tokens_per_hash", 32),
        lambda config, group: setattr(config.cache, "blocks_per_chunk", 4),
        lambda config, group: setattr(config.parallel, "tp_size", 2),
        lambda config, group: setattr(config.parallel, "dcp_size", 2),
        lambda config, group: setattr(config.parallel, "is_parallelism_agnostic", True),
        lambda config, group: setattr(config, "replicated_layout", True),
        lambda config, group: (
            setattr(config, "canonical_layout", True),
            setattr(config, "kv_cache_layout", "HND"),
        ),
        lambda config, group: setattr(group, "tokens_per_block", 32),
        lambda config, group: setattr(group, "layer_names", ("layers.1",)),
    ],
)
def test_what_changes_a_chunks_bytes_changes_its_key(rows: np.ndarray, change: Change) -> None:
    assert fingerprint(rows, change) != fingerprint(rows)


def test_what_does_not_change_a_chunks_bytes_does_not_change_its_key(rows: np.ndarray) -> None:
    def portable(config: Any, group: Any) -> None:
        config.parallel.is_parallelism_agnostic = True

    def split_portably(config: Any, group: Any) -> None:
        portable(config, group)
        config.parallel.tp_size = 4

    assert fingerprint(rows, portable) == fingerprint(rows, split_portably)
    assert fingerprint(rows, lambda config, group: setattr(config.parallel, "data_parallel_index", 1)) == (
        fingerprint(rows)
    )
    assert fingerprint(rows, salt="tenant") != fingerprint(rows)
    assert fingerprint(rows, weight_version="w2") != fingerprint(rows)
    assert fingerprint(rows[:, : CHUNK_BYTES // 2].copy()) != fingerprint(rows)


OURS = sorted(method for method in SEAM[BASE]["methods"] if hasattr(AsynchicacheTier, method))


@pytest.mark.parametrize("method", OURS)
def test_the_tier_can_be_called_in_every_way_that_vllm_may(method: str) -> None:
    assert accepts(getattr(AsynchicacheTier, method), SEAM[BASE]["methods"][method])


def test_the_tier_does_all_that_vllm_leaves_to_tiers() -> None:
    assert set(SEAM[BASE]["abstract"]) <= set(vars(AsynchicacheTier))


@pytest.mark.parametrize(
    "name", ["TransferJob", "JobResult", "ReqContext", "OffloadingEvent", "RequestOffloadingContext"]
)
def test_our_words_are_those_of_vllm(name: str) -> None:
    recorded = next(what for path, what in SEAM.items() if path.endswith(f":{name}"))
    ours = [field for field in words.__dict__[name].__dataclass_fields__ if not field.startswith("_")]
    theirs = [field.rstrip("=") for field in recorded["fields"] if not field.startswith("_")]

    assert [field for field in theirs if field in ours] == ours


@pytest.mark.parametrize("name", ["LookupResult", "OffloadPolicy", "Medium", "Locality"])
def test_our_enumerations_are_those_of_vllm(name: str) -> None:
    recorded = SEAM[f"vllm.v1.kv_offload.base:{name}"]["members"]

    assert {member.name: str(member.value) for member in words.__dict__[name]} == recorded
