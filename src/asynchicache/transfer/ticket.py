"""A running transfer as its users see it: what to await, and what to let a stream wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Self

from asynchicache.errors import TransferError, UsageError
from asynchicache.transfer.fences import Fence, HostFence
from asynchicache.transfer.record import LayerStatus, Submission, TransferView

_WORST_FIRST = (LayerStatus.FAILED, LayerStatus.PENDING, LayerStatus.SUBMITTED)


class Ticket(Submission, eq=False, weakref=True):
    """One operation's share of a transfer, and the transfers of others that its user depends on.

    Any number of tasks may wait. Cancelling one detaches it: the transfer goes on, and nothing is
    freed before its bytes have landed. `await ticket` waits for all layers.

    Until the end of the loop's tick, in which operations merge, nothing is known: all is pending.
    """

    @classmethod
    def of_nothing(cls, layers: int) -> Self:
        """One that is done, of a model of `layers` layers."""
        return cls(layers, views=())

    @property
    def done(self) -> bool:
        """Whether every layer is complete or failed."""
        return self.views is not None and all(view.finished for view in self.views)

    @property
    def ok(self) -> bool:
        """Whether nothing has failed so far, as the device knows it; final once `done`."""
        return self.failure is None and all(view.error is None for view in self.views or ())

    def status(self, layer: int) -> LayerStatus:
        """How far layer `layer` is, of all that this ticket depends on: what is least far counts.

        Raises:
            UsageError: the model has no such layer.
        """
        self._check(layer)
        if self.failure is not None:
            return LayerStatus.FAILED
        if self.views is None:
            return LayerStatus.PENDING
        found = {view.status(layer) for view in self.views}
        return next((status for status in _WORST_FIRST if status in found), LayerStatus.COMPLETE)

    def fence(self, layer: int) -> Fence:
        """The fence of layer `layer`; to be waited on after `submitted(layer)`.

        Raises:
            UsageError: the model has no such layer.
        """
        self._check(layer)
        return Fence(self, layer)

    def host_fence(self, layer: int) -> HostFence:
        """The fence of layer `layer` for a thread that is not the loop's.

        Raises:
            UsageError: the model has no such layer.
        """
        self._check(layer)
        return HostFence(self, layer)

    async def submitted(self, layer: int | None = None) -> None:
        """Wait until a layer is enqueued, so that its fence means something.

        Args:
            layer: which one, so that a forward begins on the first while the others are still being
                enqueued; returns at once, without a turn of the loop, where it is known to be.
                Default: every layer.

        Raises:
            TransferError: it never will be.
            UsageError: the model has no such layer.
        """
        last = self.layers - 1 if layer is None else layer
        self._check(last)
        views = await self._known() if layer is None or self.views is None else self.views
        enqueued = [await view.submitted(last) for view in views]
        if self.failure is not None:
            raise _failed("was not submitted", self.failure)
        for view, there in zip(views, enqueued, strict=True):
            if not there:
                raise _failed("was not submitted", view.error or view.record.error)

    async def layer(self, layer: int) -> None:
        """Wait until the bytes of layer `layer` have landed, as the host sees it.

        Raises:
            TransferError: they will not.
            UsageError: the model has no such layer.
        """
        self._check(layer)
        errors = [await view.landed(layer) for view in await self._known()]
        for error in (self.failure, *errors):
            if error is not None:
                raise _failed(f"failed at layer {layer}", error)

    def __await__(self) -> Generator[object, None, None]:
        """Wait until the bytes of all layers have landed.

        Raises:
            TransferError: some will not.
        """
        return self.layer(self.layers - 1).__await__()

    async def _known(self) -> Sequence[TransferView]:
        """What it stands for; always a cancellation point.

        Raises:
            TransferError: nobody ever said.
        """
        await asyncio.sleep(0)
        if self.views is None and self.tick is not None:
            await self.tick.planned.wait()
        if self.views is None:  # an empty answer would say that all has landed
            raise TransferError("it is not known what the ticket waits for")
        return self.views

    def _check(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise UsageError(f"layer {layer} is not within 0 to {self.layers - 1}")

    def __repr__(self) -> str:
        state = "pending" if self.views is None else "done" if self.done else "in flight"
        return f"<Ticket {state}, ok={self.ok}, {len(self.views or ())} transfers>"


def _failed(what: str, error: BaseException | None) -> TransferError:
    failure = TransferError(f"the transfer {what}: {error}")
    failure.__cause__ = error
    return failure
