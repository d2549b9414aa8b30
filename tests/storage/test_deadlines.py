"""Calls that are made at once: what they return or raise, and what an engine may not do."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache.errors import StorageError
from asynchicache.storage.deadlines import run_immediate


async def raising(error: BaseException) -> None:
    raise error


async def answer() -> int:
    return 7


def test_an_answer_is_returned() -> None:
    assert run_immediate(answer()) == 7


@pytest.mark.parametrize("kind", [ValueError, StorageError, KeyboardInterrupt, SystemExit])
def test_errors_and_what_ends_the_program_are_raised_as_they_are(kind: type[BaseException]) -> None:
    error = kind("planted")

    with pytest.raises(kind) as caught:
        run_immediate(raising(error))

    assert caught.value is error


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit, BaseException])
def test_what_is_no_exception_is_an_error_of_the_engine(kind: type[BaseException]) -> None:
    with pytest.raises(StorageError, match=r"the engine raised .*planted"):
        run_immediate(raising(kind("planted")))


def test_a_call_that_suspends_has_failed_and_is_closed() -> None:
    closed = []

    async def suspending() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            closed.append(True)

    with pytest.raises(StorageError, match="`immediate`, and a call of it suspended"):
        run_immediate(suspending())
    assert closed
