"""SGLang's unified tree with host memory and storage, small, on a CPU: all of it theirs but what copies.

Its kernels copy between GPU and host; copies by torch stand in for them, of the same bytes to the same
places. Everything else, trees, controller, host pools, threads and queues, is SGLang's own.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs
from sglang_copies import stand_in_for_copies

SECONDS = 60.0  # of a test that waits for what must come
HEADS, WIDTH, LAYERS = 2, 64, 4


def stand_in_for_kernels() -> None:
    """Copies by torch, no pinning, and host pools on machines with little memory."""
    for module in (mha, mla, mamba):
        stand_in_for_copies(module)
    common._cuda_host_register = lambda *args, **kwargs: None
    base.HostKVCache.pin_memory = property(lambda pool: False, lambda pool, wanted: None)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def publish(
    extra: dict[str, Any], storage: str, layout: str, page_size: int, host_ratio: float
) -> ServerArgs:
    """SGLang's configuration, which is the process's."""
    arguments = ServerArgs(
        model_path="dummy",
        served_model_name="toy",
        load_format="dummy",
        device="cpu",
        page_size=page_size,
        enable_hierarchical_cache=True,
        hicache_ratio=host_ratio,
        hicache_mem_layout=layout,
        hicache_io_backend="direct",
        hicache_write_policy="write_through",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend=storage,
        hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 1} | extra),
    )
    arguments._mamba_cache_chunk_size = page_size  # else it looks for a model
    runtime_context.publish(arguments, role="scheduler")
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_cp_rank"), 0)
    runtime_context.get_parallel().override_permanently(**ranks)
    return arguments


def _buffers(pool: Any) -> list[torch.Tensor]:
    """A pool's device memory, a tensor a layer."""
    return list(pool.kv_buffer) if isinstance(pool, MLATokenToKVPool) else [*pool.k_buffer, *pool.v_buffer]


class Tree:
    """One of SGLang's caches, and the device memory under it.

    Args:
        kind: `full`, `mla`, `full+mamba` or `full+swa`.
        core: `python` or `rust`.
        extra: options of the storage.
        storage: SGLang's name of the backend.
        tokens: that the device holds.
        host_ratio: host memory by device memory.
    """

    def __init__(
        self,
        kind: str,
        core: str,
        extra: dict[str, Any],
        *,
        storage: str = "dynamic",
        layout: str = "page_first_direct",
        page_size: int = 4,
        tokens: int = 256,
        host_ratio: float = 2.0,
    ) -> None:
        arguments = publish(extra, storage, layout, page_size, host_ratio)
        self.page_size = page_size
        self.kind = kind
        make = {"full": self._full, "mla": self._mla, "full+mamba": self._mamba, "full+swa": self._swa}[kind]
        more = make(tokens)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            tree_core_backend=core,
            **more,
        )
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(arguments, params)

    # Device memory.

    def _paged(self, tokens: int, pool: Any) -> PagedTokenToKVPoolAllocator:
        return PagedTokenToKVPoolAllocator(
            tokens, self.page_size, torch.bfloat16, "cpu", pool, need_sort=False
        )

    def _full(self, tokens: int) -> dict[str, Any]:
        self.full = MHATokenToKVPool(
            size=tokens,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=WIDTH,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = self._paged(tokens, self.full)
        self.requests = ReqToTokenPool(4, tokens, "cpu", False)
        return {"tree_components": (ComponentType.FULL,)}

    def _mla(self, tokens: int) -> dict[str, Any]:
        self.full = MLATokenToKVPool(
            size=tokens,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            kv_lora_rank=WIDTH * HEADS,
            qk_rope_head_dim=WIDTH,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = self._paged(tokens, self.full)
        self.requests = ReqToTokenPool(4, tokens, "cpu", False)
        return {"tree_components": (ComponentType.FULL,)}

    def _mamba(self, tokens: int) -> dict[str, Any]:
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=64,
            n_groups=1,
            num_heads=4,
            head_dim=16,
            state_size=16,
            conv_kernel=4,
        )
        dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
        self.requests = HybridReqToTokenPool(
            size=4,
            mamba_size=16,
            mamba_spec_state_size=0,
            max_context_len=tokens,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=[1, 3], dtype=dtype),
            mamba_layer_ids=[1, 3],
            enable_mamba_extra_buffer=True,
        )
        pool = HybridLinearKVPool(
            size=tokens,
            dtype=torch.bfloat16,
            page_size=self.page_size,
            head_num=HEADS,
            head_dim=WIDTH,
            full_attention_layer_ids=[0, 2],
            device="cpu",
            mamba_pool=self.requests.mamba_pool,
        )
        self.full = pool.full_kv_pool
        self.allocator = self._paged(tokens, pool)
        components = (ComponentType.FULL, ComponentType.MAMBA)
        return {"tree_components": components, "enable_mamba_extra_buffer": True}

    def _swa(self, tokens: int) -> dict[str, Any]:
        pool = SWAKVPool(
            size=tokens,
            size_swa=tokens // 2,
            page_size=self.page_size,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=WIDTH,
            swa_attention_layer_ids=[1, 3],
            full_attention_layer_ids=[0, 2],
            device="cpu",
        )
        self.full, self.window = pool.full_kv_pool, pool.swa_kv_pool
        self.allocator = SWATokenToKVPoolAllocator(
            tokens, tokens // 2, self.page_size, torch.bfloat16, "cpu", pool, need_sort=False
        )
        self.requests = ReqToTokenPool(4, tokens, "cpu", False)
        components = (ComponentType.FULL, ComponentType.SWA)
        return {"tree_components": components, "sliding_window_size": 2 * self.page_size}

    def take(self, tokens: int) -> torch.Tensor:
        """Device slots for so many tokens."""
        if self.kind != "full+swa":
            return self.allocator.alloc(tokens)
        slots = self.allocator.full_attn_allocator.alloc(tokens)
        self.allocator.set_full_to_swa_mapping(slots, self.allocator.swa_attn_allocator.alloc(tokens))
        return slots

    def _attention(self, pool: Any, slots: torch.Tensor) -> list[torch.Tensor]:
        """Integer views: random bits of bfloat16 may be no number."""
        return [buffer.view(torch.int16)[slots] for buffer in _buffers(pool)]

    def _states(self, slot: torch.Tensor) -> list[torch.Tensor]:
        cache = self.requests.mamba_pool.mamba_cache
        return [part[:, slot].contiguous().view(torch.uint8) for part in (*cache.conv, cache.temporal)]

    def fill(self, seed: int) -> None:
        """Random bits everywhere on the device."""
        random = torch.Generator().manual_seed(seed)
        pools = [self.full, *([self.window] if self.kind == "full+swa" else [])]
        buffers = [buffer for pool in pools for buffer in _buffers(pool)]
        if self.kind == "full+mamba":
            cache = self.requests.mamba_pool.mamba_cache
            buffers += [*cache.conv, cache.temporal]
        for buffer in buffers:
            view = buffer.view(torch.uint8)
            view.copy_(torch.randint(0, 256, view.shape, generator=random, dtype=torch.uint8))

    # What a scheduler does.

    def compute(self, tokens: Sequence[int], seed: int) -> dict[str, list[torch.Tensor]]:
        """Fill the device, and publish `tokens` as computed; the bytes that stand for them."""
        self.fill(seed)
        slots = self.take(len(tokens))
        state = self.requests.mamba_allocator.alloc(1) if self.kind == "full+mamba" else None
        bytes_of = self.bytes_at(slots, state)
        key = RadixKey(array("q", tokens))
        self.cache.insert(InsertParams(key=key, value=slots, mamba_value=state))
        return bytes_of

    def stored(self) -> None:
        """Wait until all that was published is in host memory, and given to storage."""
        self.settle(lambda: not self.cache.ongoing_write_through and not self.cache.ongoing_backup)

    def prefetch(self, tokens: Sequence[int], name: str = "request") -> int:
        """Bring a prefix from storage to host memory; how many tokens are there then."""
        matched = self.match(tokens)
        handle = CacheRequestHandle(name, 0)
        self.cache.prefetch_from_storage(handle, matched.last_host_node, array("q", tokens))
        self.settle(lambda: self.cache.check_prefetch_progress(handle))
        return int(self.match(tokens).host_hit_length)

    def load(self, tokens: Sequence[int]) -> int:
        """Bring a prefix from host memory to the device; how many tokens are there then."""
        if self.cache.load_back(self.match(tokens).best_match_node):
            self.cache.ready_to_load_host_cache()
            self.settle(lambda: not self.cache.ongoing_load_back)
        return int(self.match(tokens).device_prefix_len)

    def match(self, tokens: Sequence[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def bytes_of(self, tokens: Sequence[int]) -> dict[str, list[torch.Tensor]]:
        """What the device holds for a prefix that is there."""
        slots = self.cache.path_device_indices(self.match(tokens).last_device_node)
        state = self.cache.all_mamba_values_flatten() if self.kind == "full+mamba" else None
        return self.bytes_at(slots, state)

    def bytes_at(self, slots: torch.Tensor, state: torch.Tensor | None) -> dict[str, list[torch.Tensor]]:
        found = {"kv": [each.clone() for each in self._attention(self.full, slots)]}
        if state is not None:
            found["mamba"] = [each.clone() for each in self._states(state)]
        if self.kind == "full+swa":
            window = self.allocator.translate_loc_from_full_to_swa(slots)[-2 * self.page_size :]
            found["swa"] = [each.clone() for each in self._attention(self.window, window)]
        return found

    def forget(self, pool: str, tail: Sequence[int], tokens: Sequence[int]) -> None:
        """Take the pages of a prefix's last tokens, and of its end, from one pool in storage."""
        digests = get_storage_hash_str(RadixKey(array("q", tokens)), page_size=self.page_size)
        doomed = self.storage._pools[pool][1].delete(digests[-(len(tail) // self.page_size) :])
        assert self.storage._bridge.call(doomed)

    def forget_memory(self) -> None:
        """Device and host memory know nothing any more, and hold other bytes; storage keeps what it has."""
        self.cache.reset()
        self.allocator.clear()
        self.fill(seed=-1)
        host = self.cache.cache_controller.storage_host_pool
        for memory in host.kv_buffer if isinstance(host.kv_buffer, list | tuple) else [host.kv_buffer]:
            memory.zero_()

    def settle(self, condition: Callable[[], bool]) -> None:
        """Run the scheduler's polls until something has happened."""
        end = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError("SGLang did not get there")
            self.cache.check_hicache_events()
            time.sleep(0.001)

    @property
    def storage(self) -> Any:
        return self.cache.cache_controller.storage_backend

    def close(self) -> None:
        self.cache.detach_storage_backend()
        self.cache.release_host_resources()


@contextmanager
def tree(*arguments: Any, **options: Any) -> Iterator[Tree]:
    """A `Tree`, closed in the end."""
    made = Tree(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def equal(left: dict[str, list[torch.Tensor]], right: dict[str, list[torch.Tensor]]) -> bool:
    """Whether two of `Tree.bytes_of` are the same, pool by pool."""
    return left.keys() == right.keys() and all(
        len(left[pool]) == len(right[pool]) and all(map(torch.equal, left[pool], right[pool]))
        for pool in left
    )
