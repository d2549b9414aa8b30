"""All pools of one namespace of a cluster. Safe beside caches: what they miss they write anew.

Mooncake's client lists nothing; the master's port for metrics lists the names of all objects.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from email.utils import parsedate_to_datetime
from functools import partial

from msgspec import structs

from asynchicache.backends.mooncake.backend import MooncakeBackend
from asynchicache.backends.mooncake.engine import LABEL, LABEL_BYTES
from asynchicache.backends.mooncake.options import DEFAULT_TENANT, MooncakeOptions
from asynchicache.backends.mooncake.store import MooncakeClient
from asynchicache.errors import StorageError
from asynchicache.hashing import DIGEST_BYTES, NAMESPACE_BYTES
from asynchicache.ports import Port
from asynchicache.storage.binding import read_frame
from asynchicache.storage.labels import GoOn, PagesChecked, PoolLabel, PoolListing, read_label

_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_STEP = 1000
"""Pages that one call removes."""


class MooncakeInventory:
    """The pools of one namespace.

    Args:
        writes: whether something may be removed.

    Raises:
        StorageError: the pages are those of a tenant, whose names no master lists.
    """

    def __init__(self, options: MooncakeOptions, port: Port, *, writes: bool) -> None:
        if options.tenant != DEFAULT_TENANT:
            raise StorageError(f"masters do not list what tenants have, so not that of {options.tenant!r}")
        self._options = options
        self._port = port
        self._writes = writes
        self._time = time.time()
        self._backend = MooncakeBackend(structs.replace(options, segment_bytes=0))

    async def pools(self) -> list[PoolListing]:
        pages, labels = await self._port.run_blocking(self._survey)
        client = await self._backend.client() if labels else None
        found = []
        for folder in sorted({*pages, *labels}):
            label = await self._read_label(client, folder) if client and folder in labels else None
            found.append(PoolListing.of(folder, pages[folder], label))
        return found

    async def time(self) -> float:
        """When the master was asked last, by its clock."""
        return self._time

    def _survey(self) -> tuple[Mapping[str, Counter[bytes]], set[str]]:
        pages: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        labels = set()
        for folder, last in self._names():
            if _DIGEST.fullmatch(last):
                pages[folder][bytes.fromhex(last)[:NAMESPACE_BYTES]] += 1
            elif last == LABEL:
                labels.add(folder)
        return pages, labels

    def _names(self) -> Iterator[tuple[str, str]]:
        """The folder and the last part of each name of the namespace."""
        options = self._options
        ours, url = f"{options.namespace}:", f"http://{options.admin_address}/get_all_keys"
        try:
            with urllib.request.urlopen(url, timeout=options.open_seconds) as answer:
                said = answer.headers["Date"]
                self._time = parsedate_to_datetime(said).timestamp() if said else time.time()
                for line in answer:
                    name = line.decode("ascii", "replace").strip()
                    if name.startswith(ours):
                        folder, _, last = name.removeprefix(ours).rpartition(".")
                        yield folder, last
        except (OSError, ValueError) as error:
            raise StorageError(
                f"{url} lists no names: {error}; option admin must be host:port of the --metrics_port of the "
                "master that leads"
            ) from error

    async def label(self, pool: PoolListing) -> PoolLabel | None:
        return await self._read_label(await self._backend.client(), pool.name)

    async def _read_label(self, client: MooncakeClient, folder: str) -> PoolLabel | None:
        name = f"{self._options.namespace}:{folder}.{LABEL}"

        def read() -> bytes | None:
            with client.memory(LABEL_BYTES) as memory:
                return client.read(name, memory)

        return read_label(await self._port.run_blocking(read))

    async def remove(self, pool: PoolListing, namespace: bytes | None, go_on: GoOn) -> int:
        if not self._writes:
            raise StorageError(f"{self._options.master} is opened to be read")
        client, going = await self._backend.client(), await self._pages(pool, namespace or b"")
        removed, most = 0, await go_on(0)
        while most and going:
            names, going = going[: min(_STEP, most)], going[min(_STEP, most) :]
            codes = await self._port.run_blocking(partial(client.remove, names))
            removed += codes.count(0)
            most = await go_on(len(names))
        if most and namespace is None and await self.label(pool) == pool.label:
            label = f"{self._options.namespace}:{pool.name}.{LABEL}"
            await self._port.run_blocking(partial(client.remove, [label]))
        return removed

    async def _pages(self, pool: PoolListing, namespace: bytes = b"") -> list[str]:
        """The names of a pool's pages."""

        def find() -> list[str]:
            return [
                f"{self._options.namespace}:{folder}.{last}"
                for folder, last in self._names()
                if folder == pool.name and _DIGEST.fullmatch(last) and last.startswith(namespace.hex())
            ]

        return await self._port.run_blocking(find)

    async def check(self, pool: PoolListing) -> AsyncIterator[PagesChecked]:
        client = await self._backend.client()
        for name in await self._pages(pool):
            yield await self._port.run_blocking(partial(_checked, client, name))

    async def aclose(self) -> None:
        await self._backend.aclose()


def _checked(client: MooncakeClient, name: str) -> PagesChecked:
    size = client.store.get_size(name)
    if size <= 0:  # it has been evicted
        return PagesChecked(0, 0, 0)
    with client.memory(size) as memory:
        data = client.read(name, memory)
    if data is None:
        return PagesChecked(0, 0, 0)
    header = read_frame(data)
    whole = header is not None and name.endswith(f":{header.key.text()}")
    return PagesChecked(1, 1 - whole, size)


def open_inventory(options: Mapping[str, object], port: Port, *, writes: bool) -> MooncakeInventory:
    """
    Raises:
        ConfigError: an option does not fit.
        StorageError: the pages cannot be listed.
    """
    return MooncakeInventory(MooncakeOptions.of(options), port, writes=writes)
