"""A planner driven by hand: copies end in any order, bytes are stamps, storage is a dictionary.

Every slot holds a stamp that says which page of which pool it is. A request compares what it is given
with what it must be, so that a stale, swapped or half-copied page is seen at once.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping

from asynchicache.errors import CapacityError
from asynchicache.hashing import page_digests
from asynchicache.planner.actions import Copy, StorageWrite
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState, RetiredPages
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.transfer.plan import Direction
from asynchicache.types import Outcome, Tier, WritePolicy, trailing_pages

POISON = b"poison"


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


class Simulation:
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
        self.planner = Planner(self.spec, slots, write_policy=policy, eviction_policy=eviction, memory=memory)
        self.memory = {
            (name, tier): [POISON] * slots[name][tier] for name in slots for tier in (Tier.DEVICE, Tier.HOST)
        }
        self.flying: list[Copy] = []
        self.writing: list[StorageWrite] = []
        self.storage: dict[tuple[str, bytes], bytes] = {}
        self.live: list[RequestState] = []
        self.hit_tokens = 0
        self.retired: list[RetiredPages] = []
        self.computed: dict[RequestState, int] = {}

    @staticmethod
    def stamp(pool: str, digest: bytes) -> bytes:
        return pool.encode() + digest

    def digests(self, request: RequestState) -> list[bytes]:
        return page_digests(request.tokens, self.spec.page_size, request.seed)

    # Copies

    def start(self, copies: list[Copy]) -> None:
        self.flying += copies

    def end(self, index: int, *, failed: bool = False) -> None:
        copy = self.flying.pop(index)
        source = Tier.HOST if copy.direction is Direction.LOAD else Tier.DEVICE
        target = Tier.HOST if copy.direction is Direction.BACKUP else Tier.DEVICE
        for transfer in copy.transfers:
            for a, b in zip(transfer.sources, transfer.destinations, strict=True):
                stamp = POISON if failed else self.memory[transfer.pool, source][a]
                self.memory[transfer.pool, target][b] = stamp
        node = self.planner.copy_finished(copy, RuntimeError("planted") if failed else None)
        if node is None:
            return
        if copy.direction is Direction.BACKUP:
            work = self.planner.backups.store(node)
            if work is not None:
                self.writing.append(work)
        else:
            self.start(self.planner.backups.backup(node))

    def end_write(self, index: int, *, stored: bool = True) -> None:
        work = self.writing.pop(index)
        for pool, (digests, slots) in work.pages.items():
            for digest, slot in zip(digests, slots, strict=True):
                if stored:
                    assert self.memory[pool, Tier.HOST][slot] == self.stamp(pool, digest)
                    self.storage[pool, digest] = self.stamp(pool, digest)
        self.planner.backups.write_finished(work, stored=stored)

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
        self.start(self.planner.count_hit(request))
        self.live.append(request)
        return request

    def prefetch(self, request: RequestState, fail: float = 0.0) -> None:
        reader = self.planner.prefetches
        query = reader.make_query(request.tokens, request.seed)
        if query is None:
            return
        present = {
            number: bytes((name, digest) in self.storage for digest in query.digests)
            for number, name in enumerate(self.planner.state.names)
            if reader.can_read(number)
        }
        choice = reader.choose(query, present)
        self.start(choice.backups)
        if choice.reading is None:
            reader.release(query)
            return
        while (read := reader.next_read()) is not None:
            name, outcomes = self.planner.state.names[read.component_id], []
            for slot, digest in zip(read.slots, read.digests, strict=True):
                missed = self.rng.random() < fail
                self.memory[name, Tier.HOST][slot] = POISON if missed else self.storage[name, digest]
                outcomes.append(Outcome.MISS if missed else Outcome.HIT)
            for gained in reader.deliver(read, outcomes):
                self.start(gained.backups)
        for gained in reader.abandon(choice.reading):  # there was no room for the rest
            self.start(gained.backups)
        self.planner.rematch(request)

    def load(self, request: RequestState) -> None:
        mine = self.planner.loads.load(request)
        self.start(mine)
        for copy in mine:
            self.end(self.flying.index(copy))
        while any(copy for copy in self.flying if copy.direction is Direction.LOAD):
            self.end(next(i for i, c in enumerate(self.flying) if c.direction is Direction.LOAD))
        self.check(request)

    def check(self, request: RequestState) -> None:
        """Everything that the request was given is what it must be."""
        digests = self.digests(request)
        self.hit_tokens += request.hit_pages * self.spec.page_size
        for page in range(request.hit_pages):
            got = self.memory["kv", Tier.DEVICE][request.pages[page]]
            assert got == self.stamp("kv", digests[page]), (page, got)
        for number, slot in request.states.items() if request.hit_pages else ():
            name = self.planner.state.names[number]
            got = self.memory[name, Tier.DEVICE][slot]
            assert got == self.stamp(name, digests[request.hit_pages - 1])
        self.check_windows(request)

    def check_windows(self, request: RequestState) -> None:
        """What a forward would read now is there."""
        digests = self.digests(request)
        for number, window in request.windows.items():
            name = self.planner.state.names[number]
            needed = self.spec.pool(name).coverage.pages
            assert needed is not None
            computed = self.computed.get(request, request.hit_pages)
            assert window.first <= max(computed - needed, 0)
            for page, slot in enumerate(window.slots[: computed - window.first], start=window.first):
                got = self.memory[name, Tier.DEVICE][slot]
                assert got == self.stamp(name, digests[page]), (name, page, got)

    def compute(self, request: RequestState, length: int, *, final: bool = False) -> bool:
        """Run a forward up to `length` tokens and publish it; False if there is no room."""
        if request.finished:
            return False
        try:
            self.planner.extend(request, max(length - request.reserved, 0))
        except CapacityError:
            return False
        self.start(self.planner.backups.clean())
        digests = self.digests(request)
        for page in range(request.borrowed, length // self.spec.page_size):
            self.memory["kv", Tier.DEVICE][request.pages[page]] = self.stamp("kv", digests[page])
        self.check_windows(request)
        whole = length // self.spec.page_size
        self._compute_windows(request, whole, digests)
        for number, slot in request.states.items() if whole and length % self.spec.page_size == 0 else ():
            name = self.planner.state.names[number]
            self.memory[name, Tier.DEVICE][slot] = self.stamp(name, digests[whole - 1])
        copies = self.planner.publish(request, length, final=final)
        self.start(copies)
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
            name = self.planner.state.names[number]
            for page in range(max(done, window.first), whole):
                slot = window.slots[page - window.first]
                assert slot in window.own, "a page that is not the request's is written"
                self.memory[name, Tier.DEVICE][slot] = self.stamp(name, digests[page])
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
        assert self.planner.state.verify() == []
