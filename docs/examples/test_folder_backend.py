"""Does the backend do what the core relies on? `python -m pytest test_folder_backend.py` says."""

from pathlib import Path

import pytest
from folder_backend import FolderBackend

from asynchicache.ports import Port
from asynchicache.testing.backends import BackendConformance


@pytest.mark.asyncio
class TestFolderBackend(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> FolderBackend:
        return FolderBackend(tmp_path / "pages", port)
