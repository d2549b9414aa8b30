"""The pytest plugin: fixtures for applications that embed a cache. Pytest finds it by its entry point.

Every pytest run loads the plugin where this package is installed. So the module imports nothing heavy;
each fixture imports its dependencies on first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from asynchicache.streams.emulated import EmulatedDevice
    from asynchicache.testing.faults import Faulty
    from asynchicache.testing.kit import OpenSmallCache, RunSeeds

_KIT = "asynchicache.testing.kit"


@pytest.fixture
def small_cache() -> OpenSmallCache:
    """Open small caches: `async with small_cache() as cache`; see `kit.open_small_cache`."""
    opener: OpenSmallCache = resolve_name(f"{_KIT}:open_small_cache")
    return opener


@pytest.fixture
def seeded_loop() -> RunSeeds:
    """Run `main(world)` in virtual time under several seeds: `seeded_loop(main)`; see `kit.run_seeds`."""
    run: RunSeeds = resolve_name(f"{_KIT}:run_seeds")
    return run


@pytest.fixture
def faulty_storage() -> Iterator[Faulty]:
    """In-memory storage with injected faults. Initially there are none; replace `rates` at any time. The end
    of the test releases hanging calls."""
    storage: Faulty = resolve_name(f"{_KIT}:make_faulty_storage")()
    yield storage
    storage.release()


@pytest.fixture
def fake_device() -> Iterator[EmulatedDevice]:
    """An emulated device with streams and events; it runs work immediately."""
    device: EmulatedDevice = resolve_name(f"{_KIT}:make_fake_device")()
    yield device
    device.close()
