"""Fences inside captured graphs: one external event per layer, armed before each replay."""

from __future__ import annotations

from asynchicache.streams.base import Device, Stream
from asynchicache.transfer.ticket import Ticket, check_layer


class GraphFences:
    """Lets a captured forward wait for a load, layer by layer; see `torch.cuda.graph`.

        fences = GraphFences(device, layers)
        with device.capture(compute) as graph:     # once
            for layer in range(layers):
                fences.wait_on(layer, compute)
                ...
        await ticket.submitted()                   # for each forward
        fences.arm(ticket)
        graph.replay()

    A wait binds to what was armed last when the graph is replayed. So arm once for each replay, and not again
    before that replay has run: it would wait for the pages of the next one. Overlapping forwards alternate
    between two of these, and two graphs.
    """

    def __init__(self, device: Device, layers: int) -> None:
        """
        Args:
            device: where the graph is captured.

        Raises:
            DeviceError: the device has no external events.
        """
        self._stream = device.stream("graph-fences")
        self._events = [device.event(external=True) for _ in range(layers)]
        self._captured: set[Stream] = set()

    def wait_on(self, layer: int, stream: Stream) -> None:
        """Make what is captured on `stream` from now on wait for the layer, at each replay.

        Raises:
            UsageError: the model has no such layer.
        """
        check_layer(layer, len(self._events))
        stream.wait_event(self._events[layer])
        self._captured.add(stream)

    def arm(self, ticket: Ticket) -> None:
        """Make the next replay wait for the layers of `ticket`.

        Raises:
            RequestStateError: the ticket is not submitted yet.
        """
        for layer, event in enumerate(self._events):
            ticket.fence(layer).record(event, self._stream, waiters=self._captured)
