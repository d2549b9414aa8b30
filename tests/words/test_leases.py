"""A lease gives back once, whatever happens to it."""

from __future__ import annotations

import pytest

from asynchicache.errors import LeaseWarning
from asynchicache.leases import Lease


@pytest.fixture
def given() -> list[str]:
    return []


@pytest.fixture
def lease(given) -> Lease:
    return Lease(lambda: given.append("back"))


def test_closing_twice_gives_back_once(lease, given):
    assert not lease.closed

    lease.close()
    lease.close()

    assert lease.closed
    assert given == ["back"]


def test_a_block_closes_it(lease, given):
    with lease as entered:
        assert entered is lease
        assert given == []

    assert given == ["back"]


def test_a_block_that_fails_closes_it(lease, given):
    with pytest.raises(ZeroDivisionError), lease:
        raise ZeroDivisionError

    assert given == ["back"]


def test_closing_inside_a_block_is_fine(lease, given):
    with lease:
        lease.close()

    assert given == ["back"]


def test_losing_it_warns_and_gives_back(given):
    lost = Lease(lambda: given.append("back"))

    with pytest.warns(LeaseWarning, match="a lease was lost, not closed"):
        del lost

    assert given == ["back"]


def test_losing_it_gives_back_even_if_warnings_are_errors(given, recwarn, monkeypatch):
    unraisable = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    lost = Lease(lambda: given.append("back"))

    del lost  # warnings are errors in this suite

    assert given == ["back"]


def test_losing_a_closed_one_is_fine(lease, given, recwarn):
    lease.close()

    del lease

    assert given == ["back"]
    assert not recwarn


def test_a_release_that_fails_is_not_tried_again():
    tries = []

    def release() -> None:
        tries.append(1)
        raise ZeroDivisionError

    lease = Lease(release)
    with pytest.raises(ZeroDivisionError):
        lease.close()
    lease.close()

    assert len(tries) == 1
