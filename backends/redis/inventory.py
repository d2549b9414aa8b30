"""All pools of one namespace of a server or a cluster. Safe beside caches: what they miss they write anew."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping

from msgspec import structs

from asynchicache.backends.redis.backend import SCAN_KEYS, RedisBackend
from asynchicache.backends.redis.engine import LABEL
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.wire import Wire
from asynchicache.errors import StorageError
from asynchicache.hashing import DIGEST_BYTES, NAMESPACE_BYTES
from asynchicache.ports import Port
from asynchicache.storage.binding import read_frame
from asynchicache.storage.labels import GoOn, PagesChecked, PoolLabel, PoolListing, read_label

_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class RedisInventory:
    """The pools of one namespace.

    Args:
        writes: whether something may be removed.
    """

    def __init__(self, options: RedisOptions, port: Port, *, writes: bool) -> None:
        self._options = options
        self._writes = writes and not options.read_only
        self._backend = RedisBackend(structs.replace(options, read_only=True), port)  # marks no namespace

    async def time(self) -> float:
        return await self._backend.time()

    async def faults(self) -> list[str]:
        return await self._backend.faults()

    async def pools(self) -> list[PoolListing]:
        await self._backend.check()
        pages: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        labels: dict[str, PoolLabel | None] = {}
        async for names, found in self._backend.steps(self._glob("*"), _survey):
            for folder, digest in map(self._parsed, names):
                if _DIGEST.fullmatch(digest):
                    pages[folder][bytes.fromhex(digest)[:NAMESPACE_BYTES]] += 1
            labels |= {self._parsed(name)[0]: label for name, label in found.items()}
        return [
            PoolListing.of(folder, pages[folder], labels.get(folder)) for folder in sorted({*pages, *labels})
        ]

    def _glob(self, text: str) -> str:
        return f"{self._options.namespace}:{text}"

    def _parsed(self, name: bytes) -> tuple[str, str]:
        """Of a key: its pool, and its digest or another last part."""
        folder, _, last = name.decode("ascii", "replace").partition(":")[2].rpartition(".")
        return folder, last

    async def label(self, pool: PoolListing) -> PoolLabel | None:
        async for _, found in self._backend.steps(self._glob(f"{pool.name}.{LABEL}"), _survey):
            if found:
                return next(iter(found.values()))
        return None

    async def remove(self, pool: PoolListing, namespace: bytes | None, go_on: GoOn) -> int:
        if not self._writes:
            raise StorageError(f"{self._options.server} is read-only")
        digest = (namespace or b"").hex().ljust(2 * DIGEST_BYTES, "?")
        removed, most = 0, await go_on(0)
        if not most:
            return removed
        glob = self._glob(f"{pool.name}.{digest}")
        async for count in self._backend.steps(glob, self._backend.unlink, min(most, SCAN_KEYS)):
            removed += count
            if count and not await go_on(count):
                return removed
        if namespace is None and await self.label(pool) == pool.label:
            async for _ in self._backend.steps(self._glob(f"{pool.name}.{LABEL}"), self._backend.unlink):
                pass
        return removed

    async def check(self, pool: PoolListing) -> AsyncIterator[PagesChecked]:
        glob = self._glob(f"{pool.name}.{'?' * 2 * DIGEST_BYTES}")
        async for checked in self._backend.steps(glob, _checked):
            yield checked

    async def aclose(self) -> None:
        await self._backend.aclose()


def _checked(wire: Wire, names: list[bytes]) -> PagesChecked:
    """Read pages one by one: many large ones would not fit into memory."""
    found = whole = nbytes = 0
    for name in names:
        (answer,) = wire.ask(("GET", name))
        if answer is None:  # somebody has deleted it meanwhile
            continue
        header = read_frame(answer) if isinstance(answer, bytes) else None
        found += 1
        nbytes += len(answer) if isinstance(answer, bytes) else 0
        whole += header is not None and name.endswith(header.key.text().encode())
    return PagesChecked(found, found - whole, nbytes)


def _survey(wire: Wire, names: list[bytes]) -> tuple[list[bytes], dict[bytes, PoolLabel | None]]:
    """Keys of one step, and the labels that are among them."""
    labels = [name for name in names if name.endswith(f".{LABEL}".encode())]
    answers = wire.ask(*(("GET", name) for name in labels)) if labels else []
    return names, {
        name: read_label(answer if isinstance(answer, bytes) else None)
        for name, answer in zip(labels, answers, strict=True)
    }


def open_inventory(options: Mapping[str, object], port: Port, *, writes: bool) -> RedisInventory:
    """
    Raises:
        ConfigError: an option does not fit.
    """
    return RedisInventory(RedisOptions.of(options), port, writes=writes)
