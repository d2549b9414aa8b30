"""Interrupts a coroutine at a chosen suspension, to try all of them one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Interrupted(Generic[T]):
    """Awaits `work`, and calls `act` at its `at`-th suspension, counted from 1.

        for at in itertools.count(1):
            work = Interrupted(operation(), at, cancel_this_task)
            ...  # await it in a task, and look whether all is well
            if not work.struck:
                break  # the operation has no more suspensions than these

    Attributes:
        suspensions: how many there were.
        struck: whether `act` was called.
    """

    def __init__(
        self, work: Awaitable[T], at: int, act: Callable[[], object], *, answered: bool = False
    ) -> None:
        """
        Args:
            work: what is awaited, in a task.
            at: the suspension.
            act: `cancel_this_task`, or anything else.
            answered: act when what `work` waited for has come, just before it goes on; else as soon as it
                waits.
        """
        self.suspensions = 0
        self.struck = False
        self._work = work
        self._at = at
        self._act = act
        self._answered = answered

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        error: asyncio.CancelledError | None = None
        while True:
            try:
                waited = next(steps) if error is None else _throw(steps, error)
            except StopIteration as end:
                result: T = end.value
                return result
            self.suspensions += 1
            strikes = self.suspensions == self._at
            if strikes and not self._answered:
                self._strike()
            try:
                error = None
                yield waited
                if strikes and self._answered:
                    self._strike()
                    yield  # what was done reaches the task before it goes on
            except asyncio.CancelledError as cancelled:
                error = cancelled

    def _strike(self) -> None:
        self.struck = True
        self._act()


def _throw(steps: Generator[Any, Any, T], error: BaseException) -> object:
    if not hasattr(steps, "throw"):  # a future's iterator in C has one; others may not
        raise error
    return steps.throw(error)


def cancel_this_task() -> None:
    """Cancel the task that runs now: what it waits for next, or waits for already, ends with that."""
    task = asyncio.current_task()
    assert task is not None, "interrupts happen in tasks"
    task.cancel()
