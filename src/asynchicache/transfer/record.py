"""A transfer in flight: which of its layer groups are enqueued, which have landed, whom to tell.

The record belongs to the engine and outlives everyone who waits. Flags that are read by other
threads (`submitted`, `finished`) are written once, after what they speak of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from asynchicache.streams.base import Event
from asynchicache.transfer.plan import CacheOperation, Direction, TransferPlan

Done: TypeAlias = Callable[[BaseException | None], None]
"""Called on the loop, once, when the bytes of an operation have landed, or with the error."""

logger = logging.getLogger(__name__)


class LayerStatus(Enum):
    """How far the bytes of one layer are."""

    PENDING = "pending"  # not enqueued yet: there is nothing that a stream could wait for
    SUBMITTED = "submitted"  # enqueued: a fence orders a stream behind them
    COMPLETE = "complete"  # landed, and the host knows
    FAILED = "failed"  # they will not come; fences let through


class GroupState:
    """One layer group of a transfer."""

    __slots__ = ("error", "event", "finished", "landed", "submitted")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.landed = asyncio.Event()
        self.submitted = False
        self.finished = False
        self.error: BaseException | None = None

    @property
    def status(self) -> LayerStatus:
        if self.finished:
            return LayerStatus.COMPLETE if self.error is None else LayerStatus.FAILED
        return LayerStatus.SUBMITTED if self.submitted else LayerStatus.PENDING


class _Member(NamedTuple):
    operation: CacheOperation
    done: Done


class TransferRecord:
    """Operations of one direction that are carried out as one.

    Attributes:
        number: ascending in the order of submission.
        direction: theirs.
        after: events of the caller's that the copies wait for.
        needs: transfers that write what this one reads.
        follows: transfers that use what this one writes.
        plan: what the operations came to; None while others may still join.
        groups: one state for each group of the plan.
        last_event: stands for all that was enqueued so far; None before anything was.
        error: why it could not be enqueued; set by the enqueuing thread.
        failure: why some of it will not land; set on the loop.
        planned: set once there is a plan, or never will be one.
        settled: set once every group is enqueued, or never will be.
    """

    def __init__(self, number: int, direction: Direction) -> None:
        self.number = number
        self.direction = direction
        self.after: list[Event] = []
        self.needs: set[TransferRecord] = set()
        self.follows: set[TransferRecord] = set()
        self.plan: TransferPlan | None = None
        self.groups: Sequence[GroupState] = ()
        self.last_event: Event | None = None
        self.error: BaseException | None = None
        self.failure: BaseException | None = None
        self.settled = asyncio.Event()
        self.planned = asyncio.Event()
        self._members: list[_Member] = []
        self._landed_groups = 0
        self._told: set[int] = set()

    @property
    def operations(self) -> list[CacheOperation]:
        return [member.operation for member in self._members]

    @property
    def priority(self) -> int:
        return min(member.operation.priority for member in self._members)

    @property
    def unfinished(self) -> int:
        """Operations whose `done` has not been called."""
        return len(self._members) - len(self._told)

    def add(self, operation: CacheOperation, done: Done) -> int:
        """Let an operation join; its position in the plan."""
        self._members.append(_Member(operation, done))
        return len(self._members) - 1

    def start(self, plan: TransferPlan, groups: Sequence[GroupState]) -> None:
        """Nobody joins any more: this is what will be enqueued."""
        self.plan, self.groups = plan, groups
        self.planned.set()

    def forget_dependencies(self) -> None:
        """They are waited for; records that held on to each other would never be freed."""
        self.after, self.needs, self.follows = [], set(), set()

    def land(self, index: int) -> None:
        """Group `index` has landed, and with it those before it, as they are on one stream."""
        self._finish(index + 1, None)

    def fail(self, error: BaseException) -> None:
        """What has not landed by now will not be waited for."""
        self.failure = error
        self._finish(len(self.groups), error)
        self.planned.set()
        self.settled.set()

    def _finish(self, stop: int, error: BaseException | None) -> None:
        groups = self.groups[self._landed_groups : stop]
        for group in groups:
            group.error = error
            group.finished = True
        self._landed_groups = max(self._landed_groups, stop)
        self._tell(error)
        for group in groups:
            group.landed.set()

    def _tell(self, error: BaseException | None) -> None:
        """Call `done` of the operations whose last bytes have landed, of all if there is an error."""
        for position, member in enumerate(self._members):
            last = -1 if self.plan is None else self.plan.last_groups[position]
            if position not in self._told and last < self._landed_groups:
                self._told.add(position)
                call_done(member.done, error)


def call_done(done: Done, error: BaseException | None) -> None:
    """Call `done`, which is not ours: what it raises is logged, and the others are told all the same."""
    try:
        done(error)
    except Exception:
        logger.exception("the completion of a transfer could not be handled")
