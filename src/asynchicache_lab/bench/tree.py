"""Measure the speed of the tree: run a chat's turns through it, with slot numbers only.

Times are CPU times of this thread, as medians over repeats. The sets of pools alternate within each repeat,
so that other load on the machine affects all alike. Compare only figures of one result.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import thread_time_ns
from typing import TypedDict

from rich.console import Group, RenderableType
from rich.table import Table

from asynchicache.errors import ConfigError
from asynchicache.pools.allocator import SlotAllocator
from asynchicache.reports import add_figures
from asynchicache.tree.eviction import evict
from asynchicache.tree.node import FULL, FULL_DEVICE, Node, SlotPlace, place_of
from asynchicache.tree.policies import EVICTION
from asynchicache.tree.radix_tree import Inserted, Match, Pages, UnifiedRadixTree
from asynchicache.types import Tier, trailing_pages
from asynchicache_lab.bench.workload import SCENARIOS, ChatTurn, ChatWorkload, turns

FILLS = ("fit", "half")
FULL_HIT_TOKENS = 131_072
MANY_NODES = 256
REPEATS = 9

SETS: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "full, lru": (),
    "full+mamba": ("mamba",),
    "full+swa": ("swa",),
    "full+swa+mamba": ("swa", "mamba"),
}
"""Per set, the pools beside the full one: `mamba` has states at ends of turns, `swa` pages of a window. One
is evicted in the order of LRU, to compare the default with."""


class SetResult(TypedDict):
    """One set of pools.

    Attributes:
        turns_s: turns per second; a turn is match, lock, evict if needed, allocate, insert, release.
        match_us: duration of one match in a turn.
        tokens_s: prompt tokens looked up per second of turns.
        hit_rate: share of prompt tokens found in the tree.
    """

    turns_s: float
    match_us: float
    tokens_s: float
    hit_rate: float


class TreeResult(TypedDict):
    """The result of `run_tree`.

    Attributes:
        turns: number of turns of the chat.
        sets: results by name, a key of `SETS`.
        full_hit_match_us: duration of a full match of 131,072 tokens, by the number of nodes holding them.
    """

    scenario: str
    page_size: int
    fill: str
    window: int
    seed: int
    turns: int
    sets: dict[str, SetResult]
    full_hit_match_us: dict[str, float]


def run_tree(
    scenario: str = "chat",
    page_size: int = 64,
    fill: str = "fit",
    window: int = 1024,
    seed: int | None = None,
) -> TreeResult:
    """Run a chat through a tree for every set of pools.

    Args:
        scenario: a name in `workload.SCENARIOS`.
        page_size: tokens of a page.
        fill: `fit`: pools hold everything that is computed; `half`: half of its pages and states.
        window: tokens of the sliding window, for sets that have one.
        seed: seed of the chat. Default: the scenario's.

    Raises:
        ConfigError: an argument is outside its rule.
    """
    workload = _workload(scenario, seed)
    _check(page_size, fill, window)
    chat = list(turns(workload))
    window_pages = -(-window // page_size)
    sets = {
        name: _TreeBench(chat, fill, _ToyModel(page_size, pools, window_pages, _eviction(name)))
        for name, pools in SETS.items()
    }
    for _ in range(REPEATS):
        for bench in sets.values():
            bench.repeat()
    return TreeResult(
        scenario=scenario,
        page_size=page_size,
        fill=fill,
        window=window,
        seed=workload.seed,
        turns=len(chat),
        sets={name: bench.result() for name, bench in sets.items()},
        full_hit_match_us={
            "one_node": _full_hit_us(page_size, 1),
            f"nodes_{MANY_NODES}": _full_hit_us(page_size, MANY_NODES),
        },
    )


def _eviction(name: str) -> str:
    """The policy of a set."""
    return "lru" if name.endswith("lru") else EVICTION


def _workload(scenario: str, seed: int | None) -> ChatWorkload:
    if scenario not in SCENARIOS:
        raise ConfigError(f"scenario {scenario!r} is none of {sorted(SCENARIOS)}")
    workload = SCENARIOS[scenario]
    return workload if seed is None else replace(workload, seed=seed)


def _check(page_size: int, fill: str, window: int) -> None:
    if not 1 <= page_size <= FULL_HIT_TOKENS // MANY_NODES:
        raise ConfigError(f"page_size {page_size} must be 1 to {FULL_HIT_TOKENS // MANY_NODES} tokens")
    if fill not in FILLS:
        raise ConfigError(f"fill {fill!r} is none of {list(FILLS)}")
    if window < 1:
        raise ConfigError(f"window {window} must be 1 token at least")


@dataclass(frozen=True, slots=True)
class _ToyModel:
    """The configuration of a tree: its pools besides the full one, the pages of a window, and its policy."""

    page_size: int
    pools: Sequence[str]
    window_pages: int
    eviction: str

    def tree(self, capacity: int) -> UnifiedRadixTree:
        coverages = [trailing_pages(self.window_pages if pool == "swa" else 1) for pool in self.pools]
        return UnifiedRadixTree(
            self.page_size, coverages, windows=self.windows, eviction=self.eviction, capacity=capacity
        )

    @property
    def windows(self) -> list[int]:
        """Component numbers of the window pools."""
        return [component_id for component_id, pool in enumerate(self.pools, start=1) if pool == "swa"]

    @property
    def states(self) -> list[int]:
        return [component_id for component_id, pool in enumerate(self.pools, start=1) if pool == "mamba"]


class _Server:
    """A tree and its pools, used as by a serving engine's scheduler, one request at a time."""

    def __init__(self, recipe: _ToyModel, slots: Callable[[int], int]) -> None:
        """`slots(component)` is the size of that component's pool."""
        self.tree = recipe.tree(slots(FULL))
        self.pools = {
            place_of(component_id, Tier.DEVICE): SlotAllocator(slots(component_id))
            for component_id in range(self.tree.width)
        }
        self.match: Callable[..., Match] = self.tree.match
        self._windows, self._states = recipe.windows, recipe.states

    def turn(self, turn: ChatTurn) -> int:
        """Serve one turn; return the number of its prompt's pages that were hits."""
        tree = self.tree
        match = self.match(turn.tokens, limit=turn.prompt // tree.page_size)
        lease = tree.lock(match, tree.asked(turn.tokens, match))
        _path_slots(lease.node)  # the prefix's slots, as for an attention kernel
        new = len(turn.tokens) // tree.page_size - match.pages
        slots = self._allocate(FULL_DEVICE, new)
        windows = {
            n: Pages(match.pages, self._allocate(place_of(n, Tier.DEVICE), new)) for n in self._windows
        }
        states = {n: self._allocate(place_of(n, Tier.DEVICE), 1)[0] for n in self._states}
        inserted = tree.insert(lease, turn.tokens, slots, windows=windows)
        self._give_back(inserted)
        for component_id, slot in states.items():
            if not tree.take_state(inserted.node, component_id, Tier.DEVICE, slot):
                self.pools[place_of(component_id, Tier.DEVICE)].release([slot])
        lease.close()
        return match.pages

    def _give_back(self, inserted: Inserted) -> None:
        """Free slots of pages that the tree already held."""
        self.pools[FULL_DEVICE].release(inserted.duplicates)
        for component_id, refused in inserted.windows.items():
            self.pools[place_of(component_id, Tier.DEVICE)].release(list(refused.values()))

    def _allocate(self, place: SlotPlace, count: int) -> list[int]:
        pool = self.pools[place]
        if count > pool.available:
            freed = evict(self.tree, place, count - pool.available)
            for where, slots in freed.slots.items():
                self.pools[where].release(slots)
        return pool.allocate(count)


def _path_slots(node: Node) -> list[int]:
    slots: list[int] = []
    for part in reversed([*node.path()]):
        slots += part.slots[FULL_DEVICE] or ()
    return slots


class _Stopwatch:
    """Wraps a function and sums up the time spent in it."""

    def __init__(self, call: Callable[..., Match]) -> None:
        self._call = call
        self.spent_ns = 0

    def __call__(self, tokens: array[int], *, limit: int) -> Match:
        begun = thread_time_ns()
        match = self._call(tokens, limit=limit)
        self.spent_ns += thread_time_ns() - begun
        return match


class _TreeBench:
    """One set of pools: their sizes, and the measurements of every repeat."""

    def __init__(self, chat: Sequence[ChatTurn], fill: str, recipe: _ToyModel) -> None:
        self._chat = chat
        self._recipe = recipe
        most = max(len(turn.tokens) for turn in chat) // recipe.page_size
        boundless = _Server(recipe, lambda _: most * len(chat))
        self._hit_rate = self._serve(boundless)
        spares = [
            1 if component_id in recipe.states else most for component_id in range(boundless.tree.width)
        ]
        self._slots = [
            pool.held + spare if fill == "fit" else max(pool.held // 2, spare)
            for pool, spare in zip(boundless.pools.values(), spares, strict=True)
        ]  # spare: a turn allocates slots before it learns that the tree holds its pages
        self._turn_ns: list[int] = []
        self._match_ns: list[float] = []

    def _serve(self, server: _Server) -> float:
        """Serve the chat; return the hit rate."""
        hits = sum(server.turn(turn) for turn in self._chat)
        return hits * self._recipe.page_size / sum(turn.prompt for turn in self._chat)

    def _server(self) -> _Server:
        return _Server(self._recipe, self._slots.__getitem__)

    def repeat(self) -> None:
        """Measure one repeat: whole turns, and in a separate run the matches within them."""
        server = self._server()
        begun = thread_time_ns()
        self._hit_rate = self._serve(server)
        self._turn_ns.append(thread_time_ns() - begun)
        server = self._server()
        server.match = watch = _Stopwatch(server.match)
        self._serve(server)
        self._match_ns.append(watch.spent_ns - len(self._chat) * _clock_ns())

    def result(self) -> SetResult:
        seconds = median(self._turn_ns) / 1e9
        return SetResult(
            turns_s=len(self._chat) / seconds,
            match_us=median(self._match_ns) / len(self._chat) / 1e3,
            tokens_s=sum(turn.prompt for turn in self._chat) / seconds,
            hit_rate=self._hit_rate,
        )


def _clock_ns() -> float:
    """The overhead that reading the clock adds to a measurement."""
    begun, readings = thread_time_ns(), 1000
    for _ in range(readings - 1):
        thread_time_ns()
    return (thread_time_ns() - begun) / readings


def _full_hit_us(page_size: int, nodes: int) -> float:
    """Duration of a full match of a long sequence in a path of `nodes` nodes."""
    tokens = array("q", range(1, FULL_HIT_TOKENS + 1))
    tree = UnifiedRadixTree(page_size)
    lease = tree.lock(tree.match(tokens))
    pages = FULL_HIT_TOKENS // page_size
    for number in range(nodes):
        begin, end = pages * number // nodes, pages * (number + 1) // nodes
        tree.insert(lease, tokens, range(begin, end))
    lease.close()
    spent = []
    for _ in range(99):
        begun = thread_time_ns()
        tree.match(tokens)
        spent.append(thread_time_ns() - begun)
    return (median(spent) - _clock_ns()) / 1e3


def present(result: TreeResult) -> RenderableType:
    """Format a result of `run_tree` as tables."""
    title = (
        f"{result['scenario']}: {result['turns']:,} turns, pages of {result['page_size']}, {result['fill']}"
    )
    sets = Table("pools", title=title, title_justify="left")
    add_figures(sets, "turns/s", "match us", "Mtokens/s", "hit rate")
    for name, row in result["sets"].items():
        rate, tokens = f"{row['turns_s']:,.0f}", f"{row['tokens_s'] / 1e6:,.1f}"
        sets.add_row(name, rate, f"{row['match_us']:.1f}", tokens, f"{row['hit_rate']:.2%}")
    hits = Table("path")
    add_figures(hits, "us")
    for path, microseconds in result["full_hit_match_us"].items():
        hits.add_row(path, f"{microseconds:.1f}")
    return Group(sets, f"match of {FULL_HIT_TOKENS:,} tokens, all there", hits)
