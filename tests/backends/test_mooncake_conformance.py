"""The Mooncake engine on a real cluster, bare and behind wrappers, against the conformance tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from asynchicache.backends.mooncake import MooncakeBackend, MooncakeOptions
from asynchicache.backends.mooncake.store import MooncakeStore
from asynchicache.ports import Port
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.backends import BackendConformance
from asynchicache.testing.faults import FaultRates, Faulty, Latency, Persistent
from storage.mooncake_cluster import Cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.engine("mooncake")]


class MooncakeConformance(BackendConformance):
    @pytest.fixture(autouse=True)
    def _join(self, mooncake: Cluster, mooncake_store: MooncakeStore) -> None:
        self.open_mooncake: Callable[[Port, Path], MooncakeBackend] = lambda port, folder: MooncakeBackend(
            # What one test put, others must not find; a folder of pytest's belongs to one test.
            MooncakeOptions.of(mooncake.options(namespace=f"{type(self).__name__}.{folder.name}"[:64])),
            mooncake_store,
        )


class TestMooncake(MooncakeConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return self.open_mooncake(port, tmp_path)


class TestMooncakeWithPagesInPieces(MooncakeConformance):
    page_bytes = 600_001

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return self.open_mooncake(port, tmp_path)


@pytest.mark.soak
class TestSlowMooncake(MooncakeConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Latency(self.open_mooncake(port, tmp_path), 0.001, page=0.0001)


class TestMooncakeWithoutFaults(MooncakeConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Faulty(self.open_mooncake(port, tmp_path), FaultRates(), Random(0))


@pytest.mark.soak
class TestMooncakeInParts(MooncakeConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Persistent(Faulty(self.open_mooncake(port, tmp_path), FaultRates(partial=0.3), Random(0)))
