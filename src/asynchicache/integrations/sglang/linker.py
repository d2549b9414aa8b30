"""Experimental: this package's host tier and storage directly below SGLang's tree, as a `UnifiedCacheLinker`.

SGLang keeps its tree and its device pool; its own host pool and HiCache are not used. Load it by

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "AsynchicacheLinker",
        "linker_module_path": "asynchicache.integrations.sglang.linker", "linker_extra_config": {...}}'

where `linker_extra_config` are options of `CacheConfig`. See `docs/howto/sglang.md`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig
from asynchicache.errors import CacheError, ConfigError, TransferError
from asynchicache.integrations.bridge import Job, LoopBridge
from asynchicache.integrations.sglang.contents import key_adapters_by_content, settings_digest
from asynchicache.integrations.sglang.device_pools import FULL, DevicePools, device_pools
from asynchicache.integrations.sglang.linked_cache import LinkedCache
from asynchicache.integrations.sglang.linker_seam import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
    follow_paths,
)
from asynchicache.integrations.sglang.options import RankIdentity, path_of_rank, text_of
from asynchicache.integrations.sglang.waiting import hold_requests
from asynchicache.integrations.sglang.weights import follow_weights
from asynchicache.transfer.ticket import Ticket

logger = logging.getLogger(__name__)

_FLAG = "--unified-cache-external-linker-config, linker_extra_config"
_OURS = ("device", "device_bytes", "device_slots", "page_keys", "rank", "ranks")
_QUIESCE_SECONDS = 30.0
_CLOSE_SECONDS = 10.0


class AsynchicacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """The linker of one rank. SGLang calls it on its scheduler's thread; copies and storage run on a loop's.

    Attributes:
        pools: by SGLang's name; it asks which there are.
        layer_done_counter: forwards wait in it for layers of loads.
        holds: requests wait while storage is read for them. Not with stages of a pipeline, which do not agree
            on who waits.
    """

    holds = True

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, object] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """
        Args:
            server_args: SGLang's options; the model's name is used.
            params: SGLang's `CacheInitParams`.
            components: components of the tree.
            forward_stream: see `record_offload_ready`.

        Raises:
            ConfigError: invalid options, or device memory that is not supported; names the fix.
            StorageError: the storage cannot be used.
        """
        self.forward_stream = forward_stream
        self.holds = params.pp_size == 1
        follow_paths()
        hold_requests()
        key_adapters_by_content()
        rank = _rank(server_args, params)
        described = device_pools(
            params,
            [component.name for component in components],
            model=rank.model,
            identity=f"sglang {rank.shard(replicated=True)} {settings_digest()}",
        )
        device = import_module("sglang.srt.utils").get_device_module()
        self._begin(described, linker_options(extra_config or {}, rank), device)
        if hasattr(params.req_to_token_pool, "register_layer_transfer_counter"):
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    def _begin(self, described: DevicePools, config: CacheConfig, device: Any) -> None:
        """
        Args:
            described: SGLang's device memory.
            device: torch's module of the device, which has `Event`.
        """
        self._device = device
        self._weights = follow_weights()
        self.pools = dict.fromkeys(described.tokens_per_page, described)
        self.layer_done_counter = LayerWiseLoadCounter(described.spec.layers)
        self._tokens_per_page = described.tokens_per_page
        self._before: list[bytes] = []
        self._path: tuple[list[bytes], Any] = ([], None)
        self._arriving = ""
        self._reads: dict[str, Job[None]] = {}
        self._step = 0
        self._queued: dict[str, tuple[int, dict[str, Any]]] = {}
        self._offloads: deque[Job[bool]] = deque()
        self._loads: dict[int, Job[None]] = {}
        self._bridge = LoopBridge(name="asynchicache-linker")
        try:
            self._linked = self._bridge.call(_open(described, config))
        except CacheError:
            self._bridge.close()
            raise
        self._has_storage = config.storage is not None

    # What the wrapper tells and asks beside its calls, see `follow_paths` and `hold_requests`.

    def path_before(self, hashes: Sequence[str]) -> None:
        """Name the pages on the device before those of the next `lookup`."""
        self._before = _keys(hashes)

    def path_of(self, hashes: Sequence[str], table: Any) -> None:
        """Name all pages of the prefix that the next `offload` is the end of, and their device indices."""
        self._path = _keys(hashes), table

    def arrive(self, rid: str) -> None:
        """Let the next `lookup` of a request start to read what storage has beyond host memory."""
        self._arriving = rid

    def reading(self, rid: str) -> bool:
        """Return whether a request has to wait, because storage is read for it; never blocks."""
        read = self._reads.get(rid)
        return self.holds and read is not None and not read.done()

    def forget(self, rid: str) -> None:
        """Stop to read for a request, and keep no longer what was read: it has its turn, or was aborted."""
        read = self._reads.pop(rid, None)
        if read is not None:
            read.cancel()
            self._bridge.submit(_now(self._linked.forget, rid), queued=False)

    # Host memory to the device.

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return the lengths, in pages behind those on the device, that host memory can restore."""
        keys = next(each.keys for each in transfers if text_of(each.name) == FULL)
        before, self._before = self._before, []
        arrives, self._arriving = rid == self._arriving, ""
        path, weights = [*before, *_keys(keys)], self._weights.name()
        try:
            lengths = self._bridge.call(self._look(rid, path, len(before), weights))
            lacks = len(path) > len(before) + max(lengths, default=0)
            if arrives and lacks and self._has_storage:
                self._reads[rid] = self._bridge.submit(self._linked.read(rid, path, weights), queued=False)
        except (CacheError, CancelledError) as error:
            logger.warning("a lookup failed: %s", error)
            return []
        return lengths

    async def _look(self, rid: str, keys: list[bytes], known: int, weights: str) -> list[int]:
        self._linked.step(self._step)
        return await self._linked.look(rid, keys, known, weights)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a load for the next `start_layer_wise_loading`; False if nothing was promised."""
        known = None if rid in self._queued else self._bridge.call(_now(self._linked.claim, rid))
        if known is None:
            return False
        named = {text_of(each.name): each for each in transfers}
        self._queued[rid] = (
            known + len(named[FULL].keys),
            {name: each.device_indices for name, each in named.items()},
        )
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not started; return whether there was one."""
        if self._queued.pop(rid, None) is None:
            return False
        self._bridge.call(_now(self._linked.drop, rid))
        return True

    def start_layer_wise_loading(self) -> int:
        """Start the queued loads; return the number by which `layer_done_counter` knows them, -1 for none."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index: int = self.layer_done_counter.update_producer()
        ready = self._device.Event()
        ready.record()  # earlier work on the pages is enqueued before
        self._loads[index] = self._bridge.submit(self._load(index, queued, ready), queued=False)
        return index

    async def _load(self, index: int, queued: Mapping[str, tuple[int, dict[str, Any]]], ready: Any) -> None:
        """Load all that is queued, layer by layer. An error is reported by `finish_layer_wise_loading`."""
        counter, tickets = self.layer_done_counter, list[Ticket]()
        try:
            named = await asyncio.to_thread(self._named, queued, ready)
            for rid, (pages, _) in queued.items():
                tickets.append(await self._linked.load(rid, pages, named[rid]))
            for layer in range(counter.num_layers):
                for ticket in tickets:
                    await ticket.layer(layer)
                counter.complete(index, layer)
        except BaseException as error:
            counter.fail(index, error)  # a forward waits for it
            for ticket in tickets:  # SGLang frees the pages when this ends
                with suppress(TransferError):
                    await ticket
            raise
        finally:
            for rid in queued:
                self._linked.drop(rid)

    def _named(
        self, queued: Mapping[str, tuple[int, dict[str, Any]]], ready: Any
    ) -> dict[str, dict[str, list[int]]]:
        ready.synchronize()
        return {rid: self._pages_of(pools) for rid, (_, pools) in queued.items()}

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a batch of loads writes no more; return whether all of it has landed."""
        landed: bool = self.layer_done_counter.finish(counter_index)
        load = self._loads.pop(counter_index, None)
        error = load.exception() if load is not None else None
        if error is not None:
            logger.warning("a load failed: %r", error)
        return landed

    # The device to host memory.

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Copy the pages of a node to host memory, and from there to storage, in the background."""
        keys, table = self._path
        self._path = ([], None)
        named = {text_of(each.name): each.device_indices for each in transfers}
        if not keys or FULL not in named:
            return False
        named[FULL] = table if table is not None else named[FULL]
        work = self._back_up(keys, named, self.record_offload_ready(), self._weights.name())
        self._offloads.append(self._bridge.submit(work, queued=False))
        return True

    async def _back_up(
        self, keys: list[bytes], named: dict[str, Any], ready: list[Any], weights: str
    ) -> bool:
        self._linked.step(self._step)
        return await self._linked.back_up(keys, lambda: self._pages_of(named), ready, weights)

    def num_completed_offloads(self) -> int:
        """Return how many offloads have ended, of the oldest ones without a gap. SGLang asks once a step."""
        self._step += 1
        ended = 0
        while ended < len(self._offloads) and self._offloads[ended].done():
            ended += 1
        return ended

    def pop_completed_offload(self) -> bool:
        """Return whether the oldest offload has put its pages into host memory."""
        try:
            return self._offloads.popleft().result(0)
        except (CacheError, CancelledError) as error:
            logger.warning("pages were not copied to host memory: %s", error)
            return False

    # The rest.

    def _pages_of(self, named: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return page numbers by pool; waits for the device if the indices are there."""
        sizes = self._tokens_per_page
        return {
            name: [int(index) // sizes[name] for index in indices[:: sizes[name]].tolist()]
            for name, indices in named.items()
        }

    def reset(self) -> None:
        """Wait until nothing reads or writes device memory, and empty host memory. Storage stays."""
        self._quiesce()
        try:
            self._bridge.call(self._linked.empty(), deadline_s=_QUIESCE_SECONDS)
        except (CacheError, CancelledError, TimeoutError) as error:
            logger.warning("host memory was not emptied: %r", error)
        self._weights.dropped()

    def _quiesce(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for rid in list(self._reads):
            self.forget(rid)
        if not self._bridge.drain(_QUIESCE_SECONDS):
            logger.error("%d copies did not end in %g s", self._bridge.pending, _QUIESCE_SECONDS)
        self._offloads.clear()
        self._loads.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """Wait for copies, up to a time limit, write what storage has not got yet, and close the cache."""
        if not self._bridge.closed:
            self._quiesce()
            try:
                self._bridge.call(self._linked.aclose())
            except (CacheError, CancelledError) as error:
                logger.warning("the cache did not close cleanly: %s", error)
            finally:
                self._bridge.close(_CLOSE_SECONDS)


def linker_options(given: Mapping[str, object], rank: RankIdentity) -> CacheConfig:
    """Return the options of one rank's cache.

    Raises:
        ConfigError: an option is unknown or missing, or is not the caller's to set.
    """
    ours = sorted(set(given) & set(_OURS))
    if ours:
        raise ConfigError(f"{_FLAG}: {', '.join(ours)} cannot be set here; SGLang's own flags decide it")
    try:
        options = CacheConfig.read_some(given)
        if "storage" in options and "storage_options" in options:
            options["storage_options"] = path_of_rank(options["storage"], options["storage_options"], rank)
        return CacheConfig(**options, page_keys=True, rank=rank.tp_rank, ranks=rank.tp_size)
    except ConfigError as error:
        raise ConfigError(f"{_FLAG}: {error}") from error


async def _open(described: DevicePools, config: CacheConfig) -> LinkedCache:
    cache = await HybridCache.open(described.spec, config, engine=described.memory)
    return LinkedCache(cache, every_length=config.ranks > 1)


async def _now(call: Any, *arguments: Any) -> Any:
    """Call a plain function on the loop."""
    return call(*arguments)


def _rank(server_args: Any, params: Any) -> RankIdentity:
    context = import_module("sglang.srt.runtime_context")
    distributed = import_module("torch.distributed")
    parallel = context.get_parallel()
    group, tp_rank, tp_size = params.attn_tp_cache_group or params.tp_cache_group, 0, 1
    if distributed.is_available() and distributed.is_initialized():
        tp_rank, tp_size = distributed.get_rank(group=group), distributed.get_world_size(group=group)
    return RankIdentity(
        SimpleNamespace(
            model_name=server_args.served_model_name or server_args.model_path,
            dcp_size=getattr(parallel, "attn_dcp_size", 1),
            is_mla_model=False,  # every rank keeps its own
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            attn_cp_rank=params.attn_cp_rank,
            attn_cp_size=params.attn_cp_size,
            dp_rank=getattr(parallel, "attn_dp_rank", 0),
        )
    )


def _keys(hashes: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(each) for each in hashes]
