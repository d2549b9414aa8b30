"""A run as data: its caches, their requests, the faults, and the seed of everything else.

A script replays its run on any machine. It is stored as JSON, so that a finding can be sent, read and shrunk.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asynchicache.errors import ConfigError
from asynchicache.layouts import HostLayout
from asynchicache.planner.hints import MAX_KEEP_SECONDS, NO_HINT, CacheHint
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.storage.chain import Promotion
from asynchicache.transfer.local import GROUP_BYTES
from asynchicache.types import PrefetchPolicy, WritePolicy, trailing_pages


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The model that all caches of a script serve.

    Attributes:
        page_size: tokens of a page.
        layers: number of layers, at least two; every other one has attention, the rest have windows.
        states: has recurrent states.
        window: pages of its sliding window; 0 for none.
        near: pages of a second, shorter window; 0 for none.
        index: has index keys of sparse attention, which share the slots of `kv`.
        draft: has a draft model's window, which shares the slots of the window.
        replicated: every rank holds the same `kv`.
        key_bytes, state_bytes: bytes of a token's keys in one layer, and of a layer's state.
    """

    page_size: int = 4
    layers: int = 2
    states: bool = False
    window: int = 0
    near: int = 0
    index: bool = False
    draft: bool = False
    replicated: bool = False
    key_bytes: int = 8
    state_bytes: int = 16

    def spec(self, dtype: str = "uint8") -> ModelSpec:
        """The pools. `dtype`: of all tensors, one byte each."""
        odd, even = tuple(range(1, self.layers, 2)), tuple(range(0, self.layers, 2))
        keys, local = (TensorSpec("keys", layers, (self.key_bytes,), dtype) for layers in (odd, even))
        pools = [PoolSpec("kv", (keys,), replicated=self.replicated)]
        if self.index:
            index = TensorSpec("index", odd, (4,), dtype)
            pools.append(PoolSpec("dsa", (index,), slots_of="kv", replicated=self.replicated))
        if self.states:
            state = TensorSpec("recurrent", tuple(range(self.layers)), (self.state_bytes,), dtype)
            pools.append(PoolSpec("mamba", (state,), coverage=trailing_pages(1), per_token=False))
        if self.window:
            pools.append(PoolSpec("swa", (local,), coverage=trailing_pages(self.window)))
        if self.near:
            pools.append(PoolSpec("near", (local,), coverage=trailing_pages(self.near)))
        if self.draft and self.window:
            coverage = trailing_pages(self.window)
            pools.append(PoolSpec("draft", (keys,), coverage=coverage, slots_of="swa"))
        return ModelSpec("chaos", self.page_size, self.layers, tuple(pools))

    @property
    def family(self) -> str:
        """The names of its pools, such as `full+mamba`."""
        words = ["full", "mamba" * self.states, "swa" * bool(self.window or self.near), "dsa" * self.index]
        return "+".join(filter(None, words))


class Pace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request does after one of its forwards.

    Attributes:
        snapshot, checkpoint: take one at the computed length.
        advance: shares of that length, in percent, up to which to release windows.
        again: publish once more at this share of the length; only for models without states.
        pause: seconds to sleep.
    """

    snapshot: bool = False
    checkpoint: bool = False
    advance: tuple[int, ...] = ()
    again: int | None = None
    pause: float = 0.0


HINTS = {
    "": NO_HINT,
    "continues": CacheHint(continues=True),
    "over": CacheHint(over=True),
    "keep": CacheHint(keep_seconds=MAX_KEEP_SECONDS),
    "transient": CacheHint(transient=True),
}
"""Hints of requests, by the names that scripts have for them."""


class ClientTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request.

    Attributes:
        prompt, output: token ids.
        tenant, salt: the namespace, and the request's own salt; None for none.
        wait: seconds before it.
        patience: seconds to wait for storage; 0 skips the prefetch, None waits for its end.
        rest: seconds to release the match before loading; None keeps it.
        admit: wait for free slots before loading.
        stops: lengths at which the prefill ends a forward, besides those that the cache demands.
        paces: what follows each forward, from the first one on; later forwards have none.
        abort: number of forwards after which to give up.
        final, durable: how to make the last checkpoint, and whether to wait until it is stored.
        through: what the request goes through before it waits for that, of `suspend`, `rematch` and `rest`,
            in this order; the first one is the last checkpoint then.
        suspend: number of forwards after which to suspend the request; None: never.
        away: seconds until it goes on.
        leaves: end by leaving `async with`, without naming a stream that may still run.
        hint: what the client says about the request's future; one of `HINTS`.
        least: pages that its hit must have when it is loaded.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    tenant: str | None = None
    salt: str | None = None
    wait: float = 0.0
    patience: float | None = 0.0
    rest: float | None = None
    admit: bool = False
    stops: tuple[int, ...] = ()
    paces: tuple[Pace, ...] = ()
    abort: int | None = None
    final: bool = False
    durable: bool = False
    through: tuple[str, ...] = ()
    suspend: int | None = None
    away: float = 0.0
    leaves: bool = False
    hint: str = ""
    least: int = 0


class ChaosClient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client that makes requests one after the other.

    Attributes:
        turns: the requests.
        cancel: seconds after which the client is cancelled.
    """

    turns: tuple[ClientTurn, ...]
    cancel: float | None = None


class ScriptEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event concurrent with the requests.

    Attributes:
        what: `attach`, `detach`, `clear`, `flush`, `drain`, `look` (read statistics), `release` (hanging
            calls continue), `restart` (storage is down for a while), `lose` (and comes back empty), `forget`
            (storage loses some pages), `jump` (the clock jumps), `weights` (the model has other weights).
        wait: seconds since the previous event.
        seconds: how long storage is down, or how far the clock jumps.
        share: share of its pages that storage loses.
        weights: the version of the new weights.
    """

    what: str
    wait: float = 0.0
    seconds: float = 0.0
    share: float = 0.0
    weights: str = ""


class Steady(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Traffic that continues until all concurrent calls have ended.

    Attributes:
        prompts: one per client; each of its requests starts with this prompt and adds new pages.
        pages: number of new pages.
        calls: `flush`, `drain`, `durable`, `reserve`, `detach`, made one after the other.
        large: pages of the request of `durable` and `reserve`.
    """

    prompts: tuple[tuple[int, ...], ...]
    pages: int = 2
    calls: tuple[str, ...] = ()
    large: int = 1


class CacheSizes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Slots of one pool in each tier."""

    device: int
    host: int


class StorageFaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Probabilities of storage faults, from 0 to 1; see `testing.faults.FaultRates`.

    Attributes:
        stall: a call takes a hundred times as long.
        exists: extra seconds per `exists` call; not a fault.
    """

    fail: float = 0.0
    raises: float = 0.0
    hang: float = 0.0
    late: float = 0.0
    partial: float = 0.0
    lie: float = 0.0
    swap: float = 0.0
    drop: float = 0.0
    stall: float = 0.0
    exists: float = 0.0


class StorageLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How fast storage is, and how many calls it takes at once. None of it is a fault.

    Attributes:
        page_seconds: time that a page's bytes take on a wire that the reads and writes of all pools share.
            Questions do not need it.
        concurrency, batch_pages: of the engine's capabilities; 0: the defaults.
        stuck: a prompt whose pages hang when they are read.
    """

    page_seconds: float = 0.0
    concurrency: int = 0
    batch_pages: int = 0
    stuck: tuple[int, ...] = ()


class Rivals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Other replicas that meet the same pages. None of it is a fault.

    Attributes:
        rate: how often one of them was first to claim pages that this one would store.
        deaths: how often such a one dies before it has stored them.
    """

    rate: float
    deaths: float


PROMOTIONS: tuple[Promotion, ...] = ("all", "second_hit", "none")


class NearStore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A store of the cache alone, before the one that all share: the first stage of a chain.

    Attributes:
        nbytes: what it has room for.
        promote: which pages of the shared store it gets, see `storage.chain.StagePolicy`.
        faults: of this store.
    """

    nbytes: int
    promote: Promotion = "all"
    faults: StorageFaults = StorageFaults()


class DeviceFaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Faults of copies: probabilities from 0 to 1, or the number of the affected copy.

    Attributes:
        stall: probability that a copy takes a hundred times as long.
        lost, late: probability that a notification is lost, or late.
        fail: the copy that fails, together with the device.
        partial: the copy that fails half done.
        never: the copy that never ends.
        lie: the first copy of those that each write a wrong byte, which the cache's audit must notice.
    """

    stall: float = 0.0
    lost: float = 0.0
    late: float = 0.0
    fail: int | None = None
    partial: int | None = None
    never: int | None = None
    lie: int | None = None


class Life(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cache, from opening to closing.

    Attributes:
        sizes: slots by pool.
        weights: the weight version; None: the cache has no storage.
        salt: the cache's salt.
        dtype: of all tensors.
        rank, ranks: the part of the model that the cache holds.
        clients, events: requests and concurrent events.
        close: seconds after which the cache is closed regardless; None: when the clients are done.
        storage, device: their faults.
        refuse: probability that an allocation is refused although slots are free.
        group_bytes: minimum bytes of a layer group that a load copies separately.
        poor: number of the slab whose memory is refused when the cache is first opened; None: none.
        audit: share of pages that is fingerprinted.
        hashing: mean seconds to fingerprint one copy; 0: as short as any worker call.
        patience: mean seconds that the policy `timeout` waits for storage.
        steady: traffic after the clients are done, and the calls concurrent with it.
        crash: no call that is in flight at the end reaches storage.
        paged: an engine owns the device memory; see `chaos.paged`.
        shared: bytes of host memory that all pools share; 0: each has the host slots of `sizes`.
        link: the speed of storage.
        near: a store before that one; None: there is none.
        rivals: who else writes into that one; None: nobody, and it knows no claims.
        dirty: the cache is closed as it is when its clients are done, without `drain` or `flush`.
    """

    sizes: dict[str, CacheSizes]
    clients: tuple[ChaosClient, ...] = ()
    events: tuple[ScriptEvent, ...] = ()
    weights: str | None = "w0"
    salt: str = ""
    dtype: str = "uint8"
    rank: int = 0
    ranks: int = 1
    layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    eviction: str = "lru"
    checkpoints: str = "prompt+output+branch"
    store_bytes: int = 1 << 20
    audit: bool | float = False
    hashing: float = 0.0
    patience: float = 0.005
    group_bytes: int = GROUP_BYTES
    close: float | None = None
    storage: StorageFaults = StorageFaults()
    device: DeviceFaults = DeviceFaults()
    refuse: float = 0.0
    poor: int | None = None
    steady: Steady | None = None
    crash: bool = False
    paged: bool = False
    shared: int = 0
    link: StorageLink = StorageLink()
    near: NearStore | None = None
    rivals: Rivals | None = None
    dirty: bool = False


class Script(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The script of one run.

    Attributes:
        seed: determines the order of tasks, all durations, and which faults happen.
        model: the model of all caches.
        lives: caches over the same stores.
        together: run them concurrently; otherwise one after the other.
        last: one more cache, opened after all others have ended.
        capacity: size of the shared store in bytes; None: unlimited.
        tails: prefixes may end inside a page.
    """

    seed: int
    model: ModelShape
    lives: tuple[Life, ...]
    together: bool = False
    last: Life | None = None
    capacity: int | None = None
    tails: bool = False

    @property
    def every_life(self) -> tuple[Life, ...]:
        return self.lives if self.last is None else (*self.lives, self.last)

    @property
    def requests(self) -> int:
        return sum(len(client.turns) for life in self.every_life for client in life.clients)

    @property
    def loses_nothing(self) -> bool:
        """Whether storage keeps what it has, and nothing goes wrong."""
        quiet = all(
            life.storage == StorageFaults()
            and life.device == DeviceFaults()
            and (life.near is None or life.near.faults == StorageFaults())
            and not life.events
            for life in self.every_life
        )
        return quiet and self.capacity is None and not self.together

    @property
    def events(self) -> int:
        return sum(len(life.events) for life in self.every_life)

    def text(self) -> str:
        """The script as JSON, without default values."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def load(cls, path: Path) -> Script:
        """
        Raises:
            ConfigError: the file cannot be read, or is not a script.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"script {str(path)!r} does not fit: {error}") from error
        except OSError as error:
            raise ConfigError(f"script {str(path)!r} cannot be read: {error.strerror}") from error
