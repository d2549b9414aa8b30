"""Between a request of a `HybridCache` and the `DynamicCache` that a model works on."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedConfig

from asynchicache.cache import HybridCache, Request
from asynchicache.errors import UsageError
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import restore, write_pages, write_states


class CacheBridge:
    """Copies what a request's slots hold to model memory, and back.

    Its methods touch device memory, and only read what they ask of a request: they may run on the
    model's thread while the event loop goes on, as long as the request is not changed meanwhile.

    Args:
        config: of the model.
        cache: made with the model's spec.

    Attributes:
        pools: the cache's device memory, layer by layer.
    """

    def __init__(self, config: PreTrainedConfig, cache: HybridCache) -> None:
        self._config = config
        self.pools = PoolMap(
            cache.spec,
            {
                pool.name: {part.name: cache.device_tensor(pool.name, part.name) for part in pool.tensors}
                for pool in cache.spec.pools
            },
        )
        self._page_size = cache.spec.page_size
        self._full, *others = cache.spec.owners
        self._windows = [pool for pool in others if pool.per_token]
        self._state = next((pool.name for pool in others if not pool.per_token), None)

    def restore(self, request: Request) -> DynamicCache:
        """Model memory that holds the `request.hit.tokens` tokens that were restored.

        Args:
            request: loaded, its ticket awaited, and not extended yet.
        """
        tokens = request.hit.tokens
        windows = [slot for pool in self._windows for slot in request.pages(pool.name)]
        return restore(
            self._config,
            self.pools,
            request.pages(self._full.name),
            tokens,
            request.state(self._state) if self._state is not None and tokens else None,
            window_slots=windows,
        )

    def save(self, request: Request, memory: DynamicCache, start: int, stop: int, *, row: int = 0) -> None:
        """Copy the pages that tokens `start` to `stop` complete, and the states if `stop` ends a page.

        Call it where a forward ended, before `request.checkpoint(stop)` or `request.snapshot(stop)`.

        Args:
            request: extended to `stop` tokens at least.
            memory: holds exactly `stop` tokens, if the model has states.
            start: what was saved before, or restored.
            stop: where the forward ended.
            row: which sequence of `memory`.

        Raises:
            UsageError: the states are those of another length, or pages are not there.
        """
        first, last = start // self._page_size, stop // self._page_size
        for pool in (self._full, *self._windows):
            base = request.first_page(pool.name)
            begin = max(first, base)  # what is left of a window is not wanted any more
            slots = request.pages(pool.name)[begin - base : last - base]
            write_pages(memory, self.pools, begin, slots, pool=pool.name, row=row)
        if self._state is not None and stop % self._page_size == 0:
            held = memory.get_seq_length()
            if held != stop:
                raise UsageError(f"the states are those of {held} tokens, not of {stop}; end a forward there")
            write_states(memory, self.pools, request.state(self._state), row=row)
