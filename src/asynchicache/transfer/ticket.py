"""A running transfer as its users see it: what to await, and what to let a stream wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import NamedTuple

from asynchicache.errors import RequestStateError, TransferError, UsageError
from asynchicache.streams.base import Stream
from asynchicache.transfer.record import GroupState, LayerStatus, TransferRecord


class TransferView(NamedTuple):
    """What one ticket sees of one transfer.

    Attributes:
        record: the transfer.
        position: the ticket's own operation in it, or None where the ticket waits for what others move.
    """

    record: TransferRecord
    position: int | None

    @property
    def groups(self) -> Sequence[GroupState]:
        """The groups up to the last one that matters here; none before there is a plan."""
        plan = self.record.plan
        if plan is None or self.position is None:
            return self.record.groups
        return self.record.groups[: plan.last_groups[self.position] + 1]

    @property
    def finished(self) -> bool:
        groups = self.groups
        return groups[-1].finished if groups else self.record.failure is not None

    @property
    def submitted(self) -> bool:
        groups = self.groups
        return groups[-1].submitted if groups else False

    @property
    def error(self) -> BaseException | None:
        groups = self.groups
        return groups[-1].error if groups else self.record.failure

    def group(self, layer: int) -> GroupState | None:
        """The group behind which the bytes of `layer` are; None before there is a plan."""
        plan, groups = self.record.plan, self.groups
        return groups[min(plan.group_of(layer), len(groups) - 1)] if plan and groups else None

    def status(self, layer: int) -> LayerStatus:
        group = self.group(layer)
        if group is None:
            return LayerStatus.PENDING if self.record.failure is None else LayerStatus.FAILED
        return group.status

    async def landed(self, layer: int) -> BaseException | None:
        """Wait until the bytes of `layer` have landed, or will not; why they will not."""
        await self.record.planned.wait()
        group = self.group(layer)
        if group is None:
            return self.record.failure
        await group.landed.wait()
        return group.error


class Fence:
    """What orders a stream behind the bytes of one layer, on the device, without a host wait."""

    __slots__ = ("_layer", "_views")

    def __init__(self, views: Sequence[TransferView], layer: int) -> None:
        self._views = views
        self._layer = layer

    def wait_on(self, stream: Stream) -> None:
        """Let nothing that is enqueued on `stream` from now on run before the layer is there.

        A failed transfer lets through, so that a forward never hangs on it: look at `Ticket.ok`
        before its results are used.

        Raises:
            RequestStateError: the layer is not submitted yet, so there is nothing to wait for.
        """
        groups = [self._group(view) for view in self._views]
        for group in groups:
            if group is not None and not group.finished:
                stream.wait_event(group.event)

    def _group(self, view: TransferView) -> GroupState | None:
        """What to wait for; None where the transfer failed before there was anything."""
        group = view.group(self._layer)
        pending = view.record.failure is None if group is None else group.status is LayerStatus.PENDING
        if pending:
            raise RequestStateError(
                f"layer {self._layer} is not submitted yet; await Ticket.submitted() before its fence"
            )
        return group


class Ticket:
    """One operation's share of a transfer, and the transfers of others that its user depends on.

    Any number of tasks may wait. Cancelling one detaches it: the transfer goes on, and nothing is
    freed before its bytes have landed. `await ticket` waits for all layers.
    """

    __slots__ = ("__weakref__", "_layers", "_views")

    def __init__(self, layers: int, views: Sequence[TransferView]) -> None:
        self._layers = layers
        self._views = views

    @property
    def done(self) -> bool:
        """Whether every layer is complete or failed."""
        return all(view.finished for view in self._views)

    @property
    def ok(self) -> bool:
        """Whether nothing has failed so far; final once `done`."""
        return all(view.error is None for view in self._views)

    def status(self, layer: int) -> LayerStatus:
        """How far layer `layer` is, of all that this ticket depends on: what is least far counts.

        Raises:
            UsageError: the model has no such layer.
        """
        self._check(layer)
        found = {view.status(layer) for view in self._views}
        for status in (LayerStatus.FAILED, LayerStatus.PENDING, LayerStatus.SUBMITTED):
            if status in found:
                return status
        return LayerStatus.COMPLETE

    def fence(self, layer: int) -> Fence:
        """The fence of layer `layer`; to be waited on after `submitted`.

        Raises:
            UsageError: the model has no such layer.
        """
        self._check(layer)
        return Fence(self._views, layer)

    async def submitted(self) -> None:
        """Wait until every layer is enqueued, so that fences mean something.

        Raises:
            TransferError: some layer never will be.
        """
        await asyncio.sleep(0)  # a cancellation point, also when there is nothing to wait for
        for view in self._views:
            await view.record.settled.wait()
        for view in self._views:
            if not view.submitted:
                raise _failed("was not submitted", view.error or view.record.error)

    async def layer(self, layer: int) -> None:
        """Wait until the bytes of layer `layer` have landed, as the host sees it.

        Raises:
            TransferError: they will not.
            UsageError: the model has no such layer.
        """
        self._check(layer)
        await asyncio.sleep(0)  # a cancellation point, also when there is nothing to wait for
        errors = [await view.landed(layer) for view in self._views]
        for error in errors:
            if error is not None:
                raise _failed(f"failed at layer {layer}", error)

    def __await__(self) -> Generator[object, None, None]:
        """Wait until the bytes of all layers have landed.

        Raises:
            TransferError: some will not.
        """
        return self.layer(self._layers - 1).__await__()

    def _check(self, layer: int) -> None:
        if not 0 <= layer < self._layers:
            raise UsageError(f"layer {layer} is not within 0 to {self._layers - 1}")

    def __repr__(self) -> str:
        state = "done" if self.done else "in flight"
        return f"<Ticket {state}, ok={self.ok}, {len(self._views)} transfers>"


def _failed(what: str, error: BaseException | None) -> TransferError:
    failure = TransferError(f"the transfer {what}: {error}")
    failure.__cause__ = error
    return failure
