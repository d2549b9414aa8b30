"""Options of the planner."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta

from asynchicache.options import Given, Natural, Options, Share, default
from asynchicache.planner.checkpoints import DEFAULT_WORDS, CheckpointPolicy
from asynchicache.pools.sizing import SizeOptions
from asynchicache.tree.policies import EVICTION, policy
from asynchicache.types import PrefetchPolicy, WritePolicy

_WaitSeconds: TypeAlias = Annotated[float, Meta(ge=0)]
WriteWord: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
_WaitWord: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]


class PlannerOptions(SizeOptions, frozen=True, kw_only=True):
    """What a planner decides by; `SizeOptions` says how large its pools are.

    Attributes:
        page_keys: requests name prefixes by page keys (`HybridCache.request_keys`), such as an engine's block
            hashes, and not by tokens. Default: False.
        tails: prefixes may end inside a page. Has no effect for models with compressed entries, with
            `page_keys`, on several ranks without a group, and where an engine owns the device memory.
            Default: False.
        write_policy: when pages go down. Default: `write_through`.
        clean_share: under `write_back`, device pages kept free or clean. Default: 0.125.
        eviction: `size`, `lru` or `fifo`, for attention pages, or a class as `package.module:Class`, see
            `tree.policies`. Default: `size`.
        checkpoints: where recurrent states are kept: `prompt`, `output`, `branch` and a spacing in tokens,
            joined by `+`, or `none`; see `planner.checkpoints`. Default: `prompt+output+branch`.
    """

    page_keys: bool = False
    tails: bool = False
    write_policy: Given[WritePolicy, WriteWord] = default(WritePolicy.WRITE_THROUGH)
    clean_share: Share = 0.125
    eviction: str = EVICTION
    checkpoints: str = DEFAULT_WORDS

    def check(self) -> None:
        policy(self.eviction)
        CheckpointPolicy.parse(self.checkpoints)


class PrefetchOptions(Options, frozen=True, kw_only=True):
    """How long a request waits for storage.

    Attributes:
        policy: when the request stops waiting. Default: `timeout`.
        base_seconds, seconds_per_ki_token: the deadline of `timeout`: a base plus an amount per 1,024
            tokens requested. Defaults: 2.0 and 0.1 (sgl-project/sglang#23309).
        max_seconds: the longest wait under any policy. Default: 30.
        min_fetch_tokens: fewer tokens than these are computed, not read, as long as costs are not measured.
            Default: 0.
        load_or_compute: read from storage only what takes longer to compute, by measured costs; needs an
            engine that reports them (`Request.computed`). Default: False.

    Raises:
        ConfigError: an option is out of range.
    """

    subject: ClassVar[str] = "prefetch "

    policy: Given[PrefetchPolicy, _WaitWord] = default(PrefetchPolicy.TIMEOUT)
    base_seconds: _WaitSeconds = 2.0
    seconds_per_ki_token: _WaitSeconds = 0.1
    max_seconds: _WaitSeconds = 30.0
    min_fetch_tokens: Natural = 0
    load_or_compute: bool = False

    def deadline(self, tokens: int) -> float:
        """The seconds that a prefetch of `tokens` tokens may wait."""
        if self.policy is PrefetchPolicy.WAIT_COMPLETE:
            return self.max_seconds
        return min(self.base_seconds + self.seconds_per_ki_token * tokens / 1024, self.max_seconds)
