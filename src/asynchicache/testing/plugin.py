"""The pytest plugin: fixtures for the tests of those who embed a cache; found by its entry point.

Every run of pytest loads it where this package is installed, so it imports nothing: what a fixture needs
comes with the fixture's first use.
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
    """Opens small caches: `async with small_cache() as cache`; see `kit.open_small_cache`."""
    opener: OpenSmallCache = resolve_name(f"{_KIT}:open_small_cache")
    return opener


@pytest.fixture
def seeded_loop() -> RunSeeds:
    """Runs `main(world)` in virtual time under some seeds: `seeded_loop(main)`; see `kit.run_seeds`."""
    run: RunSeeds = resolve_name(f"{_KIT}:run_seeds")
    return run


@pytest.fixture
def faulty_storage() -> Iterator[Faulty]:
    """Storage in memory that fails as its `rates` say, which may be replaced at any time; at first it does
    not. What hangs is let go when the test ends."""
    storage: Faulty = resolve_name(f"{_KIT}:make_faulty_storage")()
    yield storage
    storage.release()


@pytest.fixture
def fake_device() -> Iterator[EmulatedDevice]:
    """A device without hardware, with streams and events of its own; it runs at once what it is given."""
    device: EmulatedDevice = resolve_name(f"{_KIT}:make_fake_device")()
    yield device
    device.close()
