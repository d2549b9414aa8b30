"""All pools of a folder on 3FS. Safe beside caches: what they miss they write anew."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from asynchicache.backends.hf3fs.backend import names_of, namespace_name
from asynchicache.backends.hf3fs.folder import LABEL, PAGES, check_folder, claim_folder
from asynchicache.backends.hf3fs.metadata.namespace import MetadataNamespace
from asynchicache.backends.hf3fs.metadata.words import SlotVersion
from asynchicache.backends.hf3fs.options import Hf3fsOptions
from asynchicache.errors import StorageError
from asynchicache.hashing import NAMESPACE_BYTES
from asynchicache.layouts import ALIGNMENT, HEADER_BYTES, round_up
from asynchicache.ports import Port
from asynchicache.storage.binding import read_frame, read_header
from asynchicache.storage.labels import GoOn, PagesChecked, PoolLabel, PoolListing, read_label

_STEP = 128
"""Pages of one call."""
_ALL = 1 << 40


class Hf3fsInventory:
    """The pools of one folder.

    Args:
        options: the folder, and where its names are.
        writes: whether something may be removed.

    Raises:
        StorageError: there is no such folder, or it is no store.
    """

    def __init__(self, options: Hf3fsOptions, port: Port, *, writes: bool) -> None:
        if not options.path.is_dir():
            raise StorageError(f"{options.path} does not exist")
        check_folder(options.path)
        self._folder = options.path
        self._port = port
        self._writes = writes
        self._names = names_of(options, port)

    async def time(self) -> float:
        return await self._names.time()

    async def pools(self) -> list[PoolListing]:
        await self._names.time()  # that nothing is there is said of names that answer only
        return [
            found for path in sorted(self._folder.glob(f"*{PAGES}")) if (found := await self._listing(path))
        ]

    async def _listing(self, path: Path) -> PoolListing | None:
        """A pool; None for one that has neither pages nor a label."""
        name = path.name.removesuffix(PAGES)
        label = self._read_label(name)
        keys = await self._keys(name)
        if label is None and not keys:
            return None
        pages = Counter(bytes.fromhex(key)[:NAMESPACE_BYTES] for key in keys)
        frame_bytes = self._frame_bytes(name)
        nbytes = None if frame_bytes is None else len(keys) * frame_bytes
        return PoolListing.of(name, dict(pages), label)._replace(nbytes=nbytes)

    async def _opened(self, name: str) -> MetadataNamespace | None:
        """The names of a pool; None if nothing was ever written."""
        frame_bytes = await self._port.run_blocking(partial(self._frame_bytes, name))
        if frame_bytes is None:
            return None
        opened = await self._names.open(name, 1, frame_bytes)
        await self._port.run_blocking(partial(claim_folder, self._folder, opened.store))
        return MetadataNamespace(self._names, opened, name, frame_bytes)

    async def _keys(self, name: str) -> list[str]:
        """The digests of a pool's pages in hex, the first to be evicted first."""
        namespace = await self._opened(name)
        return [] if namespace is None else await namespace.leaving(_ALL)

    def _frame_bytes(self, name: str) -> int | None:
        """Bytes of a slot, as the first page says: slots are used from the first one on."""
        try:
            with (self._folder / f"{name}{PAGES}").open("rb") as file:
                header = read_header(file.read(HEADER_BYTES))
        except OSError as error:
            raise StorageError(f"{self._folder / name}{PAGES} cannot be read: {error.strerror}") from error
        label = self._read_label(name)
        source = header or label
        return None if source is None else HEADER_BYTES + round_up(source.page_bytes, ALIGNMENT)

    def _read_label(self, name: str) -> PoolLabel | None:
        try:
            return read_label((self._folder / f"{name}{LABEL}").read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self._folder / name}{LABEL} cannot be read: {error.strerror}") from error

    async def label(self, pool: PoolListing) -> PoolLabel | None:
        return self._read_label(pool.name)

    async def remove(self, pool: PoolListing, namespace: bytes | None, go_on: GoOn) -> int:
        if not self._writes:
            raise StorageError(f"{self._folder} is opened to be read")
        names = await self._opened(pool.name)
        going = [] if names is None else await names.leaving(_ALL)
        going = [key for key in going if key.startswith((namespace or b"").hex())]
        removed, most = 0, await go_on(0)
        while most and going:
            assert names is not None
            some, going = going[: min(_STEP, most)], going[min(_STEP, most) :]
            removed += sum(await names.delete(some))
            most = await go_on(len(some))
        if most and namespace is None and self._read_label(pool.name) == pool.label:
            (self._folder / f"{pool.name}{LABEL}").unlink(missing_ok=True)
            if pool.state(time.time()) == "expired":  # else somebody may have it open
                (self._folder / f"{pool.name}{PAGES}").unlink(missing_ok=True)
        return removed

    async def check(self, pool: PoolListing) -> AsyncIterator[PagesChecked]:
        names = await self._opened(pool.name)
        keys = [] if names is None else await names.leaving(_ALL)
        for start in range(0, len(keys), _STEP):
            assert names is not None
            some = keys[start : start + _STEP][::-1]  # so that the order of their use stays
            located = await names.locate(some)
            there = [(key, place) for key, place in zip(some, located.places, strict=True) if place]
            try:
                yield await self._port.run_blocking(partial(self._checked, pool.name, there))
            finally:
                names.end_read(located)

    def _checked(self, name: str, pages: Sequence[tuple[str, SlotVersion]]) -> PagesChecked:
        frame_bytes, whole = self._frame_bytes(name) or 0, 0
        with (self._folder / f"{name}{PAGES}").open("rb") as file:
            for key, place in pages:
                file.seek(place.slot * frame_bytes)
                data = file.read(frame_bytes)
                found = read_header(data)
                header = found and read_frame(data[: HEADER_BYTES + found.page_bytes])
                whole += (
                    header is not None
                    and namespace_name(header.key) == name
                    and header.key.digest.hex() == key
                )
        return PagesChecked(len(pages), len(pages) - whole, len(pages) * frame_bytes)

    async def aclose(self) -> None:
        await self._names.aclose()


def open_inventory(options: Mapping[str, object], port: Port, *, writes: bool) -> Hf3fsInventory:
    """
    Raises:
        ConfigError: an option does not fit.
        StorageError: there is no such folder, or it is no store.
    """
    return Hf3fsInventory(Hf3fsOptions.of(options), port, writes=writes)
