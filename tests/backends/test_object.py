"""Object stores against the conformance tests: a folder, memory, and S3 spoken to a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynchicache.backends.object import open_backend
from asynchicache.ports import Port
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.backends import BackendConformance


@pytest.mark.asyncio
class TestFolder(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend({"url": f"file://{tmp_path}/pages"}, port)


@pytest.mark.asyncio
class TestFolderWithIndex(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend({"url": f"file://{tmp_path}/pages", "index": True}, port)


@pytest.mark.asyncio
class TestMemoryStore(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend({"url": "memory:///"}, port)
