"""A storage backend in its simplest form: a folder with one file for each page."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from toy import SPEC, Toy

from asynchicache import CacheConfig, HybridCache, Outcome
from asynchicache.hashing import DIGEST_BYTES, ObjectKey
from asynchicache.ports import AsyncioPort, Port
from asynchicache.storage.protocol import Capabilities, PoolBinding


class FolderEngine:
    """One pool. Each page is a file, named by its key: header, then page."""

    capabilities = Capabilities(durable=False, checks=False)  # so the core compares checksums

    def __init__(self, folder: Path, binding: PoolBinding, port: Port) -> None:
        self._folder = folder
        self._binding = binding
        self._port = port

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        paths = [self._folder / key.text() for key in keys]
        # Other threads than those of the pages: a question never waits for bytes.
        return await asyncio.to_thread(lambda: bytearray([path.exists() for path in paths]))

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._each(self._get, keys, slots)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._each(self._put, keys, slots)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return await self._each(self._delete, keys, range(len(keys)))

    async def clear(self) -> int:
        mine = self._binding
        any_page = ObjectKey(mine.fingerprint, bytes(DIGEST_BYTES), mine.pool, mine.shard)
        doomed = list(self._folder.glob(any_page.pattern()))
        await self._port.run_blocking(lambda: [path.unlink() for path in doomed])
        return len(doomed)

    async def aclose(self) -> None:
        """Nothing is held open."""

    async def _each(
        self, one: Callable[[ObjectKey, int], Outcome], keys: Sequence[ObjectKey], slots: Sequence[int]
    ) -> list[Outcome]:
        """All pages of a call in one hop to a thread."""
        return await self._port.run_blocking(lambda: [one(*pair) for pair in zip(keys, slots, strict=True)])

    def _get(self, key: ObjectKey, slot: int) -> Outcome:
        try:
            with (self._folder / key.text()).open("rb") as file:
                file.readinto(self._binding.header(slot))
                file.readinto(self._binding.page(slot))
        except FileNotFoundError:
            return Outcome.MISS
        return Outcome.HIT

    def _put(self, key: ObjectKey, slot: int) -> Outcome:
        path = self._folder / key.text()
        if path.exists():
            return Outcome.EXISTS
        self._binding.seal(slot, key)
        draft = self._folder / f"{uuid4()}.new"
        draft.write_bytes(b"".join((self._binding.header(slot), self._binding.page(slot))))
        draft.replace(path)  # visible only when whole
        return Outcome.STORED

    def _delete(self, key: ObjectKey, _: int) -> Outcome:
        path = self._folder / key.text()
        if not path.exists():
            return Outcome.MISS
        path.unlink()
        return Outcome.HIT


class FolderBackend:
    """All pools, in one folder."""

    name = "folder"

    def __init__(self, folder: Path, port: Port) -> None:
        self._folder = folder
        self._port = port
        self._engines: dict[PoolBinding, FolderEngine] = {}

    async def open_pool(self, binding: PoolBinding) -> FolderEngine:
        await self._port.run_blocking(partial(self._folder.mkdir, parents=True, exist_ok=True))
        return self._engines.setdefault(binding, FolderEngine(self._folder, binding, self._port))

    async def aclose(self) -> None:
        """Nothing is held open."""


def open_backend(options: Mapping[str, object], port: Port) -> FolderBackend:
    """What an entry point of the group `asynchicache.backends` names."""
    return FolderBackend(Path(str(options["path"])), port)


async def main() -> None:
    config = CacheConfig(device_slots={"kv": 16, "mamba": 4}, weight_version="1")
    with TemporaryDirectory() as folder:
        port = AsyncioPort()
        backend = open_backend({"path": folder}, port)
        for _ in range(2):
            async with HybridCache.open(SPEC, config, storage=backend) as cache:
                print(await Toy(cache).serve(range(22)))
        await backend.aclose()
        await port.aclose()


if __name__ == "__main__":
    asyncio.run(main())
