"""Servers that tests of backends share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asynchicache.backends.mooncake import MooncakeOptions
from asynchicache.backends.mooncake.joining import join
from asynchicache.backends.mooncake.store import MooncakeStore
from storage.mooncake_cluster import Cluster, cluster, own_network


@pytest.fixture(scope="module")
def mooncake() -> Iterator[Cluster]:
    """A Mooncake cluster with one node, for tests that leave it alive."""
    with own_network(), cluster() as made:
        yield made


@pytest.fixture(scope="module")
def mooncake_store(mooncake: Cluster) -> Iterator[MooncakeStore]:
    """One client of that cluster for many tests: leaving takes it a second."""
    store = join(MooncakeOptions.of(mooncake.options()))
    yield store
    store.close()


@pytest.fixture(
    scope="session",
    params=["redis-server", pytest.param("valkey-server", marks=pytest.mark.engine("valkey"))],
)
def redis_program(request: pytest.FixtureRequest) -> str:
    """A server that speaks RESP; a test that asks for it meets each."""
    program: str = request.param
    return program
