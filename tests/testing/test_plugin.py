"""The pytest plugin, as those who embed a cache use it, in runs of pytest of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from asynchicache import HybridCache
from asynchicache.errors import ConfigError
from asynchicache.streams.base import Device
from asynchicache.testing import plugin
from asynchicache.testing.checks import assert_clean
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.interrupts import Interrupted, cancel_this_task
from asynchicache.testing.kit import OpenSmallCache, RunSeeds
from asynchicache.testing.seeded import SeededWorld

pytest_plugins = ["pytester"]

PROMPT = list(range(20))
OPTIONS = ["-p", "asynchicache.testing.plugin", "-p", "no:cacheprovider", "-p", "no:asyncio"]


@pytest.mark.asyncio
async def test_a_small_cache_serves(small_cache: OpenSmallCache) -> None:
    async with small_cache() as cache:
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(20)
            await request.checkpoint(20)
        async with cache.request([*PROMPT, 1]) as request:
            assert request.hit.tokens == 20
    assert isinstance(cache, HybridCache)


@pytest.mark.asyncio
async def test_a_small_cache_has_the_options_of_any(small_cache: OpenSmallCache, fake_device: Device) -> None:
    async with small_cache(device=fake_device, device_slots={"kv": 7, "mamba": 3}) as cache:
        assert cache.statistics().occupancy["kv"][0].capacity == 7
        assert cache.device is fake_device


@pytest.mark.asyncio
async def test_a_small_cache_that_is_not_clean_fails(small_cache: OpenSmallCache) -> None:
    with pytest.raises(AssertionError, match="a request of 20 tokens is open"):
        async with small_cache() as cache:
            request = await cache.request(PROMPT).__aenter__()
    request.close()


@pytest.mark.asyncio
async def test_what_a_body_raises_comes_out_as_it_is(small_cache: OpenSmallCache) -> None:
    with pytest.raises(ZeroDivisionError):
        async with small_cache() as cache, cache.request(PROMPT):
            raise ZeroDivisionError


def test_runs_under_seeds(seeded_loop: RunSeeds, small_cache: OpenSmallCache, faulty_storage: Faulty) -> None:
    faulty_storage.rates = FaultRates(hang=1.0, calls=("put",))

    async def main(world: SeededWorld) -> int:
        options = {"port": world.port, "device": world.device(), "storage": faulty_storage}
        async with small_cache(**options, close_seconds=0.1) as cache:
            async with cache.request(PROMPT) as request:
                await request.load()
                request.extend(20)
                await request.checkpoint(20)
            while not faulty_storage.hanging:
                await world.sleep(1e-3)
            with pytest.raises(AssertionError, match="storage calls are in flight"):
                assert_clean(cache)
            faulty_storage.release()
            return world.seed

    assert seeded_loop(main, seeds=3) == [0, 1, 2]
    assert seeded_loop(main, seeds=[7]) == [7]
    assert faulty_storage.injected["hang"]


@pytest.mark.parametrize("seeds", [0, -1, [], 1.5, "a", "", True, None])
def test_a_run_of_no_seed_is_an_error(seeds: Any, seeded_loop: RunSeeds) -> None:
    async def main(world: SeededWorld) -> None:
        raise NotImplementedError

    with pytest.raises(ConfigError, match="seeds"):
        seeded_loop(main, seeds=seeds)


@pytest.mark.asyncio
@pytest.mark.parametrize("spec", [5, 0, "m"])
async def test_a_small_cache_of_no_model_is_an_error(spec: Any, small_cache: OpenSmallCache) -> None:
    with pytest.raises(ConfigError, match=f"spec={spec!r} must be a ModelSpec"):
        async with small_cache(spec):
            pass


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, -1, 1.5, "a"])
async def test_a_suspension_that_never_comes_is_an_error(at: Any) -> None:
    with pytest.raises(ConfigError, match="suspension at"):
        Interrupted(asyncio.Future(), at, cancel_this_task)


def test_a_failure_names_its_seed(seeded_loop: RunSeeds) -> None:
    async def main(world: SeededWorld) -> None:
        assert world.seed != 2

    with pytest.raises(AssertionError) as found:
        seeded_loop(main)
    assert found.value.__notes__ == ["seed 2 replays this run"]


# As pytest finds it


def test_the_entry_point_is_the_plugin() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    ((name, target),) = project["project"]["entry-points"]["pytest11"].items()

    assert name == target
    assert resolve_name(target) is plugin


def test_it_costs_next_to_nothing_until_it_is_used() -> None:
    script = "import sys, asynchicache.testing.plugin\nprint(sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert "'asynchicache.testing.plugin'" in found
    for heavy in ("torch", "numpy", "msgspec", "asynchicache.cache"):
        assert f"'{heavy}'" not in found


def test_the_fixtures_are_listed_with_what_they_are(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(*OPTIONS, "--fixtures", "-v")

    for name in ("small_cache", "seeded_loop", "faulty_storage", "fake_device"):
        result.stdout.re_match_lines([f"{name} -- .*testing/plugin.py.*"])


def test_a_test_of_somebody_else(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from asynchicache.testing.checks import assert_clean

        def test_mine(seeded_loop, small_cache):
            async def main(world):
                async with small_cache(port=world.port, device=world.device()) as cache:
                    assert_clean(cache)
                return world.seed
            assert seeded_loop(main, seeds=2) == [0, 1]
        """
    )

    pytester.runpytest_inprocess(*OPTIONS).assert_outcomes(passed=1)
