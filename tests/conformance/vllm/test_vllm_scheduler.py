"""The scheduler's half of vLLM's `OffloadingConnector` over our tier: what real requests can load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig import FULL, WINDOW, Rig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

BLOCK = 16
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.bfloat16}
PROMPT = list(range(4 * BLOCK))


class Engine:
    """A rig whose requests come from vLLM's scheduler."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig({"storage": "file", "storage_options": {"path": str(folder)}}, groups=(FULL, WINDOW))
        groups = [
            KVCacheGroupSpec(list(FULL.layer_names), FullAttentionSpec(**SHAPE)),
            KVCacheGroupSpec(list(WINDOW.layer_names), SlidingWindowSpec(**SHAPE, sliding_window=2 * BLOCK)),
        ]
        vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
            speculative_config=None,
        )
        caches = KVCacheConfig(8, [], groups, hash_block_size=BLOCK)
        self.scheduler = OffloadingConnectorScheduler(self.rig.spec, vllm_config, caches)
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        self._requests = 0

    def request(
        self, prompt: list[int] = PROMPT, *, salt: str | None = None, **parameters: object
    ) -> Request:
        """A new request, known to the scheduler."""
        self._requests += 1
        request = Request(
            f"request-{self._requests}",
            prompt,
            SamplingParams(max_tokens=1),
            None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )
        request.kv_transfer_params = parameters or None
        self.scheduler.on_new_request(request)
        return request

    def store(self, request: Request) -> None:
        """All of the request's blocks, of both groups, are computed and given up by the primary tier."""
        keys = [make_offload_key(block, group) for block in request.block_hashes for group in (0, 1)]
        self.rig.store_and_evict(keys)

    def matched(self, request: Request) -> tuple[list[int | None], bool]:
        """Tokens that the request is told it can load, step by step until there is an answer."""
        told: list[int | None] = []
        for _ in range(6):
            tokens, later = self.scheduler.get_num_new_matched_tokens(request, 0)
            told.append(tokens)
            self.scheduler.build_connector_meta(SchedulerOutput.make_empty())
            self.rig.tier.drain_jobs()
            if tokens is not None:
                return told, later
        raise AssertionError(f"no answer: {told}")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "pages")
    yield made
    made.rig.shutdown()


@pytest.fixture
def stored(engine: Engine) -> Callable[..., Engine]:
    """An engine whose storage has the blocks of `PROMPT`, with that salt."""

    def make(salt: str | None = None) -> Engine:
        engine.store(engine.request(salt=salt))
        return engine

    return make


def test_a_prompt_that_is_in_storage_is_loaded_after_two_steps_of_waiting(
    stored: Callable[..., Engine],
) -> None:
    engine = stored()
    longer = engine.request([*PROMPT, *range(1000, 1000 + 2 * BLOCK)])

    # Asked, then read, then there: the scheduler did something else in between.
    assert engine.matched(longer) == ([None, None, len(PROMPT)], True)
    assert engine.matched(engine.request([7, *PROMPT])) == ([None, 0], False)


def test_a_salt_reaches_storage_through_the_scheduler(stored: Callable[..., Engine]) -> None:
    engine = stored("tenant")

    assert engine.matched(engine.request(salt="other"))[0][-1] == 0
    assert engine.matched(engine.request())[0][-1] == 0
    assert engine.matched(engine.request([*PROMPT, 1], salt="tenant"))[0][-1] == len(PROMPT)


def test_parameters_of_a_request_reach_the_tier(stored: Callable[..., Engine]) -> None:
    engine = stored()
    prompt = [*PROMPT, 1]

    assert engine.matched(engine.request(prompt, asynchicache={"no_load": True})) == ([0], False)
    assert engine.matched(engine.request(prompt, kv_load_tiers=[{"medium": "CPU"}])) == ([0], False)
    assert engine.matched(engine.request(prompt, kv_load_tiers=[{"medium": "STORAGE"}]))[0][-1] == len(PROMPT)
