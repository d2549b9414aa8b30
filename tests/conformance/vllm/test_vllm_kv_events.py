"""KV events between vLLM's own classes and ours, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from kv_event_checks import (
    check_engine_is_followed,
    check_our_publisher_is_understood,
    check_ours_is_read,
    check_record,
)
from vllm.distributed import kv_events


def test_the_record_is_of_this_version() -> None:
    check_record(kv_events, "vllm-0.33.0.json")


@pytest.mark.parametrize("hashes", ["int64", "bytes"])
def test_our_events_are_vllms(hashes: str) -> None:
    check_ours_is_read(kv_events, hashes=hashes)


@pytest.mark.asyncio
async def test_vllms_publisher_is_followed(tmp_path: Path) -> None:
    await check_engine_is_followed(kv_events, tmp_path, "data_parallel_rank")


@pytest.mark.asyncio
@pytest.mark.parametrize("hashes", ["int64", "bytes"])
async def test_vllms_decoder_follows_our_publisher(hashes: str) -> None:
    await check_our_publisher_is_understood(kv_events, hashes=hashes, pools=("kv",))
