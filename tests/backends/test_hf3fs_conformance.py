"""The 3FS engine on both data paths, bare and behind wrappers, with names in SQLite and in Redis."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from uuid import uuid4

import pytest

from asynchicache.backends.hf3fs import open_backend
from asynchicache.layouts import ALIGNMENT, HEADER_BYTES, round_up
from asynchicache.ports import Port
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.backends import BackendConformance, PoolUnderTest
from asynchicache.testing.faults import FaultRates, Faulty, Latency, Persistent
from storage.hf3fs_names import names_server
from storage.usrbio_standin import Usrbio


@pytest.fixture(scope="module", params=["sqlite", pytest.param("redis", marks=pytest.mark.engine("redis"))])
def names(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("metadata")
    if request.param == "sqlite":
        yield str(folder)
    else:
        with names_server(folder) as server:
            yield server.url


class Served(BackendConformance):
    """Every test has weights of its own, so that all can share one store of names."""

    bounded = True

    @pytest.fixture(autouse=True)
    def _served(self, names: str) -> None:
        self.url = names
        self.salt = uuid4().hex

    async def open(
        self, backend: StorageBackend, pool: str = "kv", *, weights: str = "w1", shard: str = ""
    ) -> PoolUnderTest:
        return await super().open(backend, pool, weights=f"{weights} {self.salt}", shard=shard)

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return self.plain(port, tmp_path)

    async def make_bounded(self, port: Port, tmp_path: Path, pages: int) -> StorageBackend:
        frame_bytes = HEADER_BYTES + round_up(self.page_bytes, ALIGNMENT)
        return self.plain(port, tmp_path, capacity_bytes=pages * frame_bytes)

    def plain(self, port: Port, tmp_path: Path, **more: object) -> StorageBackend:
        options = {
            "path": tmp_path / "mount" / "pages",
            "metadata": self.url,
            "capacity_bytes": 1 << 20,
            "metadata_seconds": 60,
        }
        return open_backend({**options, **more}, port)


class ServedByRings(Served):
    """With the stand-in for `hf3fs_fuse.io`, which breaks no rule but bends all."""

    @pytest.fixture(autouse=True)
    def _rings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        (tmp_path / "mount").mkdir()
        usrbio = Usrbio(tmp_path / "mount")
        monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", usrbio.module())
        yield
        assert usrbio.faults == []
        assert usrbio.registered == {}

    def plain(self, port: Port, tmp_path: Path, **more: object) -> StorageBackend:
        return super().plain(port, tmp_path, **{"io": "usrbio", "entries": 4, **more})


@pytest.mark.asyncio
class TestPosix(Served):
    pass


@pytest.mark.soak
@pytest.mark.asyncio
class TestPosixThroughTheKernelsCache(Served):
    page_bytes = 1

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return self.plain(port, tmp_path, direct=False)


@pytest.mark.soak
@pytest.mark.asyncio
class TestSlowPosix(Served):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Latency(self.plain(port, tmp_path), 0.001, page=0.0001)


@pytest.mark.asyncio
class TestPosixWithoutFaults(Served):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Faulty(self.plain(port, tmp_path), FaultRates(), Random(0))


@pytest.mark.asyncio
class TestUsrbio(ServedByRings):
    pass


@pytest.mark.soak
@pytest.mark.asyncio
class TestUsrbioOneFrameAtATime(ServedByRings):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return self.plain(port, tmp_path, buffer_bytes=1, workers=1)


@pytest.mark.soak
@pytest.mark.asyncio
class TestSlowUsrbio(ServedByRings):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Latency(self.plain(port, tmp_path), 0.001, page=0.0001)


@pytest.mark.asyncio
class TestUsrbioWithoutFaults(ServedByRings):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Faulty(self.plain(port, tmp_path), FaultRates(), Random(0))


@pytest.mark.soak
@pytest.mark.asyncio
class TestUsrbioInParts(ServedByRings):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Persistent(Faulty(self.plain(port, tmp_path), FaultRates(partial=0.3), Random(0)))
