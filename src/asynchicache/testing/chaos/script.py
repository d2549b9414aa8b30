"""A run as data: what caches there are, what is asked of them, what goes wrong, and the seed of the rest.

A script replays a run anywhere. It is JSON on disk, so that what was found can be sent, read and cut
down.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from asynchicache.errors import ConfigError
from asynchicache.layouts import HostLayout
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.transfer.engine import GROUP_BYTES
from asynchicache.types import PrefetchPolicy, WritePolicy, trailing_pages


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The model that all caches of a script serve.

    Attributes:
        page_size: tokens of a page.
        layers: layers, two at least; attention is in every other one, windows are in those between.
        states: has recurrent states.
        window: pages of its sliding window; 0 for none.
        near: pages of a second, shorter window; 0 for none.
        index: has the index keys of sparse attention, which share the slots of `kv`.
        draft: a draft model's window shares the slots of the window.
        replicated: every rank holds the same `kv`.
    """

    page_size: int = 4
    layers: int = 2
    states: bool = False
    window: int = 0
    near: int = 0
    index: bool = False
    draft: bool = False
    replicated: bool = False

    def spec(self) -> ModelSpec:
        """The pools."""
        odd, even = tuple(range(1, self.layers, 2)), tuple(range(0, self.layers, 2))
        keys, local = TensorSpec("keys", odd, (8,), "uint8"), TensorSpec("keys", even, (8,), "uint8")
        pools = [PoolSpec("kv", (keys,), replicated=self.replicated)]
        if self.index:
            index = TensorSpec("index", odd, (4,), "uint8")
            pools.append(PoolSpec("dsa", (index,), slots_of="kv", replicated=self.replicated))
        if self.states:
            state = TensorSpec("recurrent", tuple(range(self.layers)), (16,), "uint8")
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
        """Its pools in words, such as `full+mamba`."""
        words = ["full", "mamba" * self.states, "swa" * bool(self.window or self.near), "dsa" * self.index]
        return "+".join(filter(None, words))


class Pace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request does after one of its forwards.

    Attributes:
        snapshot, checkpoint: at the length that is computed.
        advance: shares of that length, in percent, to let go of windows at.
        again: publish once more, at that share of the length; only where there are no states.
        pause: seconds.
    """

    snapshot: bool = False
    checkpoint: bool = False
    advance: tuple[int, ...] = ()
    again: int | None = None
    pause: float = 0.0


class ClientTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request.

    Attributes:
        prompt, output: token ids.
        tenant: the namespace; None for none.
        wait: seconds before it.
        patience: seconds of waiting for storage; 0 asks nothing of it, None waits for an answer.
        rest: seconds of keeping nothing before loading; None: it keeps what matched.
        admit: wait for room before loading.
        stops: lengths at which the prefill ends a forward, besides those that the cache asks for.
        paces: what follows each forward, from the first one on; then nothing.
        abort: give up after so many forwards.
        final, durable: how the last checkpoint is made, and whether to wait for storage.
        leaves: ends by leaving `async with`, and names no stream that may still run.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    tenant: str | None = None
    wait: float = 0.0
    patience: float | None = 0.0
    rest: float | None = None
    admit: bool = False
    stops: tuple[int, ...] = ()
    paces: tuple[Pace, ...] = ()
    abort: int | None = None
    final: bool = False
    durable: bool = False
    leaves: bool = False


class ChaosClient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests one after the other.

    Attributes:
        turns: the requests.
        cancel: seconds after which it is cancelled, whatever it does.
    """

    turns: tuple[ClientTurn, ...]
    cancel: float | None = None


class ScriptEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happens beside the requests.

    Attributes:
        what: `attach`, `detach`, `clear`, `flush`, `drain`, `look` (statistics), `release` (calls that
            hang go on), `restart` (storage is away for a while), `lose` (and comes back empty), `forget`
            (storage loses some pages), `jump` (the clock).
        wait: seconds since the event before.
        seconds: that storage is away, or that the clock jumps.
        share: of the pages of storage, those that it loses.
    """

    what: str
    wait: float = 0.0
    seconds: float = 0.0
    share: float = 0.0


class Steady(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Traffic that goes on until all the calls made beside it have ended.

    Attributes:
        prompts: each of so many clients begins with one of them again and again, and goes on with pages
            of its own.
        pages: how many those are.
        calls: `flush`, `drain`, `durable`, `reserve`, `detach`, one after the other.
        large: pages that the request of `durable` and `reserve` takes.
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
    """How often storage does what is wrong, from 0 to 1; see `testing.faults.FaultRates`.

    Attributes:
        stall: a call takes a hundred times as long.
        exists: seconds that every question takes beside; no fault.
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


class DeviceFaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What goes wrong with copies, from 0 to 1, or at which copy.

    Attributes:
        stall: how often a copy takes a hundred times as long.
        lost, late: how often a notification never comes, or comes late.
        fail: the copy that fails, and the device with it.
        partial: the copy that fails half done.
        never: the copy that never ends.
        lie: the copy that brings a wrong byte; the cache is to notice by its audit.
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
        sizes: by pool.
        weights: the weight version; None: the cache has no storage.
        salt: the cache's.
        rank, ranks: which part of the model it is.
        clients, events: what happens.
        close: seconds after which it is closed, whatever goes on; None: when the clients are done.
        storage, device: what goes wrong there.
        refuse: how often there is no room, though there would be.
        group_bytes: what makes a group of a load's layers worth a copy of its own.
        poor: the piece of memory that the system refuses when the cache is opened first; None: none.
        audit: the share of pages that is fingerprinted.
        hashing: seconds that the fingerprints of one copy take, about; 0: as short as any call of a worker.
        patience: seconds that the policy `timeout` waits for storage, about.
        steady: traffic after the clients are done, and what is called beside it.
        crash: nothing of what is under way in the end gets to storage any more.
    """

    sizes: dict[str, CacheSizes]
    clients: tuple[ChaosClient, ...] = ()
    events: tuple[ScriptEvent, ...] = ()
    weights: str | None = "w0"
    salt: str = ""
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


class Script(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All of a run.

    Attributes:
        seed: of the order of tasks, the speed of everything, and the luck of faults.
        model: what is served.
        lives: caches over the same stores.
        together: all at once; else one after the other.
        last: one more, when all of them have ended.
        capacity: bytes of the store that they share; None: no limit.
    """

    seed: int
    model: ModelShape
    lives: tuple[Life, ...]
    together: bool = False
    last: Life | None = None
    capacity: int | None = None

    @property
    def every_life(self) -> tuple[Life, ...]:
        return self.lives if self.last is None else (*self.lives, self.last)

    @property
    def requests(self) -> int:
        return sum(len(client.turns) for life in self.every_life for client in life.clients)

    @property
    def events(self) -> int:
        return sum(len(life.events) for life in self.every_life)

    def text(self) -> str:
        """As JSON, what is as usual left out."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def load(cls, path: Path) -> Script:
        """
        Raises:
            ConfigError: the file is no script, or cannot be read.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"script {str(path)!r} does not fit: {error}") from error
        except OSError as error:
            raise ConfigError(f"script {str(path)!r} cannot be read: {error.strerror}") from error
