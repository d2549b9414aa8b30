"""A planner driven by hand: copies and writes end in any order, and may fail.

A request compares what it is given with what it must be, so that a stale, swapped or half-copied page is seen
at once.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Mapping

from asynchicache.errors import CapacityError, CopyEndedError
from asynchicache.hashing import page_digests
from asynchicache.planner.actions import Copy, StorageWrite
from asynchicache.planner.options import PlannerOptions
from asynchicache.planner.planner import Planner
from asynchicache.planner.readings import StorageRead
from asynchicache.planner.request_state import RequestState, RetiredPages
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.transfer.plan import Direction
from asynchicache.types import Outcome, Tier, WritePolicy, trailing_pages
from asynchicache_lab.simulator import VirtualCache


def small_spec(
    states: bool = True, page_size: int = 2, windows: Mapping[str, int] | None = None
) -> ModelSpec:
    """Keys and values, `states`, and sliding windows by name and trailing pages."""
    keys = TensorSpec("keys", (0,), (1, 2), "uint8")
    state = TensorSpec("recurrent", (1,), (4,), "uint8")
    pools = [PoolSpec("kv", (keys,))]
    if states:
        pools.append(PoolSpec("mamba", (state,), coverage=trailing_pages(1), per_token=False))
    pools += [PoolSpec(name, (keys,), coverage=trailing_pages(n)) for name, n in (windows or {}).items()]
    return ModelSpec("small", page_size, 2, tuple(pools))


class Simulation(VirtualCache):
    """One planner, its memory and its storage."""

    def __init__(
        self,
        rng: random.Random,
        *,
        states: bool = True,
        windows: Mapping[str, int] | None = None,
        slots: dict[str, tuple[int, int]],
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        eviction: str = "lru",
        memory: Mapping[Tier, int] | None = None,
    ) -> None:
        self.rng = rng
        self.spec = small_spec(states, windows=windows)
        planner = Planner(
            self.spec, slots, PlannerOptions(write_policy=policy, eviction=eviction), memory=memory
        )
        super().__init__(planner, slots)
        self.flying: list[Copy] = []
        self.writing: list[StorageWrite] = []
        self.live: list[RequestState] = []
        self.hit_tokens = 0
        self.retired: list[RetiredPages] = []
        self.computed: dict[RequestState, int] = {}
        self._fail = 0.0

    def digests(self, request: RequestState) -> list[bytes]:
        return page_digests(request.tokens, self.spec.page_size, request.seed)

    # Copies

    def carry_out(self, copies: Iterable[Copy]) -> None:
        self.flying += copies

    def end(self, index: int, *, failed: bool = False, ended: bool = False) -> None:
        """A copy arrives, or failed; `ended` says that then nothing writes to its slots any more."""
        error = CopyEndedError("planted") if ended else RuntimeError("planted")
        copy = self.flying.pop(index)
        self.move(copy)
        if failed:
            target = Tier.HOST if copy.direction is Direction.BACKUP else Tier.DEVICE
            for transfer in copy.transfers:
                for slot in transfer.destinations:
                    self.memory[transfer.pool, target][slot] = b""
        self.finish(copy, error if failed else None)

    def write(self, work: StorageWrite, *, stored: bool = True) -> None:
        self.writing.append(work)

    def end_write(self, index: int, *, stored: bool = True) -> None:
        work = self.writing.pop(index)
        for pool, (pages, slots) in work.pages.items() if stored else ():
            assert [self.memory[pool, Tier.HOST][slot] for slot in slots] == [page.digest for page in pages]
        super().write(work, stored=stored)

    def settle(self) -> None:
        while self.flying or self.writing or self.retired:
            if self.retired:
                self.end_forward()
            elif self.flying:
                self.end(0)
            else:
                self.end_write(0)

    # Requests

    def open(self, tokens: list[int]) -> RequestState:
        request = self.planner.open(array("q", tokens), b"")
        self.carry_out(self.planner.count_hit(request))
        self.live.append(request)
        return request

    def prefetch(self, request: RequestState, fail: float = 0.0) -> None:
        self._fail = fail
        super().prefetch(request)

    def read(self, read: StorageRead) -> list[Outcome]:
        outcomes = super().read(read)
        name = self.planner.inventory.names[read.component_id]
        for index, slot in enumerate(read.slots):
            if self.rng.random() < self._fail:
                self.memory[name, Tier.HOST][slot] = b""
                outcomes[index] = Outcome.MISS
        return outcomes

    def load(self, request: RequestState) -> None:
        mine = self.planner.loads.load(request)
        self.carry_out(mine)
        for copy in mine:
            self.end(self.flying.index(copy))
        while any(copy for copy in self.flying if copy.direction is Direction.LOAD):
            self.end(next(i for i, c in enumerate(self.flying) if c.direction is Direction.LOAD))
        self.hit_tokens += request.hit_pages * self.spec.page_size
        assert not self.check(request, self.digests(request)[: request.hit_pages])[1]

    def check_windows(self, request: RequestState) -> None:
        """What a forward would read now is there."""
        digests = self.digests(request)
        for number, window in request.windows.items():
            name = self.planner.inventory.names[number]
            needed = self.spec.pool(name).coverage.pages
            assert needed is not None
            computed = self.computed.get(request, request.hit_pages)
            assert window.first <= max(computed - needed, 0)
            for page, slot in enumerate(window.slots[: computed - window.first], start=window.first):
                got = self.memory[name, Tier.DEVICE][slot]
                assert got == digests[page], (name, page, got)

    def compute(self, request: RequestState, length: int, *, final: bool = False) -> bool:
        """Run a forward up to `length` tokens and publish it; False if there is no room."""
        if request.finished:
            return False
        try:
            self.planner.extend(request, max(length - request.reserved, 0))
        except CapacityError:
            return False
        self.carry_out(self.planner.backups.clean())
        digests = self.digests(request)
        for page in range(request.borrowed, length // self.spec.page_size):
            self.memory["kv", Tier.DEVICE][request.pages[page]] = digests[page]
        self.check_windows(request)
        whole = length // self.spec.page_size
        self._compute_windows(request, whole, digests)
        if whole and length % self.spec.page_size == 0:
            self.fill_states(request, digests[whole - 1])
        copies = self.planner.publish(request, length, final=final)
        self.carry_out(copies)
        self.retire(request, length)
        for copy in copies:
            # The working state is overwritten by the next forward: its copy runs in stream order.
            if copy.direction is Direction.FORK:
                self.end(self.flying.index(copy))
        return True

    def _compute_windows(self, request: RequestState, whole: int, digests: list[bytes]) -> None:
        """Write the pages of windows that lie behind what was computed before."""
        done = self.computed.get(request, request.hit_pages)
        for number, window in request.windows.items():
            name = self.planner.inventory.names[number]
            for page in range(max(done, window.first), whole):
                slot = window.slots[page - window.first]
                assert slot in window.own, "a page that is not the request's is written"
                self.memory[name, Tier.DEVICE][slot] = digests[page]
        self.computed[request] = max(done, whole)

    def retire(self, request: RequestState, length: int) -> None:
        """The request moved on; the forward that read its windows may end much later."""
        retired = self.planner.windows.retire(request, length)
        if retired is not None:
            self.retired.append(retired)

    def end_forward(self) -> None:
        self.planner.windows.finish(self.retired.pop(0))

    def close(self, request: RequestState) -> None:
        self.live.remove(request)
        self.computed.pop(request, None)
        self.planner.release(request)

    def verify(self) -> None:
        assert self.planner.inventory.verify() == []
