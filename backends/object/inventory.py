"""All pools below one URL of an object store. Safe beside caches: what they miss they write anew."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from functools import partial

import obstore
from msgspec import structs

from asynchicache.backends.object.backend import ObjectBackend
from asynchicache.backends.object.objects import LABEL, StoredObject, is_claim, page_id
from asynchicache.backends.object.options import ObjectOptions
from asynchicache.backends.object.stores import FAILURES, advice, delete_all, make_store, summary
from asynchicache.errors import StorageError
from asynchicache.hashing import NAMESPACE_BYTES
from asynchicache.ports import Port
from asynchicache.storage.binding import read_frame
from asynchicache.storage.labels import GoOn, PagesChecked, PoolLabel, PoolListing, read_label

_CHUNK = 1000
"""Objects of one listing or deletion, the most that S3 takes."""


class ObjectInventory:
    """The pools below one URL.

    Args:
        options: the store.
        port: threads.
        writes: whether something may be removed.
    """

    def __init__(self, options: ObjectOptions, port: Port, *, writes: bool) -> None:
        self._options = options
        self._port = port
        self._backend = ObjectBackend(structs.replace(options, read_only=True), port)  # marks no prefix
        self._store = make_store(options)
        self._writes = writes and not options.read_only
        self._claims: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)  # and when they were made

    async def pools(self) -> list[PoolListing]:
        await self._backend.check()
        pages: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        sizes: Counter[str] = Counter()
        labels = set()
        self._claims.clear()
        async for path, size, made in self._listed(""):
            folder, _, name = path.partition("/")
            stored = StoredObject.of(folder, path, size)
            if stored is not None:
                pages[folder][_namespace(stored)] += stored.pages
                sizes[folder] += size
            elif name == LABEL:
                labels.add(folder)
            elif is_claim(folder, path):
                self._claims[folder].append((path, made))
        found = []
        for folder in sorted({*pages, *labels}):
            fingerprint, _, rest = folder.partition(".")
            pool, _, shard = rest.partition(".")
            listing = PoolListing(folder, pool, shard, fingerprint, dict(pages[folder]), sizes[folder])
            label = await self.label(listing) if folder in labels else None
            found.append(listing._replace(label=label))
        return found

    async def time(self) -> float:
        """By the mark of the format, which is stored anew: only those who remove something need to know."""
        if not self._writes:
            return time.time()
        try:
            return await self._backend.renew_format()
        except FileNotFoundError:  # nothing is marked, so nothing is there
            return time.time()
        except FAILURES as error:
            raise StorageError(f"{self._options.url} cannot be used: {advice(error)}") from error

    async def _listed(self, prefix: str) -> AsyncIterator[tuple[str, int, float]]:
        """The path and size of each object, and the store's Unix time when it was stored."""
        try:
            async for found in obstore.list(self._store, prefix=prefix or None, chunk_size=_CHUNK):
                for entry in found:
                    yield entry["path"], entry["size"], entry["last_modified"].timestamp()
        except FAILURES as error:
            raise StorageError(f"{self._options.url} cannot be listed: {advice(error)}") from error

    async def label(self, pool: PoolListing) -> PoolLabel | None:
        try:
            answer = await obstore.get_async(self._store, f"{pool.name}/{LABEL}")
            return read_label(bytes(await answer.bytes_async()))
        except FileNotFoundError:
            return None
        except FAILURES as error:
            raise StorageError(f"{self._options.url}: {summary(error)}") from error

    async def remove(self, pool: PoolListing, namespace: bytes | None, go_on: GoOn) -> int:
        if not self._writes:
            raise StorageError(f"{self._options.url} is read-only")
        going, claims = list[StoredObject](), list[str]()
        async for path, size, _ in self._listed(pool.name):
            stored = StoredObject.of(pool.name, path, size)
            if stored is not None and namespace in (None, _namespace(stored)):
                going.append(stored)
            elif is_claim(pool.name, path) and path.startswith(f"{pool.name}/{(namespace or b'').hex()}"):
                claims.append(path)
        removed, most = 0, await go_on(0)
        while most and going:
            objects, going = _divided(going, most)
            pages = sum(stored.pages for stored in objects)
            await self._delete([stored.path for stored in objects])
            removed += pages
            most = await go_on(pages)
        if claims and most:
            await self._delete(claims)
        if most and namespace is None and pool.label is not None and await self.label(pool) == pool.label:
            await self._delete([f"{pool.name}/{LABEL}"])
        return removed

    async def tidy(self, pool: PoolListing, before: float) -> None:
        old = [path for path, made in self._claims[pool.name] if made < before]
        if self._writes and old:
            await self._delete(old)

    async def check(self, pool: PoolListing) -> AsyncIterator[PagesChecked]:
        async for path, size, _ in self._listed(pool.name):
            stored = StoredObject.of(pool.name, path, size)
            if stored is None:
                continue
            try:
                answer = await obstore.get_async(self._store, path)
                data = memoryview(await answer.bytes_async())
            except FileNotFoundError:  # somebody has deleted it meanwhile
                continue
            except FAILURES as error:
                raise StorageError(f"{self._options.url}: {summary(error)}") from error
            whole = await self._port.run_blocking(partial(_whole, stored, bytes(data)))
            yield PagesChecked(stored.pages, stored.pages - whole, size)

    async def _delete(self, names: list[str]) -> None:
        try:
            await delete_all(self._store, names)
        except FAILURES as error:
            raise StorageError(f"{self._options.url}: not removed: {summary(error)}") from error

    async def aclose(self) -> None:
        await self._backend.aclose()


def _whole(stored: StoredObject, data: bytes) -> int:
    """How many pages of an object are what its name and their checksums say."""
    frame, extra = divmod(len(data), stored.pages)
    if extra:
        return 0
    parts = (data[at : at + frame] for at in range(0, len(data), frame or 1))
    headers = map(read_frame, parts)
    named = (one for _, _, one in stored.each())
    return sum(
        found is not None and page_id(found.key.digest) == one
        for found, one in zip(headers, named, strict=False)
    )


def _namespace(stored: StoredObject) -> bytes:
    """The namespace of an object's pages."""
    return bytes.fromhex(stored.group[: 2 * NAMESPACE_BYTES])


def _divided(objects: list[StoredObject], most: int) -> tuple[list[StoredObject], list[StoredObject]]:
    """Objects to delete in one request, at least one, of that many pages at most; and the rest."""
    pages = count = 0
    for stored in objects[:_CHUNK]:
        pages += stored.pages
        if count and pages > most:
            break
        count += 1
    return objects[:count], objects[count:]


def open_inventory(options: Mapping[str, object], port: Port, *, writes: bool) -> ObjectInventory:
    """
    Raises:
        ConfigError: an option does not fit.
        StorageError: the URL cannot be used.
    """
    return ObjectInventory(ObjectOptions.of(options), port, writes=writes)
