"""Convert cache events to wire events; consecutive pages are merged into one event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from asynchicache.events import PagesRemoved, PagesStored
from asynchicache.hashing import NAMESPACE_BYTES
from asynchicache.integrations.kv_events.config import KvEventsConfig
from asynchicache.integrations.kv_events.wire import BlockHash, BlockRemoved, BlockStored, KvEvent
from asynchicache.specs import ModelSpec, PoolSpec
from asynchicache.types import Tier

MEDIA = {
    "vllm": {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"},
    "sglang": {Tier.DEVICE: "GPU", Tier.HOST: "CPU_PINNED", Tier.STORAGE: "DISK"},
}
"""Names of the tiers. SGLang's EXTERNAL is a pool beyond its third tier, and has no counterpart here."""

_MERGED_BLOCKS = 1024
"""Most blocks of one event, to bound the size of messages."""


class _Group(NamedTuple):
    """A pool in the engines' terms."""

    number: int
    kind: str
    window: int | None


class EventEncoder:
    """Encodes the events of one cache.

    Args:
        spec: the cache's pools.
        config: selects pools, hashes and names of tiers.
    """

    def __init__(self, spec: ModelSpec, config: KvEventsConfig) -> None:
        self.media = MEDIA[config.media]
        self._hash: Callable[[bytes], BlockHash] = int64_hash if config.hashes == "int64" else _hash
        wanted = config.pools
        self._groups = {
            pool.name: _group(index, pool, spec.page_size)
            for index, pool in enumerate(spec.owners)
            if wanted is None or pool.name in wanted
        }

    def encode(self, events: Iterable[PagesStored | PagesRemoved]) -> Iterator[KvEvent]:
        """Encode events in order; consecutive events of one chain are merged."""
        last: BlockStored | BlockRemoved | None = None
        for event in events:
            group = self._groups.get(event.pool)
            if group is None:
                continue
            found = self._encoded(event, group)
            merged = _merged(last, found)
            if merged is None and last is not None:
                yield last
            last = merged or found
        if last is not None:
            yield last

    def _encoded(self, event: PagesStored | PagesRemoved, group: _Group) -> BlockStored | BlockRemoved:
        return self._stored(event, group) if isinstance(event, PagesStored) else self._removed(event, group)

    def _stored(self, event: PagesStored, group: _Group) -> BlockStored:
        return BlockStored(
            block_hashes=[self._hash(digest) for digest in event.digests],
            parent_block_hash=None if event.parent is None else self._hash(event.parent),
            token_ids=list(event.tokens),
            block_size=event.page_size,
            lora_id=None,
            medium=self.media[event.tier],
            lora_name=event.namespace,
            group_idx=group.number,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
            locality=None if event.tier is Tier.STORAGE else "LOCAL",
            cache_salt=event.salt,
            pool=event.pool,
        )

    def _removed(self, event: PagesRemoved, group: _Group) -> BlockRemoved:
        return BlockRemoved(
            block_hashes=[self._hash(digest) for digest in event.digests],
            medium=self.media[event.tier],
            group_idx=group.number,
            locality=None if event.tier is Tier.STORAGE else "LOCAL",
            pool=event.pool,
        )


def _hash(digest: bytes) -> bytes:
    """Return the hash of the chain, which is SGLang's."""
    return digest[NAMESPACE_BYTES:]


def int64_hash(digest: bytes) -> int:
    """Return the same integer as SGLang's `hash_str_to_int64`."""
    return int.from_bytes(_hash(digest)[:8], "big", signed=True)


def _group(index: int, pool: PoolSpec, page_size: int) -> _Group:
    if pool.coverage.pages is None:
        return _Group(index, "full_attention", None)
    if pool.per_token:
        return _Group(index, "sliding_window", pool.coverage.pages * page_size)
    return _Group(index, "mamba", None)


def _merged(last: KvEvent | None, event: BlockStored | BlockRemoved) -> BlockStored | BlockRemoved | None:
    """Merge two events; None if the second does not continue the first."""
    if isinstance(last, BlockRemoved) and isinstance(event, BlockRemoved):
        hashes = last.block_hashes + event.block_hashes
        return replace(last, block_hashes=hashes) if _alike(last, event, hashes) else None
    if isinstance(last, BlockStored) and isinstance(event, BlockStored):
        hashes = last.block_hashes + event.block_hashes
        follows = event.parent_block_hash == last.block_hashes[-1] and last.lora_name == event.lora_name
        if follows and last.cache_salt == event.cache_salt and _alike(last, event, hashes):
            return replace(last, block_hashes=hashes, token_ids=[*last.token_ids, *event.token_ids])
    return None


def _alike(
    last: BlockStored | BlockRemoved, event: BlockStored | BlockRemoved, hashes: list[BlockHash]
) -> bool:
    return last.medium == event.medium and last.group_idx == event.group_idx and len(hashes) <= _MERGED_BLOCKS
