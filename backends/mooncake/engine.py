"""One pool's pages in a Mooncake cluster. Header and page form one object; each batch is one call."""

from __future__ import annotations

import asyncio
import logging
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from asynchicache.backends.mooncake.codes import (
    MooncakeCode,
    delete_outcome,
    get_outcome,
    name_of,
    put_outcome,
)
from asynchicache.backends.mooncake.slots import RegisteredSlots
from asynchicache.backends.mooncake.store import MooncakeClient
from asynchicache.backends.mooncake.writes import WritesInFlight
from asynchicache.errors import ClosedError, StorageError
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import DIGEST_BYTES, ObjectKey
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

LABEL = "label"
"""What the name of a pool's label ends with, where that of a page has its digest."""
LABEL_BYTES = 4096
"""Size of a label, with spaces at its end: Mooncake reads objects of a known size."""

_MAX_KEYS = 1024
"""Each call is one request to the master, which answers 1,024 names in 3 ms, and 4,096 in 9."""
_GROUP_LETTERS = 15
"""With names as long as those of pages, a page in a group costs the master 2.4 kB, not 1.8."""


class MooncakeEngine:
    """One pool in one cluster.

    The first put of a key wins, which is correct because keys are derived from contents. The engine
    removes damaged pages so that a good one can be stored. An answer of `exists` can become wrong
    immediately: the master evicts, and notices a dead node only after the node's time to live.

    Args:
        client: the cluster, shared with the backend's other engines.
        slots: the binding's slots, registered; the engine closes them.
        threads: runs the calls that move pages.
        lookups: runs the others, which wait for no page.
        fingerprints: of the pools of the backend, by name; it grows.
    """

    def __init__(
        self,
        binding: PoolBinding,
        client: MooncakeClient,
        slots: RegisteredSlots,
        threads: futures.Executor,
        lookups: futures.Executor,
        *,
        concurrency: int,
        namespace: str,
        fingerprints: Mapping[str, bytes],
    ) -> None:
        self.capabilities = Capabilities(
            durable=False, checks=True, shared=True, batch_keys=_MAX_KEYS, concurrency=concurrency
        )
        self._binding = binding
        self._client = client
        self._slots = slots
        self._threads = threads
        self._lookups = lookups
        self._namespace = namespace
        self._fingerprints = fingerprints
        self._writes = WritesInFlight()
        self._failures = FailureLog(logger)
        self._running: set[futures.Future[Any]] = set()
        self._closing: futures.Future[None] | None = None

    @property
    def closed(self) -> bool:
        return self._closing is not None

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        """
        Raises:
            StorageError: the cluster does not answer.
        """
        return await self._call(partial(self._exists, keys), self._lookups)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._call(partial(self._get, keys, slots))

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._call(partial(self._put, keys, slots))

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return await self._call(partial(self._delete, keys))

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Query the pages in this order: the master counts a query as a use, and evicts the least
        recently queried or read pages first.

        Raises:
            StorageError: the cluster does not answer.
        """
        await self.exists(keys)

    async def clear(self) -> int:
        """
        Raises:
            StorageError: the cluster does not answer.
        """
        glob = f"{self._namespace}:{self._any_page().pattern()}"
        return await self._call(partial(self._client.clear, glob))

    async def label(self, label: bytes) -> None:
        """
        Raises:
            StorageError: the label is too long, or the cluster does not take it.
        """
        folder = self._any_page().text().rpartition(".")[0]
        name = f"{self._namespace}:{folder}.{LABEL}"
        await self._call(partial(self._client.replace, name, label.ljust(LABEL_BYTES)), self._lookups)

    def _any_page(self) -> ObjectKey:
        binding = self._binding
        return ObjectKey(binding.fingerprint, bytes(DIGEST_BYTES), binding.pool, binding.shard)

    async def aclose(self) -> None:
        """Wait for the running calls, then unregister the memory. Mooncake's own deadlines end each call.

        The work continues if the caller is cancelled.
        """
        if self._closing is None:
            self._closing = self._threads.submit(self._finish, list(self._running))
        await asyncio.shield(asyncio.wrap_future(self._closing))

    async def _call(self, work: Callable[[], T], threads: futures.Executor | None = None) -> T:
        """Run `work` in a thread, by default one that moves pages. It runs to its end even if the caller is
        cancelled; `aclose` waits."""
        if self._closing is not None:
            raise ClosedError(f"mooncake engine of pool {self._binding.pool!r} is closed")
        running = (threads or self._threads).submit(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.shield(asyncio.wrap_future(running))

    def _finish(self, running: list[futures.Future[Any]]) -> None:
        # Threads start calls in submission order, so none of these can be queued behind this one; lookups
        # have their own.
        futures.wait(running)
        self._slots.close()

    def _names(self, keys: Sequence[ObjectKey]) -> list[str]:
        return [f"{self._namespace}:{key.text()}" for key in keys]

    def _groups(self, keys: Sequence[ObjectKey]) -> list[str] | None:
        """What the pages are evicted with: those of the other pools that end with the same token. None where
        there is one pool."""
        binding = self._binding
        if len(self._fingerprints) == 1:
            return None
        whose = self._fingerprints.get(binding.depends_on or binding.pool, binding.fingerprint)
        model = blake2b(self._namespace.encode() + whose).digest()
        return [_group_name(model, key.digest) for key in keys]

    def _exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        codes = self._client.exists(self._names(keys))
        if codes and all(code < 0 for code in codes):
            raise StorageError(f"Mooncake cannot tell what exists: {name_of(codes[0])}")
        return bytearray([code == 1 for code in codes])

    def _get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        outcomes = [Outcome.FAILED] * len(keys)
        for places in distinct(keys):
            some = self._read([keys[place] for place in places], [slots[place] for place in places])
            for place, outcome in zip(places, some, strict=True):
                outcomes[place] = outcome
        return outcomes

    def _read(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        codes = self._client.get(self._names(keys), *self._slots.buffers(slots))
        outcomes = [get_outcome(code, self._slots.object_bytes) for code in codes]
        for place, outcome in enumerate(outcomes):
            if outcome is Outcome.HIT:
                outcomes[place] = self._binding.check(slots[place], keys[place])
        self._log_failures("get", codes, outcomes)
        self._drop([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.CORRUPT])
        return outcomes

    def _put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        mine, others = self._writes.claim(keys)
        outcomes = [Outcome.FAILED] * len(keys)
        codes = self._write([keys[place] for place in mine], [slots[place] for place in mine])
        for place, code in zip(mine, codes, strict=True):
            outcomes[place] = put_outcome(code)
        for place, written in others.items():  # its writer has released its claims before it waits
            outcome = put_outcome(written.result())
            outcomes[place] = Outcome.EXISTS if outcome is Outcome.STORED else outcome
        self._log_failures("put", codes, [outcomes[place] for place in mine])
        return outcomes

    def _write(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[int]:
        """Write claimed keys and settle their claims."""
        codes = [int(MooncakeCode.TRANSFER_FAIL)] * len(keys)
        try:
            buffers = self._slots.buffers(slots)
            for key, slot in zip(keys, slots, strict=True):
                self._binding.seal(slot, key)
            codes = self._client.put(self._names(keys), *buffers, self._groups(keys))
        finally:  # otherwise waiters for these keys would never wake up
            self._writes.settle(keys, codes)
        return codes

    def _delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        codes = self._client.remove(self._names(keys))
        outcomes = [delete_outcome(code) for code in codes]
        self._log_failures("delete", codes, outcomes)
        return outcomes

    def _drop(self, damaged: Sequence[ObjectKey]) -> None:
        if damaged:
            message, count = "pool %s: %d damaged pages are removed", len(damaged)
            self._failures.warning("damaged", message, self._binding.pool, count, pages=count)
            self._client.remove(self._names(damaged))

    def _log_failures(self, verb: str, codes: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        failed = [code for code, outcome in zip(codes, outcomes, strict=True) if outcome is Outcome.FAILED]
        if failed:
            reasons = {name_of(code): count for code, count in Counter(failed).items()}
            message, pool = "pool %s: %s of %d pages: %s", self._binding.pool
            kind, count = (verb, failed[0]), len(failed)
            self._failures.warning(kind, message, pool, verb, len(codes), reasons, pages=count)

    def __repr__(self) -> str:
        return f"<MooncakeEngine {self._binding.pool}: {len(self._running)} calls running>"


def _group_name(model: bytes, digest: bytes) -> str:
    """Two pages have the same by accident once in 10^26; they would be evicted together."""
    return urlsafe_b64encode(blake2b(digest, key=model).digest()).decode()[:_GROUP_LETTERS]


def distinct(keys: Sequence[ObjectKey]) -> list[list[int]]:
    """Split the indices of `keys` into groups without duplicate keys.

    If one call names several slots for a key, Mooncake fills only one of them but reports success for all.
    """
    groups: list[list[int]] = []
    seen: Counter[ObjectKey] = Counter()
    for place, key in enumerate(keys):
        if seen[key] == len(groups):
            groups.append([])
        groups[seen[key]].append(place)
        seen[key] += 1
    return groups
