"""Many nodes and one trace: each node is a planner with a host tier; what it asks of its store is counted.

All decisions are the library's. A trace is the traffic of some nodes; as many copies of it as load the fleet,
of other users each, share the nodes. One copy is played, and a node's memory is its share for one copy.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from asynchicache.errors import ConfigError
from asynchicache.hashing import ObjectKey, PlacedKey, PlacedPage, naming_page
from asynchicache.planner.actions import StorageWrite
from asynchicache.planner.checkpoints import CheckpointPolicy
from asynchicache.planner.options import PlannerOptions
from asynchicache.planner.planner import Planner
from asynchicache.planner.readings import StorageRead
from asynchicache.replay.player import IDS_A_BLOCK, Player, ReplayedRequest
from asynchicache.replay.survey import Survey, survey
from asynchicache.replay.trace import Trace, TraceRequest
from asynchicache.reports import Advance
from asynchicache.storage.protocol import Capabilities
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import Outcome, Tier, WritePolicy
from asynchicache_lab.bench.stores.options import StoresOptions
from asynchicache_lab.simulator import VirtualCache

OBJECTS = Capabilities(durable=True, checks=True, object_pages=32)
"""Of an object store as it is opened without options."""
_RUNNING_STATES = 4

Stored = dict[tuple[str, bytes], bytes]
"""What a store has, by pool and digest."""


@dataclass(slots=True, eq=False)
class Traffic:
    """What nodes ask of a store.

    Attributes:
        asked_pages, asked_groups: pages whose presence is asked for, and the groups that they are in.
        got_calls, got_pages, got_objects, got_bytes: reads: calls of one pool, pages, and objects of several.
        offered_pages: pages of writes that another node may have written before.
        put_calls, put_pages, put_objects, put_bytes: those that the store did not have.
    """

    asked_pages: int = 0
    asked_groups: int = 0
    got_calls: int = 0
    got_pages: int = 0
    got_objects: int = 0
    got_bytes: int = 0
    offered_pages: int = 0
    put_calls: int = 0
    put_pages: int = 0
    put_objects: int = 0
    put_bytes: int = 0

    def ask(self, first: int, stop: int) -> None:
        """Count a question for pages `first` to `stop` of a path."""
        self.asked_pages += stop - first
        self.asked_groups += len({naming_page(page) for page in range(first, stop)})

    def get(self, pool: str, pages: Sequence[PlacedPage], slot_bytes: int) -> None:
        """Count a read."""
        self.got_calls += 1
        self.got_pages += len(pages)
        self.got_objects += _objects(pool, pages)
        self.got_bytes += len(pages) * slot_bytes

    def put(self, pool: str, pages: Sequence[PlacedPage], slot_bytes: int) -> None:
        """Count a write of pages that are new to the store."""
        self.put_calls += 1
        self.put_pages += len(pages)
        self.put_objects += _objects(pool, pages)
        self.put_bytes += len(pages) * slot_bytes


def _objects(pool: str, pages: Iterable[PlacedPage]) -> int:
    keys = (PlacedKey.of(ObjectKey(b"", page.digest, pool), page) for page in pages)
    return len({OBJECTS.object_of(key) for key in keys})


class NodeCache(VirtualCache):
    """One node's cache, before a store.

    Args:
        planner, slots: as of `VirtualCache`.
        stored: what the store has, of this node or of all.
        traffic: counts what is asked of it.
        slot_bytes: bytes of a page or a state, by pool.
    """

    def __init__(
        self,
        planner: Planner,
        slots: dict[str, tuple[int, int]],
        stored: Stored,
        traffic: Traffic,
        slot_bytes: dict[str, int],
    ) -> None:
        super().__init__(planner, slots)
        self.storage, self.traffic, self._slot_bytes = stored, traffic, slot_bytes

    def write(self, work: StorageWrite, *, stored: bool = True) -> None:
        for pool, (pages, _) in work.pages.items():
            new = [page for page in pages if (pool, page.digest) not in self.storage]
            self.traffic.offered_pages += len(pages)
            if new:
                self.traffic.put(pool, new, self._slot_bytes[pool])
        super().write(work, stored=stored)

    def read(self, read: StorageRead) -> list[Outcome]:
        pool = self.planner.inventory.names[read.component_id]
        self.traffic.get(pool, read.placed, self._slot_bytes[pool])
        return super().read(read)

    def _present(self, pool: str, digests: Sequence[bytes], first: int) -> bytes:
        self.traffic.ask(first, len(digests))
        return super()._present(pool, digests, first)


class LoneCache(NodeCache):
    """One without a store."""

    def write(self, work: StorageWrite, *, stored: bool = True) -> None:
        self.planner.backups.write_finished(work, stored=False)

    def _present(self, pool: str, digests: Sequence[bytes], first: int) -> bytes:
        return bytes(len(digests))


@dataclass(slots=True, eq=False)
class FleetResult:
    """The second half of a trace; the first one fills the caches.

    Attributes:
        prompt_tokens, hit_tokens, store_tokens: of the prompts, from caches, and of these from the store.
        traffic: what was asked of the store meanwhile.
        problems: findings of the planners' own checks.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    store_tokens: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    problems: list[str] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


class FleetNode(NamedTuple):
    """A node: what sends its requests, and its cache."""

    cache: NodeCache
    player: Player


class Router:
    """Sends requests to nodes, as SGLang's router does: to the node that served the prefix last, if that is
    half of the prompt, and else to the one with the fewest tokens. Some go to any node."""

    def __init__(self, options: StoresOptions) -> None:
        self._roam = options.roam
        self._random = random.Random(options.seed)
        self._tokens = [0] * options.nodes
        self._holders: dict[int, int] = {}  # by block

    def choose(self, request: TraceRequest, known: int) -> int:
        """The number of the node for a request, of which the first `known` blocks occurred before."""
        blocks = request.blocks()
        if self._random.random() < self._roam:
            chosen = self._random.randrange(len(self._tokens))
        elif known and 2 * known >= len(blocks):
            chosen = self._holders[blocks[known - 1]]
        else:
            chosen = min(range(len(self._tokens)), key=self._tokens.__getitem__)
        self._tokens[chosen] += request.tokens
        self._holders.update(dict.fromkeys(request.blocks(answer=True), chosen))
        return chosen


class Fleet:
    """Nodes that a router sends the requests of a trace to.

    Args:
        options: the fleet.
        trace: its traffic.

    Raises:
        ConfigError: the trace has no time, or its blocks are no whole pages.
    """

    def __init__(self, options: StoresOptions, trace: Trace) -> None:
        if trace.block_size % options.page_size:
            raise ConfigError(
                f"--page-size {options.page_size}: must divide a block, {trace.block_size} tokens"
            )
        if not trace.seconds:
            raise ConfigError(f"{trace.where}: all requests arrive at once; a plan needs their times")
        self._options = options
        self._parts = trace.block_size // options.page_size
        self._found: Survey = survey(trace, CheckpointPolicy())
        self._requests = trace.requests
        self._paged = replace(trace, block_size=options.page_size, blocks=trace.blocks * self._parts)
        self.copies = options.nodes * options.tokens_s / (trace.prompt_tokens / trace.seconds)
        self._spec = synthetic_spec(
            IDS_A_BLOCK,
            options.names,
            token_bytes=-(-options.page_bytes // 8),  # two tensors of two layers, and two ids
            state_bytes=max(-(-options.state_bytes // 2), 1),
        )

    def play(self, kind: type[NodeCache], *, shared: bool, progress: Advance) -> FleetResult:
        """Send all requests to nodes with empty caches.

        Args:
            kind: of their caches.
            shared: whether all have one store.
            progress: is told of the requests.
        """
        result, router, stored = FleetResult(), Router(self._options), Stored()
        first = Traffic()
        nodes = [self._node(kind, stored if shared else Stored(), first) for _ in range(self._options.nodes)]
        for number, request in enumerate(self._requests):
            if number == len(self._requests) // 2:
                for node in nodes:
                    node.cache.traffic = result.traffic
            known = self._found.known[number]
            served = self._serve(nodes, request, known, router)
            if number >= len(self._requests) // 2:
                result.prompt_tokens += served.prompt_tokens
                result.hit_tokens += served.hit_tokens
                result.store_tokens += served.hit_tokens * (served.tier is Tier.STORAGE)
            progress(number + 1, len(self._requests))
        result.problems = [text for node in nodes for text in node.cache.planner.inventory.verify()]
        return result

    def _serve(
        self, nodes: Sequence[FleetNode], request: TraceRequest, known: int, router: Router
    ) -> ReplayedRequest:
        chosen, parts = router.choose(request, known), self._parts
        runs = [(start * parts, count * parts) for start, count in request.runs]
        answer = [(start * parts, count * parts) for start, count in request.answer]
        return nodes[chosen].player.serve(request._replace(runs=runs, answer=answer), known * parts)

    def _node(self, kind: type[NodeCache], stored: Stored, traffic: Traffic) -> FleetNode:
        costs = {name: self._options.slot_bytes[name] for name in self._options.names}
        memory = int(self._options.host_gb * 1e9 / self.copies)
        device = {"kv": (self._found.longest + 1) * self._parts, "mamba": _RUNNING_STATES}
        everything = self._paged.blocks + self._found.longest * self._parts  # no pool needs more slots
        slots = {
            name: (device[name], min(max(memory // cost, 1), everything)) for name, cost in costs.items()
        }
        policy = PlannerOptions(write_policy=WritePolicy(self._options.write_policy))
        planner = Planner(self._spec, slots, policy, memory={Tier.HOST: memory})
        cache = kind(planner, slots, stored, traffic, costs)
        return FleetNode(cache, Player(planner, self._paged, cache))
