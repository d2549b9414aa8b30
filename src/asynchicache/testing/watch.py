"""A watch on the engine that uses a cache: mistakes that serve wrong bytes only later, to another request.

The cache cannot see what an engine writes. In a test it can: new slots are filled with a pattern, and what
is published with the pattern in it was never written. Tickets are watched too: an engine that goes on without
one reads or overwrites bytes that are still being copied, which is seldom seen on a fast device.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator
from functools import partial

import msgspec
import torch

from asynchicache.cache import HybridCache, Request
from asynchicache.controller.cache_parts import CacheParts
from asynchicache.errors import RequestStateError
from asynchicache.specs import PoolSpec
from asynchicache.streams.base import Stream
from asynchicache.transfer.fences import Fence, HostFence
from asynchicache.transfer.ticket import Ticket

_PATTERN = 0xA5


class Watch:
    """What was found about the engine that uses a cache.

    Attributes:
        findings: slots that were published unwritten, in words.
        anything_written: whether any published slot was written: a test of bookkeeping alone writes none.
    """

    def __init__(self, cache: HybridCache, *, writes: bool) -> None:
        """Watch the requests that `cache` makes from now on.

        Args:
            cache: in its device memory nothing may be in flight when a request gets a slot, if `writes`.
            writes: also watch what is written.
        """
        self.findings: list[str] = []
        self.anything_written = False
        self.writes = writes
        self.spec = cache.spec
        self._cache = cache
        cache.request_type = partial(WatchedRequest, watch=self)

    def fill(self, pool: PoolSpec, slot: int) -> None:
        """Fill a slot with the pattern."""
        for tensor in self._slot(pool, slot):
            size = tensor.element_size()
            filling = torch.full((*tensor.shape, size), _PATTERN, dtype=torch.uint8).view(tensor.dtype)
            tensor.copy_(filling.squeeze(-1))

    def unwritten(self, pool: PoolSpec, slot: int) -> bool:
        """Whether an entry of some layer still has the pattern; of a state, the whole."""
        for tensor in self._slot(pool, slot):
            entries = tensor.shape[:2].numel() if pool.per_token else len(tensor)
            rows = tensor.contiguous().view(torch.uint8).reshape(entries, -1)
            if bool((rows == _PATTERN).all(dim=1).any()):
                return True
        self.anything_written = True
        return False

    def bytes_of(self, pool: PoolSpec, slot: int) -> bytes:
        return b"".join(
            tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in self._slot(pool, slot)
        )

    def _slot(self, pool: PoolSpec, slot: int) -> Iterator[torch.Tensor]:
        for tensor in pool.tensors:
            yield self._cache.device_tensor(pool.name, tensor.name)[:, slot]


class WatchedTicket(Ticket):
    """A ticket that knows whether anything waited for it."""

    used: bool = False

    def fence(self, layer: int) -> Fence:
        self.used = True
        return super().fence(layer)

    def host_fence(self, layer: int) -> HostFence:
        self.used = True
        return super().host_fence(layer)

    async def layer(self, layer: int) -> None:
        self.used = True
        await super().layer(layer)

    def __await__(self) -> Generator[object, None, None]:
        self.used = True
        return super().__await__()


class WatchedRequest(Request):
    """A request that refuses to go on without its tickets, and notes what it publishes unwritten."""

    def __init__(
        self,
        parts: CacheParts,
        tokens: array[int],
        seed: bytes,
        prompt: int | None = None,
        *,
        watch: Watch,
    ) -> None:
        super().__init__(parts, tokens, seed, prompt)
        self._watch = watch
        self._suspending = False
        self._snapshot = 0  # where the last one was taken, and looked at
        self._tickets: dict[str, WatchedTicket] = {}
        self._new: set[tuple[str, int]] = set()  # slots that were filled, by pool
        self._published: dict[str, tuple[int, bytes]] = {}  # by pool, the length and bytes of its last state

    def load(self, *, counted: bool = True) -> Ticket:
        ticket = super().load(counted=counted)
        self._tickets.clear()
        self._new.clear()
        self._published.clear()
        if self._watches:
            self._fill_states(set())
        return self._hand_out("load", ticket) if self.hit.tokens else ticket

    def extend(self, tokens: int) -> dict[str, list[int]]:
        self._check_states_copied("extend")
        had = self._with_states() if self._watches else set()
        return self._filled(super().extend(tokens), had)

    async def reserve(self, tokens: int) -> dict[str, list[int]]:
        self._check_states_copied("reserve")
        had = self._with_states() if self._watches else set()
        return self._filled(await super().reserve(tokens), had)

    def advance(self, length: int, *, after: Stream | None = None) -> None:
        self._check_tickets("advance")
        super().advance(length, after=after)

    def snapshot(self, length: int, *, after: Stream | None = None) -> Ticket:
        self._check_tickets("snapshot")
        ticket = super().snapshot(length, after=after)
        self._look(length, pages=False)
        self._snapshot = length
        return self._hand_out("snapshot", ticket)

    def checkpoint(
        self, length: int, *, after: Stream | None = None, final: bool = False, states: bool = True
    ) -> Ticket:
        if not self._suspending:
            self._check_tickets("checkpoint")
        if self._watches:
            _, length = self._checked("checkpoint", length)
            self._look(length)
        ticket = super().checkpoint(length, after=after, final=final, states=states)
        return ticket if final or self._suspending else self._hand_out("checkpoint", ticket)

    def suspend(self, length: int, *, after: Stream | None = None) -> None:
        self._check_tickets("suspend")
        self._suspending = True
        try:
            super().suspend(length, after=after)
        finally:
            self._suspending = False

    # Tickets

    def _hand_out(self, verb: str, ticket: Ticket) -> Ticket:
        watched = WatchedTicket(*msgspec.structs.astuple(ticket))
        if watched.done and verb != "load":
            return watched  # nothing was copied
        self._tickets[verb] = watched
        return watched

    def _check_tickets(self, verb: str) -> None:
        for made_by, ticket in self._tickets.items():
            if not ticket.used:
                raise RequestStateError(
                    f"{verb}(): nothing has waited for the ticket of {made_by}(): await it, or wait on its "
                    "fences, before the forward that reads or overwrites what it copies"
                )

    def _check_states_copied(self, verb: str) -> None:
        """A load may still be on its way when room is made for what follows it."""
        load = self._tickets.pop("load", None)
        self._check_tickets(verb)
        if load is not None:
            self._tickets["load"] = load

    # Writes

    @property
    def _watches(self) -> bool:
        return self._watch.writes

    def _with_states(self) -> set[str]:
        """The pools of which the request has a working state."""
        return {pool.name for pool in self._pools(per_token=False) if self._state_of(pool) is not None}

    def _pools(self, *, per_token: bool) -> Iterator[PoolSpec]:
        return (pool for pool in self._watch.spec.pools if pool.per_token is per_token)

    def _state_of(self, pool: PoolSpec) -> int | None:
        try:
            return self.state(pool.slots_of or pool.name)
        except RequestStateError:
            return None

    def _fill_states(self, had: set[str]) -> None:
        for pool in self._pools(per_token=False):
            slot = self._state_of(pool)
            if slot is not None and pool.name not in had and not self.hit.tokens:
                self._watch.fill(pool, slot)
                self._new.add((pool.name, slot))

    def _filled(self, slots: dict[str, list[int]], had: set[str]) -> dict[str, list[int]]:
        if self._watches:
            self._fill_states(had)
            for pool in self._pools(per_token=True):
                for slot in slots.get(pool.slots_of or pool.name, ()):
                    self._watch.fill(pool, slot)
                    self._new.add((pool.name, slot))
        return slots

    def _look(self, length: int, *, pages: bool = True) -> None:
        """Note what is published, and was not written."""
        if not self._watches:
            return
        size = self._watch.spec.page_size
        for pool in self._pools(per_token=True) if pages else ():
            self._look_at_pages(pool, length // size)
        if length > self.hit.tokens and length % size == 0 and length != self._snapshot:
            for pool in self._pools(per_token=False):
                self._look_at_state(pool, length)

    def _look_at_pages(self, pool: PoolSpec, stop: int) -> None:
        owner = pool.slots_of or pool.name
        first = self.first_page(owner)
        for number, slot in enumerate(self.pages(owner)[: max(stop - first, 0)], first):
            if (pool.name, slot) in self._new:
                self._new.discard((pool.name, slot))
                if self._watch.unwritten(pool, slot):
                    self._find(f"page {number} of pool {pool.name!r} is not written")

    def _look_at_state(self, pool: PoolSpec, length: int) -> None:
        slot = self._state_of(pool)
        if slot is None:
            return
        if (pool.name, slot) in self._new:
            self._new.discard((pool.name, slot))
            if self._watch.unwritten(pool, slot):
                self._find(f"the state of {pool.name!r} at {length} tokens is not written")
        now = self._watch.bytes_of(pool, slot)
        before, old = self._published.get(pool.name, (length, b""))
        if old == now and before != length:
            self._find(
                f"the state of {pool.name!r} at {length} tokens is that of {before}: nobody wrote since"
            )
        self._published[pool.name] = length, now

    def _find(self, what: str) -> None:
        self._watch.findings.append(f"{what} (request made at {self.made_at})")
