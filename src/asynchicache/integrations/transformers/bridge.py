"""Copies between the slots of a cache's pools and a model's `DynamicCache`.

Which slots a request has is looked up on the event loop. The copies need only their numbers, so every rank of
a group can make the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ReferenceType, WeakKeyDictionary, ref

import msgspec
import torch
from transformers import Cache, DynamicCache, PreTrainedConfig

from asynchicache.cache import HybridCache, Request
from asynchicache.errors import RequestStateError, UsageError
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import (
    SavedStates,
    new_cache,
    restore,
    write_pages,
    write_saved_states,
    write_states,
)
from asynchicache.specs import ModelSpec, PoolSpec
from asynchicache.specs.huggingface import check_config


class HitSlots(msgspec.Struct, frozen=True, array_like=True):
    """Where the tokens of a hit are.

    Attributes:
        pages: slots of all pages, from the beginning.
        window: slots of the last pages, in the window pool; empty without windows.
        state: slot of the states; None without states.
    """

    pages: list[int] = []
    window: list[int] = []
    state: int | None = None


class PageRun(msgspec.Struct, frozen=True, array_like=True):
    """Slots of consecutive pages of a sequence, from the page with index `first` on."""

    pool: str
    first: int
    slots: list[int]


class NewSlots(msgspec.Struct, frozen=True, array_like=True):
    """Where computed tokens go.

    Attributes:
        pages: the pages that are copied, by pool.
        states: whether states are copied.
        state: their slot; None if the request has none.
        inside: whether the tokens may end inside the last page.
    """

    pages: list[PageRun]
    states: bool
    state: int | None
    inside: bool


class PrefixCopies:
    """Copies between one rank's pools and the memory of its model. Methods may run on the model's thread.

    Attributes:
        pools: device memory, by layer.
        has_states: whether the model has recurrent layers, or others that keep states.
        window_pages: pages of sliding windows that are kept at the end of a prefix; 0 without windows.
    """

    def __init__(
        self, config: PreTrainedConfig, spec: ModelSpec, tensor: Callable[[str, str], torch.Tensor]
    ) -> None:
        """
        Args:
            tensor: returns the device memory of a pool and tensor.
        """
        self.pools = PoolMap(
            spec,
            {
                pool.name: {part.name: tensor(pool.name, part.name) for part in pool.tensors}
                for pool in spec.pools
            },
        )
        self.config = config
        _, *others = spec.owners
        self.window_pages = max((pool.coverage.kept for pool in others if pool.per_token), default=0)
        self.has_states = any(not pool.per_token for pool in others)

    def restore(self, tokens: int, slots: HitSlots) -> DynamicCache:
        """Return model memory with the first `tokens` tokens of a sequence."""
        return restore(self.config, self.pools, slots.pages, tokens, slots.state, window_slots=slots.window)

    def save(
        self,
        memory: DynamicCache,
        stop: int,
        slots: NewSlots,
        *,
        row: int = 0,
        states: SavedStates | None = None,
    ) -> None:
        """Copy pages that end at `stop`, and states.

        Args:
            memory: holds exactly `stop` tokens, if states are copied and `states` is None.
            stop: end of the forward.
            slots: the destination.
            row: index of the sequence in `memory`.
            states: states saved at `stop` tokens, if `memory` holds more by now.

        Raises:
            UsageError: the states are of another length, or pages are missing.
        """
        end = stop if slots.inside else None
        for run in slots.pages:
            write_pages(memory, self.pools, run.first, run.slots, pool=run.pool, row=row, tokens=end)
        if not slots.states:
            return
        assert slots.state is not None, "new_slots has looked"
        if states is None:
            write_states(memory, self.pools, slots.state, row=row, tokens=stop)
        elif states.tokens == stop:
            write_saved_states(states, self.pools, slots.state)
        else:
            raise UsageError(f"the saved states are those of {states.tokens} tokens, not of {stop}")


class CacheBridge:
    """Copies the content of a request's slots to model memory, and back.

    `restore` and `save` access device memory, and only note in the request what was saved. They may run on
    the model's thread while the event loop runs, as long as the request does not change meanwhile.

    Args:
        cache: a cache whose spec is, or contains, the model's spec.
        spec: the model's own spec, if the cache is for a target with its draft.
        prefix: prefix of the draft's pools, if the model is the draft; as given to `ModelSpec.with_draft`.

    Attributes:
        copies: the copies themselves.
        tails: whether prefixes may end inside a page.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        cache: HybridCache,
        *,
        spec: ModelSpec | None = None,
        prefix: str = "",
    ) -> None:
        if not isinstance(cache, HybridCache):
            given = f"{type(config).__name__} and {type(cache).__name__}"
            raise UsageError(f"CacheBridge(config, cache) takes an open HybridCache, not {given}")
        check_config(config)
        spec = spec or cache.spec
        if (layers := len(new_cache(config))) != len(spec.stage):
            raise UsageError(f"the config has {layers} layers, the spec of the cache {len(spec.stage)}")
        names = {pool.name: f"{prefix}_{pool.name}" if prefix else pool.name for pool in spec.pools}
        self.copies = PrefixCopies(
            config, spec, lambda pool, tensor: cache.device_tensor(names[pool], tensor)
        )
        self.tails = cache.tails
        self._page_size = spec.page_size
        self._full, *others = spec.owners
        self._windows = [pool for pool in others if pool.per_token]
        self._state = next((pool.name for pool in others if not pool.per_token), None)
        # The draft's pools share the slots of the target's pools.
        self._owners = {name: cache.spec.pool(full).slots_of or full for name, full in names.items()}
        self._restored: WeakKeyDictionary[Cache, ReferenceType[Request]] = WeakKeyDictionary()

    def hit_slots(self, request: Request) -> HitSlots:
        """Where the hit of a request is.

        Args:
            request: loaded, with its ticket awaited, and not extended yet.

        Raises:
            RequestStateError: the request was extended, or its load has not ended.
        """
        request.check_landed()
        tokens = request.hit.tokens
        if request.reserved > tokens:
            raise RequestStateError(
                f"the request was extended to {request.reserved} tokens: restore it before"
            )
        if not tokens:
            return HitSlots()
        pages = request.pages(self._owners[self._full.name])[: -(-tokens // self._page_size)]
        window = [slot for pool in self._windows for slot in self._window(request, pool, tokens)]
        return HitSlots(list(pages), window, self._state_slot(request))

    def _window(self, request: Request, pool: PoolSpec, tokens: int) -> list[int]:
        """Return the slots of the last pages of a hit of `tokens` that the window covers."""
        slots = request.pages(self._owners[pool.name])
        pages = (pool.coverage.pages or 0) + (tokens % self._page_size > 0)
        return list(slots[-min(pages, len(slots)) :]) if slots else []

    def _state_slot(self, request: Request) -> int | None:
        return None if self._state is None else request.state(self._owners[self._state])

    def new_slots(self, request: Request, start: int, stop: int) -> NewSlots:
        """Where the pages go that tokens `start` to `stop` complete, and the states if `stop` ends a page.
        With tails, also the page that `stop` is in, and the states in any case.

        Args:
            request: extended to at least `stop` tokens.
            start: tokens saved or restored before.
            stop: end of the forward.

        Raises:
            RequestStateError: the request has no room for `stop` tokens, or those before `start` were neither
                restored nor saved, or copies of its states are still running.
        """
        request.check_landed()
        request.check_written(self, start, stop)
        runs = [self._page_run(request, pool, start, stop) for pool in (self._full, *self._windows)]
        states = self._state is not None and (stop % self._page_size == 0 or self.tails)
        return NewSlots(runs, states, self._state_slot(request) if states else None, self.tails)

    def saved(self, request: Request, stop: int, slots: NewSlots) -> None:
        """Note that what `new_slots` named up to `stop` was copied; `request` refuses to publish more."""
        request.written(self, stop, states=None if self._state is None else slots.states)

    def _page_run(self, request: Request, pool: PoolSpec, start: int, stop: int) -> PageRun:
        owner = self._owners[pool.name]
        base = request.first_page(owner)
        begin = max(start // self._page_size, base)  # skip pages that the window has passed
        pages = -(-stop // self._page_size) if self.tails else stop // self._page_size
        return PageRun(pool.name, begin, list(request.pages(owner)[begin - base : pages - base]))

    def restore(self, request: Request) -> DynamicCache:
        """Return model memory with the first `request.hit.tokens` tokens; `request` as for `hit_slots`."""
        _check_is("restore", "a request of the cache", request, Request)
        memory = self.copies.restore(request.hit.tokens, self.hit_slots(request))
        self._restored[memory] = ref(request)
        # From here on, `request` refuses to publish what was not saved.
        request.written(self, request.hit.tokens, states=None if self._state is None else True)
        return memory

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
        """Copy what `new_slots` names.

        Call it after a forward that ended at `stop` and after `request.extend`, before
        `request.checkpoint(stop)` or `request.snapshot(stop)`, which refuse what was not saved. Arguments and
        errors are those of `new_slots` and `PrefixCopies.save`.
        """
        _check_is("save", "a request of the cache", request, Request)
        _check_is("save", "what restore() returned (an output's past_key_values)", memory, Cache)
        restored = self._restored.get(memory, ref(request))()
        if restored is not None and restored is not request and restored.inspect() is not None:
            raise UsageError(f"this memory is that of another open request, {restored!r}: save it there")
        held = int(memory.get_seq_length())
        if states is None and held != stop:
            raise UsageError(
                f"the model's memory holds {held} tokens, not {stop}: save where a forward ended; take a row "
                "out of a padded batch first (batches.select)"
            )
        slots = self.new_slots(request, start, stop)
        self.copies.save(memory, stop, slots, row=row, states=states)
        self.saved(request, stop, slots)


def _check_is(verb: str, wanted: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise UsageError(f"{verb}() takes {wanted}, not {type(value).__name__}")
