"""Interrupt a coroutine at a chosen suspension, so that a test can try each in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

from asynchicache.errors import ConfigError
from asynchicache.types import check_number

T = TypeVar("T")


class Interrupted(Generic[T]):
    """Awaits `work`, and calls `act` at its `at`-th suspension, counted from 1.

        for at in itertools.count(1):
            work = Interrupted(operation(), at, cancel_this_task)
            ...  # await it in a task, and look whether all is well
            if not work.struck:
                break  # the operation has no more suspensions than these

    Attributes:
        suspensions: number of suspensions so far.
        struck: whether `act` was called.
    """

    def __init__(
        self, work: Awaitable[T], at: int, act: Callable[[], object], *, answered: bool = False
    ) -> None:
        """
        Args:
            work: the awaitable to run, in a task.
            at: the suspension at which to act.
            act: `cancel_this_task` or another callable.
            answered: act after the awaited result has arrived, just before `work` resumes; otherwise as
                soon as `work` suspends.

        Raises:
            ConfigError: `at` is not a number above 0: it would never come.
        """
        check_number("suspension at", at)
        if at < 1:
            raise ConfigError(f"suspension at={at} never comes: they are counted from 1")
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
            is_due = self.suspensions == self._at
            if is_due and not self._answered:
                self._act_now()
            try:
                error = None
                yield waited
                if is_due and self._answered:
                    self._act_now()
                    yield  # lets the effect of `act` reach the task before it resumes
            except asyncio.CancelledError as cancelled:
                error = cancelled

    def _act_now(self) -> None:
        self.struck = True
        self._act()


def _throw(steps: Generator[Any, Any, T], error: BaseException) -> object:
    if not hasattr(steps, "throw"):  # not every awaitable's iterator has it
        raise error
    return steps.throw(error)


def cancel_this_task() -> None:
    """Cancel the current task: its current or next await raises CancelledError."""
    task = asyncio.current_task()
    assert task is not None, "interrupts happen in tasks"
    task.cancel()
