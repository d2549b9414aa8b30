"""A request: the object that an engine uses to serve one prompt.

More than 900 lines: both kinds of request stay with what they have in common.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

from asynchicache.controller.cache_parts import CacheParts
from asynchicache.controller.phases import RequestSpans, phase
from asynchicache.controller.recorder import RecordedRequest
from asynchicache.errors import ClosedError, RequestStateError, UnknownPoolError, UsageError
from asynchicache.planner.actions import Copy
from asynchicache.planner.engine_pages import NamedPages
from asynchicache.planner.hints import NO_HINT
from asynchicache.planner.request_state import RequestState
from asynchicache.streams.base import Stream
from asynchicache.transfer.plan import Direction
from asynchicache.transfer.record import OnWait
from asynchicache.transfer.ticket import Ticket, done_ticket
from asynchicache.tree.node import FULL, Node
from asynchicache.types import KEY_WORDS, Hit, MissReason, Tier, as_count, key_array, token_array


class BaseRequest:
    """One prompt and what is generated for it, as far as `Request` and `EngineRequest` have it in common.

    Attributes:
        made_at: where it was made, as `file:line`, for reports.
        record: of it, in the trace that the cache writes, if it does.
        keeps_record: in a trace, another request goes on with its answer; `end_record` says that none does.
        record_of: the request that this one goes on with, so that a trace has both as one.
        spans: of its phases, if the cache is traced.
    """

    def __init__(self, parts: CacheParts, tokens: array[int], seed: bytes, prompt: int | None = None) -> None:
        """
        Args:
            tokens: of the prompt; or the words of its page keys, and one more if it goes on behind them.
            seed: the digest of its namespace.
            prompt: tokens of the prompt, with page keys. Default: the length of `tokens`.
        """
        self._parts = parts
        self._planner = parts.planner
        self._executor = parts.executor
        self._seed = seed
        self._namespace = parts.namespaces.named(seed)
        self._tokens = tokens
        self._prompt = len(tokens) if prompt is None else prompt
        self._page_keys = parts.planner.inventory.page_keys
        self._stream: Stream | None = None
        self._state: RequestState | None = None
        self._closed = False
        self.made_at = ""
        self.hint = NO_HINT
        self.spans: RequestSpans | None = None
        self.record_of: BaseRequest | None = None
        self.keeps_record = False
        self.record: RecordedRequest | None = None
        self._left: RequestState | None = None

    # Life

    @phase("lookup")
    async def __aenter__(self) -> Self:
        if self._state is not None or self._closed:
            raise RequestStateError("a request is used once; ask the cache for another")
        self._executor.check_open()
        self._parts.tell_time()
        self._state = state = self._planner.open(self._tokens, self._seed, self._prompt, self.hint)
        state.made_at = self.made_at
        if self.record_of is not None:
            self.record = self.record_of.record
        elif self._parts.recorder is not None:
            self.record = self._parts.recorder.opened(state)
        if self._stream is not None:
            state.runs_on(self._stream)
        self._parts.namespaces.remember(self._seed, self._namespace)
        self._count_hit(state)
        return self

    @phase()
    async def __aexit__(self, *error: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # a type checker knows

        def __enter__(self) -> None:
            raise UsageError("a request is used by `async with cache.request(...) as request`")

        def __exit__(self, *error: object) -> None:
            pass

        __await__ = __enter__

    def _count_hit(self, state: RequestState) -> None:
        self._executor.run(self._planner.count_hit(state))

    def run_on(self, stream: Stream) -> Self:
        """Set the stream of the request's forwards; call it before entering the request.

        It becomes the default of `after`. Leaving the request frees what it holds only after the work
        enqueued on this stream.
        """
        if not self._executor.copies_here:
            raise UsageError("run_on(): the copies of this cache run elsewhere, where no stream is known")
        self._executor.check_stream(stream)
        self._stream = stream
        return self

    def close(self, after: Stream | None = None) -> None:
        """Free what the request holds; idempotent. Leaving `async with` calls it in every case.

        That is once every known stream has done the work enqueued now: the stream of `run_on`,
        streams that waited for a fence of the request's tickets, and streams given as `after`. A launched
        forward that is cancelled before publication therefore never writes to slots of another request.

        Args:
            after: one more stream that may still read or write what the request holds.

        Raises:
            UsageError: `after` is not a stream of the cache's device, or another thread or loop calls; the
                request stays open.
        """
        self._executor.loop.check()
        self._executor.check_stream(after)
        state, self._state, self._closed = self._state, None, True
        if state is not None:
            self._free(state, after)

    def _free(self, state: RequestState, after: Stream | None) -> None:
        if after is not None:
            state.runs_on(after)
        state.closed = True
        self._parts.prefetcher.leave(state)
        self._left = state
        if not self.keeps_record:
            self.end_record()
        for stream in list(state.streams) if not self._executor.stopped else ():
            state.references += 1
            self._executor.when_reached(stream, partial(self._planner.release, state))
        self._planner.release(state)
        self._executor.notify()

    def end_record(self) -> None:
        """Have a trace end the request here, if it has not ended yet; once it was left."""
        recorder, record, left = self._parts.recorder, self.record, self._left
        if recorder is not None and record is not None and left is not None:
            recorder.ended(record, left)

    def _open(self) -> RequestState:
        if self._state is None:
            word = "closed" if self._closed else "not entered"
            raise RequestStateError(f"the request is {word}; use it inside `async with`")
        return self._state

    def _in_use(self) -> RequestState:
        state = self._open()
        self._executor.check_open()
        self._parts.tell_time()
        return state

    def inspect(self) -> RequestState | None:
        """What the planner knows of an open request, as `HybridCache.inspect`; None before and after."""
        return self._state

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._stage()}, {len(self._tokens)} tokens>"

    def _stage(self) -> str:
        state = self._state
        if state is None:
            return "closed" if self._closed else "not entered"
        if state.loaded:
            restored = f"{state.hit_tokens(self._planner.inventory.page_size)} restored"
            return f"finished, {restored}" if state.finished else f"loaded, {restored}"
        return "resting" if state.resting else f"matched, {self.hit.tokens} to restore"

    # Properties

    @property
    def tokens(self) -> array[int]:
        """Prompt and generated ids so far.

        Raises:
            UsageError: the prefix was given as page keys.
        """
        if self._page_keys:
            raise UsageError("the prefix was given as page keys; its tokens are not known")
        return self._tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._prompt

    @property
    def hit(self) -> Hit:
        """The hit: an estimate before `load`, exact after it."""
        state = self._open()
        size = self._planner.inventory.page_size
        tokens = state.hit_tokens(size)
        full = max(tokens, (state.branching_pages or 0) * size)
        tier = state.tier if state.loaded else self._planner.loads.tier(state)
        by_tier = {tier: tokens} if tokens else {}
        held_back = self._planner.hit_advice(state)
        by_stage = self._parts.storage.by_stage(state.stage, by_tier.get(Tier.STORAGE, 0))
        return Hit(tokens, by_tier, self._planner.reason(state), full, *held_back, by_stage)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Lengths at which a prefill of the prompt should stop, so that other requests can resume there.

        The option `checkpoints` selects them: the branch point, where other prompts left this one's path
        (`mamba_branching_seqlen`), the end of the prompt in whole pages, and multiples of a spacing. Models
        with windows and no states need only the branch point. With it goes the end of the host, in prompts
        that are longer than that. Empty if every page can be resumed at.
        """
        return self._planner.cuts(self._open())

    @property
    def keeps_output(self) -> bool:
        """Whether to keep a state at the end of the output, as the option `checkpoints` says."""
        return self._planner.checkpoints.output

    # Before the load

    @phase("prefetch")
    async def prefetch(self, *, until: int = 0, seconds: float | None = None) -> Hit:
        """Read the prefix from storage to the host, and wait as long as the policy says.

        At the deadline, the hit is what arrived in order. Always a cancellation point. If this waiter is
        cancelled, pages that nobody else waits for, and whose read has not begun, are not read.

        Args:
            until: first wait until storage and memory together can restore so many tokens: another process
                computes them, and its `published` says how many. At most what could ever be restored is
                waited for: whole pages without `tails`, and not the last token. Default: 0, do not wait.
            seconds: the longest such wait; what is there then is read. Default:
                `PrefetchOptions.max_seconds`.

        Raises:
            UsageError: `until` or `seconds` is no number of 0 or more.
            ClosedError: the cache is closing.
        """
        state = self._unloaded("prefetch")
        wait = self._parts.prefetcher.checked_wait(until, seconds)
        await self._executor.checkpoint()
        await self._parts.prefetcher.prefetch(state, *wait)
        return self.hit

    @property
    def published(self) -> int:
        """Tokens of the prefix that the request published, or matched if that is longer, up to where another
        request can go on: what `durable` vouches for, and another process waits for (`prefetch(until=...)`).
        """
        return self._planner.promise(self._open()).tokens(self._planner.inventory.page_size)

    def rest(self) -> None:
        """Release the match while waiting for something else, such as a turn on the model.

        What was read from storage for the request stays on the host, and what there was no room or time for
        is read meanwhile, in order of turn; other matched pages may be evicted. Call `rematch` before `load`.

        Raises:
            RequestStateError: after `load`.
        """
        state = self._unloaded("rest")
        self._planner.rest(state)
        self._parts.prefetcher.rest(state)
        self._executor.notify()

    def rematch(self) -> Hit:
        """Match again and lock the result: other requests may have published more of the prompt.

        Raises:
            RequestStateError: after `load`.
        """
        self._parts.prefetcher.rematch(self._unloaded("rematch"))
        return self.hit

    def _unloaded(self, verb: str) -> RequestState:
        state = self._in_use()
        if state.loaded:
            raise RequestStateError(f"{verb}() comes before load()")
        return state

    # What loads and checkpoints of both kinds do

    def _loadable(self) -> RequestState:
        state = self._in_use()
        if state.loaded:
            raise RequestStateError("load() was called already; its ticket serves every waiter")
        if state.resting:
            raise RequestStateError("the request rests; call rematch() first")
        return state

    def _load_of_nothing(self, state: RequestState) -> list[Copy] | None:
        """What a load copies if nothing can be restored: the device has failed, or the weights changed."""
        if self._executor.failure is not None:
            return self._planner.loads.load_nothing(state)
        if state.epoch != self._planner.inventory.tree.epoch or self._planner.changes_weights:
            return self._planner.loads.load_nothing(state, MissReason.WEIGHTS)
        return None

    def _start_load(
        self, state: RequestState, copies: list[Copy], end: Node, *, after: Stream | None, counted: bool
    ) -> Ticket:
        """Run the copies of a load; `end`: the end of the path that it uses."""
        self._parts.storage_writer.use(end)
        if counted and not state.resumed:
            self._parts.count_served(state)
        ticket = self._executor.run(copies, self._on_wait(state), after=after)
        assert ticket is not None, "a load has a copy, if an empty one"
        return ticket

    def _on_wait(self, state: RequestState) -> OnWait:
        """What a ticket calls with each stream that one of its fences makes wait."""
        return partial(self._waits, state)

    def _waits(self, state: RequestState, stream: Stream) -> None:
        self._executor.check_stream(stream)
        state.runs_on(stream)

    def _publishes(self, state: RequestState) -> bool:
        """Whether checkpoints are published: the device is well, the weights are those of the match and not
        about to change, and the request's hint allows it."""
        current = state.epoch == self._planner.inventory.tree.epoch and not self._planner.changes_weights
        return current and self._executor.failure is None and not state.hint.transient

    def _order_after(self, state: RequestState, stream: Stream | None) -> None:
        if stream is not None:
            state.runs_on(stream)
            self._executor.order_after(stream)

    def append(self, tokens: Iterable[int]) -> None:
        """Add generated token ids to the sequence.

        Raises:
            InvalidTokensError, RequestStateError: as for a prompt; after a final checkpoint.
            UsageError: the prefix was given as page keys; see `append_keys`.
        """
        if self._page_keys:
            raise UsageError("the prefix was given as page keys; append_keys() adds more")
        self._add(len(self._tokens), token_array(tokens))

    def append_keys(self, keys: Sequence[bytes]) -> None:
        """Add the keys of the next whole pages.

        Raises:
            InvalidTokensError, RequestStateError: a key is not 32 bytes; after a final checkpoint.
            UsageError: the prefix was given as tokens.
        """
        if not self._page_keys:
            raise UsageError("the prefix was given as tokens; append() adds more")
        whole = len(self._tokens) // KEY_WORDS * KEY_WORDS
        self._add(whole, key_array(keys) + self._tokens[whole:])  # the last word says that the prompt goes on

    @staticmethod
    def _not_final(state: RequestState) -> RequestState:
        if state.finished:
            raise RequestStateError("the request is finished: its last checkpoint was final")
        return state

    def _add(self, at: int, words: array[int]) -> None:
        """Replace what is known from word `at` on."""
        state = self._not_final(self._open())
        self._executor.loop.check()
        try:
            self._tokens[at:] = words
        except BufferError:  # a view exists (numpy, say): copy, the view keeps the old ids
            state.tokens = self._tokens = self._tokens[:at] + words

    def computed(self, tokens: int, seconds: float, *, context: int | None = None) -> None:
        """Report how long a prefill took, so that storage is read only where that is faster; see
        `PrefetchOptions.load_or_compute`.

        Args:
            seconds: that the forward took.
            context: tokens before them. Default: those of the hit.

        Raises:
            ConfigError: a number is negative, or nothing was computed.
        """
        tokens = as_count("computed", tokens)
        before = self.hit.tokens if context is None else as_count("computed", context, "context=")
        self._parts.costs.computed(tokens, before, seconds)

    @property
    def reports_costs(self) -> bool:
        """Whether the cache uses what `computed` reports."""
        return self._parts.reports_costs

    async def durable(self) -> bool:
        """Wait until storage has the prefix that the request published, and any clear that might remove it
        has ended; then ask storage.

        The prefix is that of the last checkpoint, or the match if that is longer, whatever the request went
        through since: `suspend`, `rest`, `rematch`, eviction. It is what a restart could restore: the whole
        pages, with `tails` the page that a finished request ended in, and the window and the states of the
        last checkpoint that had states to keep (at a whole number of pages, or a snapshot). Windows of
        earlier checkpoints are written too, as far as memory has them.

        Returns:
            True if storage was asked and has all of it. False if there is no storage, or it refuses, or does
            not answer; if a page, window or state found no room in a tier above it; if a checkpoint could not
            be published, because the device had failed or the weights had changed; or if no checkpoint of a
            model with states had any, so that nothing could be restored.
        """
        state = self._in_use()
        await self._executor.checkpoint()
        return await self._parts.storage_writer.durable(state)


class Request(BaseRequest):
    """A request that computes in slots of the cache's own device memory; an async context manager, used once.

    Order: enter (match and lock), `prefetch` and `admit` (optional), `load`, then `extend`, `append` and
    `checkpoint` for each forward. Leaving frees every slot that was not published.
    """

    _copying: Ticket | None = None  # its copies may run on: nobody has waited, and no stream

    @property
    def reserved(self) -> int:
        """Tokens that the request's pages have room for: the restored ones and those of `extend`."""
        return self._loaded().reserved

    def pages(self, pool: str) -> list[int]:
        """Device slots of the request's pages of a pool, in order: the restored ones first.

        A sliding window keeps only the last pages, from page number `first_page(pool)` on.

        Raises:
            RequestStateError: before `load`.
            UnknownPoolError: the pool has no pages.
        """
        state = self._loaded()
        component_id = self._page_pool(pool)
        return list(state.pages if component_id == FULL else state.windows[component_id].slots)

    def first_page(self, pool: str) -> int:
        """Number of the first page in `pages(pool)`: 0, or the current start of a sliding window.

        Raises:
            RequestStateError, UnknownPoolError: as `pages`.
        """
        state = self._loaded()
        component_id = self._page_pool(pool)
        return 0 if component_id == FULL else state.windows[component_id].first

    def _page_pool(self, pool: str) -> int:
        """The component whose slots a pool with pages uses."""
        inventory = self._planner.inventory
        for component_id in (FULL, *(component.id for component in inventory.tree.windows)):
            if pool in inventory.sharing(component_id):
                return component_id
        raise self._unknown_pool(pool, "pages", "states")

    def _unknown_pool(self, pool: str, asked: str, other: str) -> UnknownPoolError:
        """The error of `pages` or `state`, which was `asked` for a pool of the other kind, or of none."""
        spec = self._planner.inventory.spec
        with_pages = [one.name for one in spec.pools if one.per_token]
        with_states = [one.name for one in spec.pools if not one.per_token]
        names = {"pages": with_pages, "states": with_states}
        cure = f", or with {other}: {names[other]}"
        if pool in names[other]:
            cure = (
                f": state({pool!r}) is its slot" if other == "states" else f": pages({pool!r}) are its slots"
            )
        return UnknownPoolError(f"{pool!r} is none of the pools with {asked} {names[asked]}{cure}")

    def state(self, pool: str) -> int:
        """Device slot of the request's own working state of a pool; the restored state is copied there.

        Raises:
            RequestStateError: before the first `load` or `extend` that found a slot, or after a final
                checkpoint, which publishes the slot itself.
            UnknownPoolError: the pool has no states.
        """
        state = self._loaded()
        cache = self._planner.inventory
        ids = (one.id for one in cache.tree.components if not one.paged and pool in cache.sharing(one.id))
        component_id = next(ids, None)
        if component_id is None:
            raise self._unknown_pool(pool, "states", "pages")
        if component_id not in state.states and state.finished:
            raise RequestStateError(f"the last checkpoint was final, and published the {pool!r} state slot")
        if component_id not in state.states:
            raise RequestStateError(f"the request has no {pool!r} state slot yet; extend() takes one")
        return state.states[component_id]

    async def admit(self) -> Hit:
        """Wait until the device has room for `load`, so that no hit is lost for lack of room.

        Without it, `load` uses what is free or evictable at once. Call `load` next, without an `await` in
        between.

        Raises:
            CapacityError: nothing in flight could free enough.
            RequestStateError: after `load`, or the request was closed meanwhile.
            ClosedError: the cache was closed.
        """
        state = self._unloaded("admit")
        await self._executor.checkpoint()
        await self._parts.admission.admit(state)
        return self.hit

    @phase()
    def load(self, *, counted: bool = True) -> Ticket:
        """Enqueue the copies that put the prefix and its states on the device.

        Falls back to a shorter prefix if there is no room; see `hit`.

        Args:
            counted: whether statistics count the request as served. Use False for a request that only
                publishes pages computed for another request, which is counted already.

        Raises:
            RequestStateError: called twice, or the request rests.
        """
        state = self._loadable()
        copies = self._load_of_nothing(state)
        if copies is None:
            copies = self._planner.loads.load(state)
        self._parts.prefetcher.leave(state)
        end = state.lease.node if state.whole_tail is None else state.whole_tail
        self._copying = ticket = self._start_load(state, copies, end, after=None, counted=counted)
        return ticket

    def _waits(self, state: RequestState, stream: Stream) -> None:
        self._executor.check_stream(stream)
        state.runs_on(stream)
        self._copying = None  # what follows on this stream is ordered

    @phase()
    def extend(self, tokens: int) -> dict[str, list[int]]:
        """Allocate room for `tokens` more tokens after the restored and extended ones; evicts if necessary.

        A sliding-window pool also needs a slot for each new page. If that pool is smaller than the prompt,
        prefill in chunks, with `advance` or `checkpoint` between them.

        Returns:
            By pool, the new device slots: one per new page.

        Raises:
            CapacityError: not enough can be evicted; `reserve` waits instead.
        """
        return self._parts.admission.extend(*self._growing("extend", tokens))

    @phase()
    async def reserve(self, tokens: int) -> dict[str, list[int]]:
        """As `extend`, but waits while other requests hold the pages.

        Raises:
            CapacityError: nothing in flight could free any; also if all requests that hold pages wait for
                room too.
            RequestStateError: the request was closed meanwhile.
            ClosedError: the cache was closed.
        """
        state, count = self._growing("reserve", tokens)
        await self._executor.checkpoint()
        return await self._parts.admission.reserve(state, count)

    def _growing(self, verb: str, tokens: int) -> tuple[RequestState, int]:
        state, count = self._unfinished(), as_count(verb, tokens)
        self._executor.check_open()
        self._parts.tell_time()
        if count < 0:
            raise RequestStateError(f"{verb}({count}): a number of tokens, 0 at least")
        return state, count

    def advance(self, length: int, *, after: Stream | None = None) -> None:
        """Report that the first `length` tokens are computed: frees pages before the sliding windows.

        The pages that the last page boundary in `length` needs stay, so that it can be published.
        `checkpoint` does this too. Pools that need every page are not changed.

        Args:
            length: where a forward ended; at most the extended length.
            after: the stream of the forward: pages are freed after the work enqueued on it.

        Raises:
            RequestStateError: before `load`, or `length` is out of range.
        """
        self._executor.loop.check()
        self._executor.check_stream(after)
        state, length = self._unfinished(), as_count("advance", length)
        if not 0 <= length <= state.reserved:
            raise RequestStateError(f"length {length} is outside 0..{state.reserved}, the room it has")
        after = after or self._stream
        if after is not None:
            state.runs_on(after)
        self._retire(state, length, after)

    def _retire(self, state: RequestState, length: int, after: Stream | None) -> None:
        """Free the pages before the windows, after the work enqueued on `after`."""
        retired = self._planner.windows.retire(state, length)
        if retired is None:
            return
        if after is None or self._executor.stopped:
            self._planner.windows.finish(retired)
            self._executor.notify()
            return
        self._executor.when_reached(after, partial(self._planner.windows.finish, retired))

    def check_landed(self) -> None:
        """Check that slots of the request may be read and written: their last copy has ended, or a stream
        waits for it.

        Raises:
            RequestStateError: nothing has waited for the ticket of `load`, `checkpoint` or `snapshot`.
            ClosedError: the cache is closed.
        """
        if self._executor.closing:  # and no look at the loop: the thread that computes may call
            raise ClosedError("the cache is closed")
        if self._copying is not None and not self._copying.done:
            raise RequestStateError(
                "copies are still running: await load(), and each checkpoint() and snapshot()"
            )

    def check_written(self, writer: object, start: int, stop: int) -> None:
        """Check that `writer` may write tokens `start` to `stop` to the request's slots now.

        Raises:
            RequestStateError: there is no room for them, or those before `start` were neither restored nor
                written.
        """
        state = self._unfinished()
        if not 0 <= start <= stop <= state.reserved:
            raise RequestStateError(
                f"tokens {start} to {stop} cannot be written: the request has room for {state.reserved}; "
                "call extend() first"
            )
        tokens, _ = self._written_by(state, writer)
        if start > tokens:
            raise RequestStateError(f"tokens {tokens} to {start} were neither restored nor written")

    def written(self, writer: object, stop: int, *, states: bool | None) -> None:
        """Report what was written; from then on, publishing more is refused.

        May be called on the thread that writes.

        Args:
            writer: who has written; with several, each reports its own pools.
            stop: it has written the pages up to so many tokens.
            states: whether it has written the working states there; None if it writes none at all.
        """
        state = self._unfinished()
        tokens, of_states = self._written_by(state, writer)
        state.written[writer] = max(tokens, stop), None if states is None else stop if states else of_states

    def _written_by(self, state: RequestState, writer: object) -> tuple[int, int | None]:
        restored = state.hit_tokens(self._planner.inventory.page_size)
        return state.written.get(writer, (restored, restored))

    def _check_reached(self, verb: str, state: RequestState, length: int, *, states: bool) -> None:
        """Check `length` against what was reported by `written`.

        Args:
            length: that it publishes.
            states: it uses the working states.

        Raises:
            RequestStateError: the forward that was reported last did not end there.
        """
        for tokens, of_states in state.written.values():
            if length > tokens:
                raise RequestStateError(f"{verb}({length}): only {tokens} tokens were written")
            if states and state.states and of_states not in (None, length):
                raise RequestStateError(
                    f"{verb}({length}): the states in their slot are those of {of_states} tokens; end a "
                    f"forward at {length}, and save there"
                )

    @phase()
    def snapshot(self, length: int, *, after: Stream | None = None) -> Ticket:
        """Copy the working states, which must be at `length` tokens; replaces the previous snapshot.

        For a decode loop that does not know where it will end: take a snapshot at each page boundary, and
        publish the last with `checkpoint`. Arguments and ticket as for `checkpoint`.

        Raises:
            RequestStateError: as of `checkpoint`, or `length` is not a whole number of pages.
        """
        self._executor.check_stream(after)
        state, length = self._checked("snapshot", length)
        size = self._planner.inventory.page_size
        if length % size:
            raise RequestStateError(
                f"snapshot({length}): states are published at whole pages of {size} tokens, such as "
                f"{length - length % size}"
            )
        self._check_reached("snapshot", state, length, states=True)
        self._order_after(state, after or self._stream)
        return self._copy_states(state, self._planner.snapshot(state, length))

    @phase("checkpoint")
    def checkpoint(
        self, length: int, *, after: Stream | None = None, final: bool = False, states: bool = True
    ) -> Ticket:
        """Publish the whole pages up to `length` tokens, and the state there.

        The state is the snapshot taken at `length`; else the working state, if `length` is a whole number
        of pages. Nothing is published after a device failure.

        With the option `tails`, the page that `length` ends in is published too. If `final`, it is the page
        itself, with the working state and the window. Otherwise it is a copy, as the request goes on to fill
        it, and only of models with attention alone. So the ticket may be that of a page's copy.

        Args:
            length: where a forward ended; at most the extended and appended length.
            after: the stream of the forward; copies run after the work enqueued on it. Other requests match
                the pages at once, so their forwards must run on this stream too, or wait for it.
            final: the request computes nothing more. Its working state is handed over, without a copy and
                without a second state slot, which might not be free.
            states: publish the state too; False where the option `checkpoints` wants none (`cuts`,
                `keeps_output`). Models without states ignore it.

        Returns:
            The ticket of the state's copy. The next forward overwrites the working state, so it must
            come after: `await ticket`, or, on the device, `await ticket.submitted(layer)` and
            `ticket.fence(layer).wait_on(stream)`.

        Raises:
            RequestStateError: before `load`, `length` is out of range, or not what `written` reported.
        """
        after = after or self._stream
        self._executor.check_stream(after)
        state, length = self._checked("checkpoint", length)
        uses_states = states and self._uses_states(state, length, final=final)
        self._check_reached("checkpoint", state, length, states=uses_states)
        self._order_after(state, after)
        if self._publishes(state):
            copies = self._planner.publish(state, length, final=final, states=states)
        else:
            copies, state.published.lost = [], True
        ticket = self._copy_states(state, copies)
        self._retire(state, length, after)
        return ticket

    def _uses_states(self, state: RequestState, length: int, *, final: bool) -> bool:
        """Whether a checkpoint publishes the working states."""
        cache = self._planner.inventory
        if state.snapshots and state.snapshot_tokens == length:
            return False
        whole = length % cache.page_size == 0
        inside = cache.tails and (final or length in state.hint.repeats)
        return length >= state.borrowed * cache.page_size and (whole or inside)

    def _copy_states(self, state: RequestState, copies: list[Copy]) -> Ticket:
        """Run the copies; returns the ticket of the states' copy, a done one if there is none."""
        ticket = self._executor.run(copies, self._on_wait(state))
        if ticket is None or copies[-1].direction is not Direction.FORK:
            return done_ticket(self._planner.inventory.spec.layers, self._on_wait(state))
        self._copying = ticket
        return ticket

    def suspend(self, length: int, *, after: Stream | None = None) -> None:
        """Publish what is computed and give back all slots, for others to run first.

        Publishes the whole pages up to `length` tokens, with the state there: the working state if `length`
        is a whole number of pages (with `tails`, in any case), else the last snapshot, if a state slot is
        free for it. The request then
        rests, as after `rest`. To go on, call `rematch` (and `prefetch`), and `load`: `hit` says where. It is
        not counted in the statistics again.

        Arguments as for `checkpoint`: no forward of the request may run on, except on `after`.

        Raises:
            RequestStateError: before `load`, after a final checkpoint, or as of `checkpoint`.
            CapacityError: the request has more tokens than the device holds, so it could not be resumed.
        """
        self._executor.check_stream(after)
        before, length = self._checked("suspend", length)
        self._check_reached("suspend", before, length, states=self._uses_states(before, length, final=True))
        resumed = self._planner.reopen(before)
        published = before.borrowed * self._planner.inventory.page_size
        if before.states and published < before.snapshot_tokens < length:
            self.checkpoint(before.snapshot_tokens, after=after)
        self.checkpoint(length, after=after, final=True)
        self._state = resumed
        self._free(before, after)
        self._planner.rematch(resumed, prefetched=False)
        self._planner.rest(resumed)

    def _checked(self, verb: str, length: int) -> tuple[RequestState, int]:
        state, length = self._unfinished(), as_count(verb, length)
        self._executor.check_open()
        known = min(len(self._tokens), state.reserved)
        if not 0 <= length <= known:
            raise RequestStateError(
                f"length {length} is outside 0..{known}: the request has {len(self._tokens)} tokens "
                f"and room for {state.reserved}; call append() and extend() first"
            )
        return state, length

    def _loaded(self) -> RequestState:
        state = self._open()
        if not state.loaded:
            raise RequestStateError("call load() first: it says where the prefix ends")
        return state

    def _unfinished(self) -> RequestState:
        return self._not_final(self._loaded())


class EngineRequest(BaseRequest):
    """A request that computes in pages of an engine's device memory; an async context manager, used once.

    Order: enter (match and lock), `prefetch` (optional), `load` into pages that the engine names, then
    `append` and `checkpoint` for each forward. The engine says which pages hold a prefix; there are no slots.
    """

    @phase()
    def load(self, *, into: NamedPages, after: Stream | None = None, counted: bool = True) -> Ticket:
        """Enqueue the copies of the prefix and its states to the engine's pages.

        Restores nothing after a device failure; see `hit`.

        Args:
            into: the engine's pages for the last pages of the hit, by pool that owns slots, in order; earlier
                ones it has itself. None in place of a page: not wanted. Pools that share slots are copied
                along.
            after: the copies run after the work enqueued on this stream, such as forwards that still read the
                pages.
            counted: as of `Request.load`.

        Raises:
            RequestStateError: called twice, or the request rests.
            UsageError: `into` names a pool or page that does not exist, a page twice, one that another load
                is writing, or more pages than the hit needs.
        """
        state = self._loadable()
        self._check_named("load", "into", into, after)
        end, copies = state.lease.node, self._load_of_nothing(state)
        if copies is None:
            copies = self._planner.engine.load(state, into)
        self._parts.prefetcher.leave(state)
        return self._start_load(state, copies, end, after=after, counted=counted)

    @phase("checkpoint")
    def checkpoint(
        self, length: int, *, pages: NamedPages, after: Stream | None = None, final: bool = False
    ) -> Ticket:
        """Copy to the host what it lacks of the whole pages up to `length` tokens, and the state there.

        It is published when it has arrived; storage follows by the write policy. The engine keeps the pages
        as they are until the ticket is done. Nothing is published after a device failure.

        Args:
            length: where a forward ended; at most the appended length.
            pages: the engine's pages with the last pages of the prefix, by pool that owns slots, in order;
                best all of them, as only missing ones are copied. None in place of a page: it is not there. A
                gap before the end of what the host has ends the backup.
            after: the stream of the forward; copies run after the work enqueued on it.
            final: the request computes nothing more.

        Returns:
            The ticket of the copies.

        Raises:
            RequestStateError: `length` is out of range.
            UsageError: `pages` names a pool or page that does not exist, or a page twice.
        """
        after = after or self._stream
        self._check_named("checkpoint", "pages", pages, after)
        state, length = self._in_use(), as_count("checkpoint", length)
        self._not_final(state)
        self._check_known(length)
        size = self._planner.inventory.page_size
        copies = self._planner.engine.backup(
            state, length // size, pages, states=length % size == 0, usable=self._publishes(state)
        )
        state.finished = final
        self._order_after(state, after)
        ticket = self._executor.run(copies, self._on_wait(state))
        return ticket or done_ticket(self._planner.inventory.spec.layers, self._on_wait(state))

    def _count_hit(self, state: RequestState) -> None:
        super()._count_hit(state)
        due = self._planner.due_in_storage(state)
        if due is not None:
            self._parts.storage_writer.store(due)

    def _check_known(self, length: int) -> None:
        """Refuse a length behind what is known of the prefix."""
        cache, known = self._planner.inventory, len(self._tokens)
        if self._page_keys:
            known = known // cache.page_words * cache.page_size
        if not 0 <= length < known + (cache.page_size if self._page_keys else 1):
            raise RequestStateError(
                f"length {length}: the prefix is known up to {known} tokens; append() first"
            )

    def _check_named(self, verb: str, name: str, pages: NamedPages, after: Stream | None) -> None:
        """Refuse what names no pages, and a stream where the copies are handed out."""
        if not isinstance(pages, Mapping):
            raise UsageError(f"{verb}({name}=...) must name the engine's pages by pool, not {pages!r}")
        if after is not None and not self._executor.copies_here:
            raise UsageError(f"{verb}(after=...): the copies run elsewhere, where this stream is not known")
        self._executor.check_stream(after)

    if not TYPE_CHECKING:  # a type checker knows

        def __getattr__(self, name: str) -> object:
            why = ": an engine owns the device memory, and names its pages" if hasattr(Request, name) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}")
