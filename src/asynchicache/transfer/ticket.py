"""A running transfer as its user sees it: to be awaited, and to order streams behind."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

import msgspec

from asynchicache.errors import TransferError, UsageError
from asynchicache.transfer.fences import Fence, HostFence
from asynchicache.transfer.record import LayerStatus, OnWait, Submission, TransferRecord

_ELSEWHERE = "no stream of this process is behind copies that others run; await the ticket"
_WORST_FIRST = (LayerStatus.FAILED, LayerStatus.PENDING, LayerStatus.SUBMITTED)


class Ticket(msgspec.Struct, eq=False, weakref=True):
    """One operation's share of a transfer, and the transfers of others that its user depends on.

    Any number of tasks may wait. Cancelling a waiter detaches it: the transfer goes on, and its pages are not
    freed before the bytes have landed. `await ticket` waits for all layers.

    Operations merge until the loop's current iteration ends. Until then every layer is pending.
    """

    _submission: Submission
    _layers: int
    _everywhere: TransferRecord | None = None  # the copy on all ranks, if its end is to be waited for too

    @property
    def done(self) -> bool:
        """Whether every layer is complete or failed; on all ranks, if engines own their device memory."""
        if self._submission.transfers is None:
            return False
        if self._everywhere is not None and not self._everywhere.finished:
            return False
        return all(transfer.is_ended(index) for transfer, index in self._submission.groups(self._last))

    @property
    def ok(self) -> bool:
        """Whether nothing has failed so far, as the device knows it; final once `done`."""
        if self._submission.failure is not None:
            return False
        if self._everywhere is not None and self._everywhere.failure is not None:
            return False
        groups = self._submission.groups(self._last)
        return all(transfer.error_of(index) is None for transfer, index in groups)

    def status(self, layer: int) -> LayerStatus:
        """The status of layer `layer`: the least advanced of all transfers that this ticket depends on.

        Raises:
            UsageError: the model has no such layer.
        """
        self._check(layer)
        if self._submission.failure is not None:
            return LayerStatus.FAILED
        if self._submission.transfers is None:
            return LayerStatus.PENDING
        found = {transfer.status(index) for transfer, index in self._submission.groups(layer)}
        return next((status for status in _WORST_FIRST if status in found), LayerStatus.COMPLETE)

    def fence(self, layer: int) -> Fence:
        """The fence of layer `layer`; to be waited on after `submitted(layer)`.

        Raises:
            UsageError: the model has no such layer.
        """
        self._check(layer)
        return Fence(self._submission, layer)

    def host_fence(self, layer: int) -> HostFence:
        """The fence of layer `layer` for a thread that is not the loop's.

        Raises:
            UsageError: the model has no such layer.
        """
        self._check(layer)
        return HostFence(self._submission, layer)

    async def submitted(self, layer: int | None = None) -> None:
        """Wait until a layer is enqueued, so that its fence means something.

        Args:
            layer: which one, so that a forward begins on the first while others are still being enqueued;
                returns at once, without yielding to the loop, if it is known to be. Default: every layer.

        Raises:
            TransferError: it never will be.
            UsageError: the model has no such layer.
        """
        last = self._last if layer is None else layer
        self._check(last)
        submission = self._submission
        if layer is None:
            submission.whole = True  # else a large load is enqueued as it lands
        if layer is None or submission.transfers is None:
            await self._resolved()
        groups = list(submission.groups(last))
        enqueued = [await transfer.submitted(index) for transfer, index in groups]
        if submission.failure is not None:
            raise _failed("was not submitted", submission.failure)
        for (transfer, index), is_enqueued in zip(groups, enqueued, strict=True):
            if not is_enqueued:
                raise _failed("was not submitted", transfer.error_of(index) or TransferError(_ELSEWHERE))

    async def layer(self, layer: int) -> None:
        """Wait until the bytes of layer `layer` have landed, as the host sees it.

        Raises:
            TransferError: they will not.
            UsageError: the model has no such layer.
        """
        self._check(layer)
        await self._resolved()
        errors = [await transfer.landed(index) for transfer, index in self._submission.groups(layer)]
        for error in (self._submission.failure, *errors):
            if error is not None:
                raise _failed(f"failed at layer {layer}", error)

    def __await__(self) -> Generator[object, None, None]:
        """Wait until the bytes of all layers have landed.

        Raises:
            TransferError: some will not.
        """
        return (self.layer(self._last) if self._everywhere is None else self._landed()).__await__()

    async def _landed(self) -> None:
        await self.layer(self._last)
        assert self._everywhere is not None, "the caller has looked"
        error = await self._everywhere.landed(0)
        if error is not None:
            raise _failed("failed on another rank", error)

    async def _resolved(self) -> None:
        """Wait until it is known which transfers it depends on; always a cancellation point.

        Raises:
            TransferError: it never will be.
        """
        await asyncio.sleep(0)  # a waiter that never yields could not be cancelled
        submission = self._submission
        if submission.transfers is None and submission.tick is not None:
            await submission.tick.planned.wait()
        if submission.transfers is None:  # no transfers would mean that everything has landed
            raise TransferError("it is not known what the ticket waits for")

    @property
    def _last(self) -> int:
        return self._layers - 1

    def _check(self, layer: int) -> None:
        check_layer(layer, self._layers)

    def __repr__(self) -> str:
        transfers = self._submission.transfers
        state = "pending" if transfers is None else "done" if self.done else "in flight"
        return f"<Ticket {state}, ok={self.ok}, {len(transfers or ())} transfers>"


def check_layer(layer: int, layers: int) -> None:
    """
    Raises:
        UsageError: it is no number of one of `layers` layers.
    """
    number = layer if hasattr(layer, "__index__") and not isinstance(layer, bool) else -1
    if not 0 <= number < layers:
        raise UsageError(f"layer {layer!r} is not within 0 to {layers - 1}")


def _failed(what: str, error: BaseException | None) -> TransferError:
    failure = TransferError(f"the transfer {what}: {error}")
    failure.__cause__ = error
    return failure


def done_ticket(layers: int, on_wait: OnWait | None = None) -> Ticket:
    """A ticket that is done.

    Args:
        on_wait: called with each stream that a fence makes wait.
    """
    return Ticket(Submission(on_wait=on_wait, transfers=()), layers)
