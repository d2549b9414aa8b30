"""KV events between SGLang's own classes and ours, both ways."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from kv_event_checks import (
    check_engine_is_followed,
    check_our_publisher_is_understood,
    check_ours_is_read,
    check_record,
)
from sglang.srt.disaggregation import kv_events
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

from asynchicache import ModelSpec, PoolSpec, TensorSpec, Tier
from asynchicache.events import PagesStored
from asynchicache.hashing import page_digests
from asynchicache.integrations.kv_events.config import KvEventsConfig
from asynchicache.integrations.kv_events.encoding import EventEncoder
from asynchicache.integrations.kv_events.wire import BlockStored


def test_the_record_is_of_this_version() -> None:
    check_record(kv_events, "sglang-0.5.23.json")


def test_our_events_are_sglangs() -> None:
    check_ours_is_read(kv_events, media="sglang")


def test_media_are_sglangs_words() -> None:
    words = {medium.value for medium in kv_events.StorageMedium}

    assert set(EventEncoder(_spec(), KvEventsConfig(media="sglang")).media.values()) <= words


def test_a_block_has_the_hash_that_sglang_gives_it() -> None:
    tokens = array("q", range(12))
    digests = page_digests(tokens, 4)
    (event,) = EventEncoder(_spec(), KvEventsConfig()).encode(
        [PagesStored("kv", Tier.DEVICE, tuple(digests), None, tokens, 4)]
    )
    prior, theirs = None, []
    for page in range(3):
        prior = get_hash_str(list(tokens[page * 4 : page * 4 + 4]), prior)
        theirs.append(hash_str_to_int64(prior))

    assert isinstance(event, BlockStored)
    assert event.block_hashes == theirs


def _spec() -> ModelSpec:
    return ModelSpec("model", 4, 1, (PoolSpec("kv", (TensorSpec("keys", (0,), (1,), "int64"),)),))


@pytest.mark.asyncio
async def test_sglangs_publisher_is_followed(tmp_path: Path) -> None:
    await check_engine_is_followed(kv_events, tmp_path, "attn_dp_rank")


@pytest.mark.asyncio
async def test_sglangs_decoder_follows_our_publisher() -> None:
    await check_our_publisher_is_understood(kv_events, media="sglang", pools=("kv",))
