"""Copies between the slots of a `HybridCache` request and the model's `DynamicCache`."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedConfig

from asynchicache.cache import HybridCache, Request
from asynchicache.errors import UsageError
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import (
    SavedStates,
    restore,
    write_pages,
    write_saved_states,
    write_states,
)
from asynchicache.specs import ModelSpec, PoolSpec


class CacheBridge:
    """Copies the content of a request's slots to model memory, and back.

    Methods access device memory and only read the request. They may run on the model's thread while the
    event loop runs, as long as the request does not change meanwhile.

    Args:
        config: the model's configuration.
        cache: a cache whose spec is, or contains, the model's spec.
        spec: the model's own spec, if the cache is for a target with its draft.
        prefix: prefix of the draft's pools, if the model is the draft; as given to `ModelSpec.with_draft`.

    Attributes:
        pools: the model's part of the cache's device memory, by layer.
        has_states: whether the model has recurrent layers.
        window_pages: pages of sliding windows that a prefix needs at its end; 0 without windows.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        cache: HybridCache,
        *,
        spec: ModelSpec | None = None,
        prefix: str = "",
    ) -> None:
        spec = spec or cache.spec
        names = {pool.name: f"{prefix}_{pool.name}" if prefix else pool.name for pool in spec.pools}
        self._config = config
        self.pools = PoolMap(
            spec,
            {
                pool.name: {
                    part.name: cache.device_tensor(names[pool.name], part.name) for part in pool.tensors
                }
                for pool in spec.pools
            },
        )
        self._page_size = spec.page_size
        self._full, *others = spec.owners
        self.tails = cache.tails
        self._windows = [pool for pool in others if pool.per_token]
        self.has_states = any(not pool.per_token for pool in others)
        self.window_pages = max((pool.coverage.pages or 0 for pool in self._windows), default=0)
        self._state = next((pool.name for pool in others if not pool.per_token), None)
        # The draft's pools share the slots of the target's pools.
        self._owners = {name: cache.spec.pool(full).slots_of or full for name, full in names.items()}

    def restore(self, request: Request) -> DynamicCache:
        """Return model memory with the first `request.hit.tokens` tokens.

        Args:
            request: loaded, with its ticket awaited, and not extended yet.
        """
        tokens = request.hit.tokens
        return restore(
            self._config,
            self.pools,
            request.pages(self._owners[self._full.name]),
            tokens,
            self._state_slot(request) if tokens else None,
            window_slots=[slot for pool in self._windows for slot in self._window(request, pool, tokens)],
        )

    def _window(self, request: Request, pool: PoolSpec, tokens: int) -> list[int]:
        """Return the slots of the last pages of a hit of `tokens` that the window covers."""
        slots = request.pages(self._owners[pool.name])
        pages = (pool.coverage.pages or 0) + (tokens % self._page_size > 0)
        return slots[-min(pages, len(slots)) :] if slots else []

    def _state_slot(self, request: Request) -> int | None:
        return None if self._state is None else request.state(self._owners[self._state])

    def save(
        self,
        request: Request,
        memory: DynamicCache,
        start: int,
        stop: int,
        *,
        row: int = 0,
        states: SavedStates | None = None,
    ) -> None:
        """Copy the pages that tokens `start` to `stop` complete, and the states if `stop` ends a page; with
        tails, also the page that `stop` is in, and the states in any case.

        Call it after a forward that ended at `stop`, before `request.checkpoint(stop)` or
        `request.snapshot(stop)`.

        Args:
            request: extended to at least `stop` tokens.
            memory: holds exactly `stop` tokens, if the model has states and `states` is None.
            start: tokens saved or restored before.
            stop: end of the forward.
            row: index of the sequence in `memory`.
            states: states saved at `stop` tokens, if `memory` holds more by now.

        Raises:
            UsageError: the states are of another length, or pages are missing.
        """
        for pool in (self._full, *self._windows):
            self._save_pages(request, memory, pool, start, stop, row)
        if self._state is not None and (stop % self._page_size == 0 or self.tails):
            self._save_states(request, memory, stop, row, states)

    def _save_pages(
        self, request: Request, memory: DynamicCache, pool: PoolSpec, start: int, stop: int, row: int
    ) -> None:
        owner = self._owners[pool.name]
        base = request.first_page(owner)
        begin = max(start // self._page_size, base)  # skip pages that the window has passed
        pages = -(-stop // self._page_size) if self.tails else stop // self._page_size
        slots, end = request.pages(owner)[begin - base : pages - base], stop if self.tails else None
        write_pages(memory, self.pools, begin, slots, pool=pool.name, row=row, tokens=end)

    def _save_states(
        self, request: Request, memory: DynamicCache, stop: int, row: int, states: SavedStates | None
    ) -> None:
        slot = self._state_slot(request)
        held = memory.get_seq_length() if states is None else states.tokens
        if held != stop or slot is None:
            raise UsageError(f"the states are those of {held} tokens, not of {stop}; end a forward there")
        if states is None:
            write_states(memory, self.pools, slot, row=row)
        else:
            write_saved_states(states, self.pools, slot)
