"""HybridCache and EngineCache: the front doors. `parts` opens what stands behind them."""

from __future__ import annotations

import asyncio
import logging
import warnings
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast, overload

import msgspec
import torch

from asynchicache.config import CacheConfig, StorageNames, StorageOptions
from asynchicache.controller.cache_parts import CacheParts
from asynchicache.controller.event_hub import EventSubscription
from asynchicache.controller.inspection import Inspection
from asynchicache.controller.phases import RequestTracer
from asynchicache.controller.recorder import TraceRecorder
from asynchicache.controller.request import BaseRequest, EngineRequest, Request
from asynchicache.controller.statistics import CacheStatistics, Occupancy, collect_statistics
from asynchicache.controller.tasks import shielded
from asynchicache.controller.warming import Warmed, warm
from asynchicache.errors import (
    ClosedError,
    ConfigError,
    InvalidTokensError,
    StorageError,
    UnknownPoolError,
    UsageError,
)
from asynchicache.events import PagesStored
from asynchicache.openings import Opening, caller
from asynchicache.options import check_kind
from asynchicache.parts import (
    OtherRanks,
    attach_storage,
    open_parts,
)
from asynchicache.planner.hints import NO_HINT, CacheHint
from asynchicache.pools.balance import advise_split
from asynchicache.pools.device import DevicePool
from asynchicache.pools.engine import EngineMemory
from asynchicache.ports import Port
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend
from asynchicache.streams.base import Device, Stream
from asynchicache.transfer.remote import RemoteCopies
from asynchicache.tree.outline import PrefixOutline, outline
from asynchicache.types import Hit, check_number, key_array, token_array

_log = logging.getLogger(__name__)

_MAX_NAMED = 5
"""Open requests that closing lists."""


RequestKind = TypeVar("RequestKind", bound=BaseRequest)
OpenedKind = TypeVar("OpenedKind", bound="HybridCache | EngineCache")


class BaseCache(Generic[RequestKind]):
    """What `HybridCache` and `EngineCache` have in common: all but who owns the device memory.

    Confined to the loop that opened it: from another one, `request` and every coroutine raise `UsageError`.

    Attributes:
        request_type: makes the requests; a kit of tests puts a subclass here, which watches its caller.
    """

    request_type: Callable[..., RequestKind]

    def __init__(
        self,
        spec: ModelSpec,
        config: CacheConfig,
        parts: CacheParts,
        stack: AsyncExitStack,
        given: StorageBackend | None,
        group: OtherRanks | None,
        opened_at: str,
    ) -> None:
        self.spec = spec
        self.config = config
        self._parts = parts
        self._tracer: RequestTracer | None = None
        self._stack = stack
        self._closing = asyncio.Lock()
        self._updating = asyncio.Lock()
        self._attaching = asyncio.Lock()
        self._closed = False
        self._opened_at = opened_at
        self._attached = config
        self._given = given
        self._group = group

    async def aclose(self) -> None:
        """Write to storage what only memory has (`sync`), for `close_seconds` at most, and close everything;
        idempotent. The end of `async with` calls it.

        Runs to its end even if the caller is cancelled. Requests that are still open are logged.
        """
        self._parts.executor.loop.check()
        await shielded(self._close_once())

    async def _close_once(self) -> None:
        async with self._closing:
            if not self._closed:
                self._closed = True
                self._stack.push_async_callback(self._close)
                await self._stack.aclose()

    async def _close(self) -> None:
        self._parts.executor.close()
        self._parts.transfers.end_unstarted()
        try:
            async with asyncio.timeout(self.config.close_seconds):
                await self._parts.executor.idle()
                if self._parts.storage:
                    await self._parts.storage_writer.sync(ask=False)
                await self._parts.storage_writer.flush_touches()
        except TimeoutError:
            _log.warning("closed with work in flight after %s s", self.config.close_seconds)
        finally:
            self._tell_open_requests()
            self._tell_split()
            self._parts.stop()

    def _tell_open_requests(self) -> None:
        left = self._parts.open_requests()
        if left:
            more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
            _log.warning("closed while requests were open: %s%s", "; ".join(left[:_MAX_NAMED]), more)

    def _tell_split(self) -> None:
        """Log which split between pages and states the traffic asked for, if memory ran short."""
        statistics = self.statistics()
        if any(map(any, statistics.evicted.values())):
            shared = statistics.host_bytes  # the host has no split to choose for these
            slots = {
                name: (device.capacity, 0 if name in shared else host.capacity)
                for name, (device, host) in statistics.occupancy.items()
            }
            if (advice := advise_split(self.spec, slots, statistics.tokens_per_end, self.config)) is not None:
                _log.info("%s", advice)

    def __del__(self) -> None:
        if not self.__dict__.get("_closed", True):
            place = self._opened_at
            warnings.warn(
                f"{place}: this cache was never closed: await aclose()", ResourceWarning, stacklevel=2
            )

    @property
    def tails(self) -> bool:
        """Whether prefixes may end inside a page: the option is on, and the model allows it."""
        return self._parts.planner.inventory.tails

    def request(
        self,
        tokens: Iterable[int],
        *,
        namespace: str | None = None,
        salt: str | None = None,
        stream: Stream | None = None,
        traceparent: str | None = None,
        hint: CacheHint = NO_HINT,
    ) -> RequestKind:
        """Make a request for one prompt, an async context manager.

        Args:
            tokens: token ids of the prompt; images and the like replaced by content ids.
            namespace: LoRA id, tenant or any other name; different namespaces share no prefixes.
            salt: the caller's cache salt; likewise.
            stream: the stream of its forwards, if they are enqueued and not awaited (`Request.run_on`).
            traceparent: the W3C header of the parent span, for a tracer.
            hint: what the client knows about the future of these pages.

        Raises:
            InvalidTokensError: no tokens, or an id is not an integer from 0 to 2**63 - 1.
            ClosedError: the cache is closed.
        """
        self._parts.executor.check_open()
        if self.config.page_keys:
            raise UsageError("prefixes of this cache are page keys (option page_keys): use request_keys()")
        words = token_array(tokens)[:]
        return self._request(words, None, self._seed(namespace, salt), stream, traceparent, caller(), hint)

    def request_keys(
        self,
        keys: Sequence[bytes],
        *,
        length: int | None = None,
        namespace: str | None = None,
        salt: str | None = None,
        stream: Stream | None = None,
        traceparent: str | None = None,
        hint: CacheHint = NO_HINT,
    ) -> RequestKind:
        """Make a request for a prompt whose whole pages have keys, such as an engine's block hashes.

        Args:
            keys: one of 32 bytes for each whole page; it identifies the page and all before it.
            length: tokens of the prompt; a hit leaves at least one of them to compute. Default: one more than
                the keys' pages, so that a hit may cover them all.
            namespace, salt, stream, traceparent, hint: as for `request`.

        Raises:
            InvalidTokensError: a key is not 32 bytes, or there are more than the prompt has whole pages.
            UsageError: the option `page_keys` is not set.
            ClosedError: the cache is closed.
        """
        self._parts.executor.check_open()
        if not self.config.page_keys:
            raise UsageError(
                "prefixes of this cache are tokens: set the option page_keys to name them by keys"
            )
        words, size = key_array(keys), self.spec.page_size
        prompt = len(keys) * size + 1 if length is None else length
        if isinstance(prompt, bool) or not isinstance(prompt, int) or prompt < max(len(keys) * size, 1):
            raise InvalidTokensError(
                f"{len(keys)} page keys for a prompt of {length!r} tokens: one for each whole page of {size}"
            )
        if prompt > len(keys) * size:
            words.append(0)  # the prompt goes on behind the last key, so that its page may be hit too
        return self._request(words, prompt, self._seed(namespace, salt), stream, traceparent, caller(), hint)

    def _seed(self, namespace: str | None, salt: str | None) -> bytes:
        return self._parts.namespaces.seed(namespace, salt)

    def _request(
        self,
        words: array[int],
        prompt: int | None,
        seed: bytes,
        stream: Stream | None,
        traceparent: str | None,
        made_at: str,
        hint: CacheHint,
    ) -> RequestKind:
        check_kind("hint", hint, CacheHint, "pass CacheHint(...)")
        if traceparent is not None:
            check_kind("traceparent", traceparent, str, "the W3C header of the parent span")
        request = self.request_type(self._parts, words, seed, prompt)
        request.made_at, request.hint = made_at, hint
        if self._tracer is not None:
            request.spans = self._tracer.request(traceparent)
        return request if stream is None else request.run_on(stream)

    def trace(self, tracer: RequestTracer | None) -> None:
        """Report timed work to a tracer (`integrations.otel`) from now on; None: no tracing, no cost."""
        if tracer is not None and not hasattr(tracer, "request"):
            raise ConfigError(f"tracer {tracer!r:.200} must be a RequestTracer; instrument(cache) sets one")
        self._tracer = tracer
        self._parts.trace(tracer)

    def record(self, path: str | Path, *, salt: bytes | None = None) -> TraceRecorder:
        """Record requests from now on as a trace that `asynchicache replay` reads: when they came, how long
        they are, and which blocks they share. The file has no tokens, and nothing they can be guessed from.

        The recorder is closed with the cache, or by its own `aclose`; a new one takes the place of the old.

        Args:
            path: the file, written anew; gzipped if its name ends in `.gz`.
            salt: a secret that several servers share, so that their traces can be merged by time. Default:
                the trace stands alone.

        Raises:
            ConfigError: `path` is no path, the file cannot be written, or is being recorded; or `salt` is not
                bytes.
            ClosedError: the cache is closed.
        """
        self._parts.executor.check_open()
        if not isinstance(path, str | PathLike):
            raise ConfigError(f"trace {path!r:.200} is a {type(path).__name__}: pass a file to write")
        path, current = Path(path), self._parts.recorder
        if current is not None and not current.closed and current.path.absolute() == path.absolute():
            raise ConfigError(f"trace {str(path)!r} is being recorded: await recorder.aclose() first")
        recorder = TraceRecorder(
            path,
            page_keys=self._parts.planner.inventory.page_keys,
            block_size=self.spec.page_size,
            port=self._parts.port,
            salt=salt,
        )
        self._parts.recorder = recorder
        self._stack.push_async_callback(recorder.aclose)
        return recorder

    @property
    def device(self) -> Device:
        """The device; compute engines can order their work with its streams."""
        return self._parts.device

    async def drain(self) -> None:
        """Wait until the copies and storage calls now in flight, and the work that follows, have ended.

        Pages published before the call are then on the host and in storage, as far as the write policy wants
        them there by now (`sync` writes all), or were shed. Work that begins later is not waited for.

        Raises:
            ClosedError: the cache is closed before that.
        """
        self._parts.executor.loop.check()
        await asyncio.sleep(0)  # a cancellation point even if there is nothing to wait for
        await self._parts.executor.settled()

    async def warm(
        self,
        prompts: Iterable[Iterable[int]],
        *,
        namespace: str | None = None,
        salt: str | None = None,
        seconds: float = 60.0,
        nbytes: int | None = None,
        progress: Callable[[Warmed], object] | None = None,
    ) -> Warmed:
        """Read prompts from storage into free host memory, one after the other, before the first request.

        What does not fit is left out: nothing is pushed out. Each wait ends when the prefetch policy says so.

        Args:
            prompts: token ids, the most useful first. Read one at a time, so an iterator may be long.
            namespace, salt: as for `request`.
            seconds: the longest that it takes.
            nbytes: the most bytes of host memory to fill. Default: what is free.
            progress: called after each prompt.

        Returns:
            what it came to; `in_time` says whether it came to the last prompt.

        Raises:
            ConfigError: `seconds` or `nbytes` is no number of 0 or more.
            InvalidTokensError: as for `request`; what was read before stays.
            UsageError: the option `page_keys` is set.
            ClosedError: the cache is closing.
        """
        await self._parts.executor.checkpoint()
        requests = (self.request(tokens, namespace=namespace, salt=salt) for tokens in prompts)
        return await warm(self._parts, requests, seconds, nbytes, progress)

    async def sync(self) -> bool:
        """Write to storage what only memory has, whatever the write policy, the hottest paths first.

        Storage is asked for what it should have, and what it has lost is written again. Closing does the
        same without asking. What is published meanwhile may be left out.

        Returns:
            True if storage has everything. False if there is no storage, it refused, failed or did not
            answer, or a path did not fit on the host, through which it is copied.

        Raises:
            ClosedError: the cache is closed.
        """
        await self._parts.executor.checkpoint()
        return await self._parts.storage_writer.sync(ask=True)

    async def flush(self) -> None:
        """Wait for the work now in flight, then evict all device and host memory that no request holds.

        Storage is not changed.
        """
        await self._parts.executor.checkpoint()
        await self._parts.executor.settled()
        self._parts.planner.flush()

    async def update_weights(self, version: str) -> None:
        """Go on with other weights: forget all pages of the ones before.

        Call it when no forward runs. From the call on nothing is matched. It waits for `attach_storage` to
        end, for work in flight, for `close_seconds` at most, and for storage as `detach_storage` does.
        Requests that had loaded before it returns keep their slots, and publish nothing; `durable` returns
        False. A request that is matched or resumed later is served. Pages of the old weights stay in
        storage, for caches that still serve them. Cancelling the caller does not interrupt it.

        Args:
            version: the new `weight_version`; nothing happens if it is the present one.

        Raises:
            ConfigError: `version` is not a name.
            StorageError: storage could not be opened again, on this rank or another one; the cache goes on
                without.
            ClosedError: the cache is closed.
        """
        if not isinstance(version, str) or not version:
            raise ConfigError(f"weight_version {version!r} must be a name that changes with the weights")
        self._parts.executor.check_open()
        with ExitStack() as changing:
            if version != self.config.weight_version or self._updating.locked():  # before anything is awaited
                changing.enter_context(self._parts.planner.changing_weights())
            # The first wait of all: a caller that is cancelled has the new weights in its model all the same.
            await shielded(self._update_weights(version))

    async def _update_weights(self, version: str) -> None:
        # What is being attached is opened for the weights of before: it must be here, to be opened again.
        async with self._updating, self._attaching:
            await self._parts.executor.checkpoint()
            if version == self.config.weight_version:
                return
            had, parts = self._parts.storage.attached, self._parts
            parts.planner.reset()
            await parts.storage_writer.detach()
            with suppress(TimeoutError):  # what is left can reach neither the tree nor storage
                async with asyncio.timeout(self.config.close_seconds):
                    await parts.executor.settled()
            parts.executor.check_open()
            parts.storage_writer.forget_uses()
            parts.planner.reset()  # also what was published or read meanwhile
            self.config = msgspec.structs.replace(self.config, weight_version=version)
            if self._group is not None:
                await self._group.update_weights(version)
            if had is not None:
                await self._attach(self._storage_config(), self._given, had.detached_stages)

    def _storage_config(self) -> CacheConfig:
        """The options of the storage that was attached last, with the present weights."""
        named = self._attached
        return msgspec.structs.replace(
            self.config, storage=named.storage, storage_options=named.storage_options
        )

    async def attach_storage(
        self, storage: StorageBackend | StorageNames, options: StorageOptions | None = None
    ) -> None:
        """Attach storage; running requests continue.

        Pages in memory are written when they are matched again, or by `Request.durable`.

        Args:
            storage: an open backend, which the caller closes, or the name of one, or the stages of a chain as
                `CacheConfig.storage` has them.
            options: options of a named backend, or of each stage; not allowed with an open one.

        Raises:
            ConfigError: the backend name is unknown, its options are invalid, or the cache has no
                `weight_version`.
            StorageError: the storage location cannot be used.
            UsageError: the cache has storage already, or storage is being detached.
            ClosedError: the cache is closed.
        """
        await self._parts.executor.checkpoint()
        given = None if isinstance(storage, str | list | tuple) else cast("StorageBackend", storage)
        if not isinstance(options or {}, Mapping | list) or (options and given is not None):
            raise ConfigError(f"options {options!r} must be a mapping, for a backend that is named")
        self._parts.storage_writer.check_none()
        async with self._attaching:
            self._parts.storage_writer.check_none()  # before opening a store that could be the same folder
            config = self.config
            if given is None:
                config = msgspec.structs.replace(config, storage=storage, storage_options=options or {})
            await self._attach(config, given)

    async def _attach(
        self, config: CacheConfig, given: StorageBackend | None, without: Collection[str] = ()
    ) -> None:
        parts = self._parts
        self._parts.executor.check_open()
        with self._parts.executor.busy():  # closing the cache waits for this, for `close_seconds`
            try:
                attachment = await attach_storage(
                    self.spec, config, parts.hosts, given, parts.port, without=without
                )
            except StorageError:
                self._parts.executor.check_open()
                raise
            try:
                self._parts.executor.check_open()
                self._parts.storage_writer.attach(attachment)
            except (ClosedError, UsageError):
                await attachment.aclose()
                raise
        self._attached, self._given = config, given

    async def detach_storage(self, stage: str | None = None) -> bool:
        """Detach storage, or one stage of a chain of stores; False if there was none, or it is detached.

        Requests continue, and miss its pages. Waits for calls in flight, up to the `closing` limit of
        `storage_limits`. `durable` returns False. A stage stays detached, also when the weights change, until
        `attach_stage` or `attach_storage`.
        """
        self._parts.executor.loop.check()
        if stage is not None:
            return await shielded(self._parts.storage.chain().detach(stage))
        return await shielded(self._parts.storage_writer.detach())

    async def attach_stage(self, stage: str) -> None:
        """Use a stage of a chain of stores again, after `detach_storage(stage)`.

        If it cannot be opened now, it is tried again, as every stage that is down.

        Raises:
            ConfigError: there is no such stage.
            UsageError: no chain of stores is attached.
        """
        await self._parts.executor.checkpoint()
        await shielded(self._parts.storage.chain().attach(stage))

    async def clear_storage(self) -> int:
        """Remove all pages of this model, with these weights and this salt, from storage.

        Returns:
            The number of pages removed.

        Raises:
            StorageError: storage failed.
            ClosedError: the cache was closed, or storage detached, before storage answered.
        """
        await self._parts.executor.checkpoint()
        return await self._parts.storage_writer.clear()

    def events(self, *, limit: int = 10_000) -> EventSubscription:
        """Subscribe to changes of pages, as an async iterator. Events cost nothing without subscribers.

        Args:
            limit: the most waiting events; beyond it the oldest are dropped, counted and reported.

        Raises:
            ConfigError: the limit is below 1.
            ClosedError: the cache is closed.
        """
        self._parts.executor.check_open()
        return self._parts.events.subscribe(limit)

    async def snapshot(self) -> list[PagesStored]:
        """The pages in each tier now, parents before children, as a start for a subscriber.

        Subscribe first: events may then repeat pages of the snapshot, which does no harm. Pages that are only
        in storage are not included. Linear in the tree; missing digests are computed in turns with other
        tasks.
        """
        await self._parts.executor.checkpoint()
        return await self._parts.events.snapshot()

    def verify(self, *, idle: bool = False) -> list[str]:
        """Describe broken invariants, with nodes and slots; empty if there are none.

        Linear in the slots, changes nothing, and never raises; safe in production at any time.

        Args:
            idle: the cache is not in use, so report everything held, in flight or quarantined too.
        """
        return self._parts.verify(idle=idle)

    async def verify_ranks(self, *, idle: bool = False) -> list[str]:
        """`verify`, and whether what the other ranks of a group do agrees with it.

        An operation that another rank carries out must be open here, and none of its slots free. If the group
        has failed, that is reported too: its ranks cannot be asked.

        Args:
            idle: as for `verify`.
        """
        self._parts.executor.loop.check()
        found, group = self.verify(idle=idle), self._group
        if group is not None:
            found += await group.verify(self._parts.planner.inventory.free_slots(), idle=idle)
        return found

    def prefixes(self, *, limit: int = 20) -> list[PrefixOutline]:
        """The cached prefixes that are continued most often, parents before children. No tokens are named.

        Looks at the top of the tree only, so its cost is bounded.

        Raises:
            ConfigError: `limit` is negative, or no integer.
        """
        check_number("limit", limit)
        if limit < 0:
            raise ConfigError(f"limit {limit} of prefixes must be 0 or more")
        return outline(self._parts.planner.inventory.tree.roots.values(), limit)

    def inspect(self) -> Inspection:
        """The inside of this cache, for tests that look for bugs; it may change with any version."""
        return Inspection(self._parts)

    def statistics(self) -> CacheStatistics:
        group = None if self._group is None else self._group.statistics()
        return collect_statistics(self._parts, group)

    def __repr__(self) -> str:
        executor, inventory = self._parts.executor, self._parts.planner.inventory
        word = "closed" if executor.stopped else "closing" if executor.closing else "open"
        failed = "" if executor.failure is None else f", device failed: {executor.failure}"
        kind, held = type(self).__name__, f"{len(inventory.requests)} requests, {inventory.free}"
        return f"<{kind} {word}, {self.spec.model}, {held}{failed}>"


class HybridCache(BaseCache[Request]):
    """Caches the pages and states of a hybrid model in device memory, host memory and storage.

    Made by `open`; confined to the loop that opened it: from another one, `request` and every coroutine raise
    `UsageError`.
    """

    request_type: Callable[..., Request] = Request

    @overload
    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        config: CacheConfig | None = None,
        *,
        storage: StorageBackend | None = None,
        port: Port | None = None,
        device: Device | None = None,
        engine: None = None,
        group: OtherRanks | None = None,
    ) -> Opening[Self]: ...

    @overload
    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        config: CacheConfig | None = None,
        *,
        storage: StorageBackend | None = None,
        port: Port | None = None,
        device: Device | None = None,
        engine: EngineMemory | RemoteCopies,
        group: OtherRanks | None = None,
    ) -> Opening[EngineCache]: ...

    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        config: CacheConfig | None = None,
        *,
        storage: StorageBackend | None = None,
        port: Port | None = None,
        device: Device | None = None,
        engine: EngineMemory | RemoteCopies | None = None,
        group: OtherRanks | None = None,
    ) -> Opening[Any]:
        """Open a cache: `async with` closes it at the end; after `await`, call `aclose`.

        Args:
            spec: the model's pools.
            config: options; the defaults if None.
            storage: an open backend to use instead of the configured one; the caller closes it.
            port: clock and threads; the real ones if None.
            device: an open device to use instead of the configured one; the caller closes it.
            engine: device memory that an engine owns, or, if the copies run elsewhere, what hands them out.
                What is opened is then an `EngineCache`. Default: the cache allocates device memory.
            group: the other ranks of a sharded model, which this cache leads. Default: there are none.

        Raises:
            ConfigError: options contradict each other or the model.
            CapacityError: the pools need more memory than is available.
            StorageError: the storage location cannot be used.
        """
        kind: type[HybridCache | EngineCache] = cls if engine is None else EngineCache
        begin = partial(_open, kind, spec, config, storage, port, device, engine, group, caller())
        return Opening(f"{cls.__name__}.open(...)", begin, caller())

    def device_tensor(self, pool: str, tensor: str) -> torch.Tensor:
        """The device memory of one tensor of a pool.

        Returns:
            `[layers, slots, page_size, *shape]` for pages, `[layers, slots, *shape]` for states; layers
            in the order of the spec's `TensorSpec.layers`.

        Raises:
            KeyError: no such pool or tensor.
        """
        try:
            memory = self._parts.memories[pool].device
            assert isinstance(memory, DevicePool), "only an EngineCache has other memory"
            return memory.tensor(tensor)
        except KeyError:
            names = {one.name: [part.name for part in one.tensors] for one in self.spec.pools}
            raise UnknownPoolError(f"tensor {tensor!r} of pool {pool!r} is none of {names}") from None


class EngineCache(BaseCache[EngineRequest]):
    """Caches in host memory and storage what an engine computes in device memory of its own.

    Made by `HybridCache.open(engine=...)`. It has no device tier: requests name the engine's pages.
    """

    request_type: Callable[..., EngineRequest] = EngineRequest


async def _open(
    kind: type[OpenedKind],
    spec: ModelSpec,
    config: CacheConfig | None,
    storage: StorageBackend | None,
    port: Port | None,
    device: Device | None,
    engine: EngineMemory | RemoteCopies | None,
    group: OtherRanks | None,
    opened_at: str,
) -> OpenedKind:
    config = CacheConfig() if config is None else config
    if not isinstance(spec, ModelSpec) or not isinstance(config, CacheConfig):
        given = f"{type(spec).__name__} and {type(config).__name__}"
        raise ConfigError(f"a cache is opened with a ModelSpec and a CacheConfig, not {given}")
    for name, part, verb, wanted in (
        ("port", port, "run_blocking", "a Port"),
        ("device", device, "stream", "an open device; CacheConfig(device=...) takes its name"),
        ("engine", engine, "pages", "EngineMemory(...)"),
        ("group", group, "agree", "a RankGroup"),
    ):
        if part is not None and not hasattr(part, verb):
            raise ConfigError(f"{name}={part!r:.200} must be {wanted}")
    stack = AsyncExitStack()
    try:
        parts = await open_parts(stack, spec, config, storage, port, device, engine, group)
    except BaseException:
        # A cancelled caller leaves no lock, thread or task behind.
        await shielded(stack.aclose())
        raise
    return kind(spec, config, parts, stack, storage, group, opened_at)


__all__ = ["CacheStatistics", "EngineCache", "EngineRequest", "Hit", "HybridCache", "Occupancy", "Request"]
