"""Eviction policies, and the queue that keeps candidates in a policy's order.

A policy gives each use of a path a worth; the attention pages whose last use was worth least are evicted
first. A use makes a node worth more, so the queue corrects an entry when it is popped instead of on every
use; a policy that wants a node to be worth less says so with `Policy.lower`. The tree passes the worth on:
both halves of a split node keep it, and a parent is worth at least what its lost children were.

To add a policy, derive a class from `Policy` and name it in the option `eviction`, as `package.module:Class`.
`Lru` shows how little is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from math import exp, frexp, inf, log
from pkgutil import resolve_name

from asynchicache.errors import ConfigError
from asynchicache.tree.keeps import Shelf
from asynchicache.tree.node import Node, SlotPlace, is_full

_SLACK = 64
_NOTHING_LOST = -1 << 20
"""The class of a density of 0; the others are exponents of two."""


@dataclass(slots=True, eq=False)
class Use:
    """Who uses a path: one request.

    Attributes:
        seed: the digest of its namespace; empty without one.
        tokens: how many it had when it came.
        known: the first pages of it that the tree had then, in some tier, or lately.
        hint: what its client knows, from -2 (it will not return) to 2 (it will); 0: nothing.
        credit: what `Policy.credit` returned for it; less where a hint was refused.
    """

    seed: bytes = b""
    tokens: int = 0
    known: int = 0
    hint: float = 0.0
    credit: float = 0.0


NOBODY = Use()
"""A use without a request."""


class Policy:
    """Orders attention pages: what is worth least is evicted first. States have an order of their own.

    Attributes:
        lower: makes a node worth less than it was, `lower(node, worth)`; the tree sets it.
    """

    lower: Callable[[Node, float], None]

    def __init__(self, capacity: int, page_size: int) -> None:
        """
        Args:
            capacity: pages that the larger tier holds.
            page_size: tokens of a page.
        """

    def worth(self, node: Node, clock: float, use: Use) -> float:
        """What a use now makes a path worth whose end is `node`; the tree keeps the old worth if it is more.

        Args:
            clock: the tree's clock, which counts the pages that entered the tree, and uses.
        """
        raise TypeError(f"{type(self).__name__} has no worth()")

    def credit(self, end: Node, clock: float, use: Use) -> float:
        """What is particular to a request that was just matched; called once, before it uses the tree.

        Args:
            end: the node where its match ends, or the one before if it ends inside a node.
            clock: the tree's clock.
        """
        return use.hint

    def published(self, node: Node, clock: float, use: Use) -> None:
        """A request that computed the pages of `node` has published them."""

    def lost(self, seed: bytes, pages: int) -> None:
        """Pages of a namespace were evicted from the last tier that had them."""


class Lru(Policy):
    """Least recently used first."""

    def worth(self, node: Node, clock: float, use: Use) -> float:
        return clock


class Fifo(Policy):
    """Oldest first, however often it was used."""

    def worth(self, node: Node, clock: float, use: Use) -> float:
        return node.worth[0] or clock


class SizeCredit(Policy):
    """LRU by a clock that counts pages; a request that adds many new pages counts as used earlier.

    People who paste a document leave sooner than those who continue a conversation: on real chats, the
    probability of a return falls steadily with the number of new tokens. A request with twice as many new
    pages as usual counts as older by half of the usual time until a return. Both are measured as it runs:
    nothing is tuned to a workload. Agents, who always return, get the same order as by LRU.

    New are pages that were in no tier lately (`tree.ghosts`).
    """

    def __init__(self, capacity: int, page_size: int) -> None:
        self._page_size = page_size
        self._usual_return = 0.0
        self._returns = self._openings = 0
        self._return_logs = self._size_logs = 0.0  # sums of logarithms: the means are geometric

    def worth(self, node: Node, clock: float, use: Use) -> float:
        return clock + use.credit

    def credit(self, end: Node, clock: float, use: Use) -> float:
        if end.published >= 0:
            self._returned(clock - end.published)
            end.published = -1
        pages = use.tokens // self._page_size
        new = log(pages - use.known) if pages > use.known else 0.0
        self._openings += 1
        self._size_logs += new
        credit = use.hint - (new - self._size_logs / self._openings) * _HALVES_A_LOG
        if self._openings >= _MEMORY:
            self._openings //= 2
            self._size_logs /= 2
        if credit > _MAX_CREDIT:
            return self._usual_return * _MAX_CREDIT
        return self._usual_return * (credit if credit > -_MAX_CREDIT else -_MAX_CREDIT)

    def _returned(self, age: float) -> None:
        """Somebody asked for a published path for the first time, after `age` pages."""
        self._returns += 1
        self._return_logs += log(age) if age > 1 else 0.0
        if self._returns >= _LEAST_RETURNS:
            self._usual_return = exp(self._return_logs / self._returns)
        if self._returns >= _MEMORY:
            self._returns //= 2
            self._return_logs /= 2

    def published(self, node: Node, clock: float, use: Use) -> None:
        node.published = clock


_MAX_CREDIT = 2.0
_HALVES_A_LOG = 0.5 / log(2)  # a factor of two in size is half of the usual return
_LEAST_RETURNS = 20
_MEMORY = 20_000
"""Returns, and openings, that the means are made of: sums are halved at this number."""


POLICIES: Mapping[str, type[Policy]] = {"size": SizeCredit, "lru": Lru, "fifo": Fifo}


EVICTION = "size"
"""The default."""


def policy(name: str) -> type[Policy]:
    """The policy of that name, or the class that `package.module:Class` names.

    Raises:
        ConfigError: there is none.
    """
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        raise ConfigError(
            f"eviction policy {name!r} is none of {sorted(POLICIES)}, and no class as package.module:Class"
        )
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"eviction policy {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"eviction policy {name!r} is {found!r}; it must be a subclass of Policy")
    return found


class EvictionQueue:
    """Nodes from which one component can be evicted in one tier, in the order of their worth.

    A heap with lazy correction. An entry may be out of date because the node was used since or is no
    longer a candidate; `pop` notices, so a use costs nothing here. Stale entries are swept out before
    they outnumber the others. A candidate that a hint keeps stands on the shelf instead, and goes when
    there is no other.
    """

    __slots__ = ("_component_id", "_flag", "_heap", "_place", "density", "discard", "members", "shelf")

    def __init__(self, component_id: int, place: SlotPlace, density: float = 1.0) -> None:
        """
        Args:
            place: it and the tier; tells this queue from the tree's others by a bit in `Node.queued`.
            density: tokens lost with each candidate, in pages, for each byte that it frees.
        """
        self._component_id = component_id
        self._place = place
        self._flag = 1 << place
        self.shelf = Shelf(paths=is_full(place))
        self._heap: list[tuple[float, int, Node]] = []
        self.density = density
        self.members: set[Node] = set()
        self.discard = self.members.discard  # four times a turn: without a frame of its own

    def add(self, node: Node) -> None:
        """Add a candidate, or say that it changed."""
        self.members.add(node)
        if node.queued & self._flag:
            return
        if len(self._heap) > 2 * len(self.members) + _SLACK:
            self._sweep()
        else:
            self._push(node)

    def requeue(self, node: Node) -> None:
        """Add an entry for a node whose worth has fallen, such as a window that a later one superseded.

        Needed even if the node is no candidate at the moment: it may become one again while its old entry
        is in the heap. A node without an entry gets one with the right worth when it is added.
        """
        if node.queued & self._flag:
            self._push(node)

    def score(self, clock: float, step: float, now: float = 0.0) -> float | None:
        """How little is lost with the first choice: tokens a byte, over its age; None without candidates,
        infinite if hints keep all of them.

        Args:
            clock: the tree's clock.
            step: what the clock adds for a request, a least age.
            now: the tree's time, for what is kept.
        """
        node = self._first(now)
        if node is None:
            return inf if self.members else None
        return self.density / (max(clock - node.worth[self._component_id], 0.0) + step)

    def pop(self, clock: float, step: float, now: float = 0.0) -> Node | None:
        """Take out the node that is worth least; None if there is no candidate. Arguments as of `score`."""
        node = self._first(now)
        if node is None:
            return self._pop_kept()
        heappop(self._heap)
        node.queued &= ~self._flag
        self.members.discard(node)
        return node

    def _first(self, now: float) -> Node | None:
        if self.shelf.ends:
            self._take_back(now)
        heap, members = self._heap, self.members
        while heap:
            worth, _, node = heap[0]
            if node not in members:
                heappop(heap)
                node.queued &= ~self._flag
            elif worth != node.worth[self._component_id]:
                heapreplace(heap, (node.worth[self._component_id], node.serial, node))
            elif node.keep is not None and self._keeps(node, now):
                heappop(heap)
                node.queued &= ~self._flag
            else:
                return node
        return None

    def _keeps(self, node: Node, now: float) -> bool:
        """Whether a hint keeps a candidate; it stands on the shelf then. What a later end of its sequence
        replaced is not kept: that end is."""
        keep, component_id = node.keep, self._component_id
        if keep is None or keep.until <= now:
            return False
        if node.superseded >> component_id & 1 or not node.worth[component_id]:
            return False
        return self.shelf.take(node, keep, node.count_slots(self._place))

    def _take_back(self, now: float) -> None:
        """Make those whose time on the shelf is over candidates like any other."""
        for node in self.shelf.take_out(now):
            if node in self.members:
                self.add(node)

    def _pop_kept(self) -> Node | None:
        """Take out the kept node whose time is over first."""
        while (node := self.shelf.first()) is not None:
            self.shelf.discard(node)
            if node in self.members:
                self.members.discard(node)
                return node
        return None

    def problems(self) -> list[str]:
        """Candidates that would come up too late."""
        first: dict[Node, float] = {}
        for worth, _, node in self._heap:
            first[node] = min(worth, first.get(node, worth))
        return self._late(
            node for node in self.members if first.get(node, inf) > node.worth[self._component_id]
        )

    def _late(self, nodes: Iterable[Node]) -> list[str]:
        late = [f"{node!r} would come up too late" for node in nodes if node not in self.shelf]
        return late + self.shelf.problems()

    def entries(self) -> int:
        """How many entries there are, out of date or not."""
        return len(self._heap)

    def _sweep(self) -> None:
        for _, _, node in self._heap:
            node.queued &= ~self._flag
        self._heap.clear()
        for node in self.members:
            self._push(node)

    def _push(self, node: Node) -> None:
        node.queued |= self._flag
        heappush(self._heap, (node.worth[self._component_id], node.serial, node))

    def __len__(self) -> int:
        return len(self.members)


class ValueQueue(EvictionQueue):
    """Candidates of a hybrid model: the one goes first with which the fewest tokens a byte are lost, over
    its age.

    One heap for each power of two of the density, in the order of worth; within a heap the first is nearly
    the best, so only the heads are compared. What nothing depends on has a density of 0 and goes first.
    Densities are computed when something is evicted, and only of nodes that changed since.
    """

    __slots__ = ("_changed", "_classes", "_density_of", "_queued")

    def __init__(self, component_id: int, place: SlotPlace, density_of: Callable[[Node], float]) -> None:
        """`density_of`: the density of a candidate as it is now."""
        super().__init__(component_id, place)
        self._density_of = density_of
        self._classes: dict[int, list[tuple[float, int, Node, float]]] = {}
        self._queued: dict[Node, float] = {}  # the density of the node's entry that counts
        self._changed: set[Node] = set()

    def add(self, node: Node) -> None:
        self.members.add(node)
        self._changed.add(node)

    def requeue(self, node: Node) -> None:
        if self._queued.pop(node, None) is not None:
            self._changed.add(node)

    def score(self, clock: float, step: float, now: float = 0.0) -> float | None:
        found = self._best(clock, step, now)
        if found is None:
            return inf if self.members else None
        return found[0]

    def pop(self, clock: float, step: float, now: float = 0.0) -> Node | None:
        found = self._best(clock, step, now)
        if found is None:
            return self._pop_kept()
        _, heap = found
        node = heappop(heap)[2]
        del self._queued[node]
        self.members.discard(node)
        return node

    def _best(
        self, clock: float, step: float, now: float
    ) -> tuple[float, list[tuple[float, int, Node, float]]] | None:
        """The heap whose head goes first, and its score."""
        if self.shelf.ends:
            self._take_back(now)
        if self._changed:
            self._take_changes()
        best = None
        for heap in self._classes.values():
            self._clean(heap, now)
            if not heap:
                continue
            worth, _, _, density = heap[0]
            score = density / (max(clock - worth, 0.0) + step)
            if best is None or score < best[0]:
                best = score, heap
        return best

    def _take_changes(self) -> None:
        if self.entries() > 2 * len(self.members) + _SLACK:
            self._classes.clear()
            self._queued.clear()
            self._changed = set(self.members)
        queued = self._queued
        for node in sorted(self._changed, key=lambda node: node.serial):
            if node in self.members:
                density = self._density_of(node)
                if queued.get(node) != density:
                    queued[node] = density
                    number = frexp(density)[1] if density else _NOTHING_LOST
                    entry = (node.worth[self._component_id], node.serial, node, density)
                    heappush(self._classes.setdefault(number, []), entry)
        self._changed.clear()

    def _clean(self, heap: list[tuple[float, int, Node, float]], now: float) -> None:
        """Remove what is out of date from the head of a heap."""
        members, queued, component_id = self.members, self._queued, self._component_id
        while heap:
            worth, serial, node, density = heap[0]
            if queued.get(node) != density:
                heappop(heap)
            elif node not in members:
                heappop(heap)
                del queued[node]
            elif worth != node.worth[component_id]:
                heapreplace(heap, (node.worth[component_id], serial, node, density))
            elif node.keep is not None and self._keeps(node, now):
                heappop(heap)
                del queued[node]
            else:
                return

    def problems(self) -> list[str]:
        first: dict[tuple[Node, float], float] = {}
        for heap in self._classes.values():
            for worth, _, node, density in heap:
                first[node, density] = min(worth, first.get((node, density), worth))
        return self._late(
            node
            for node in self.members - self._changed
            if first.get((node, self._queued.get(node, -1.0)), inf) > node.worth[self._component_id]
        )

    def entries(self) -> int:
        return sum(map(len, self._classes.values()))
