"""Options of the planner, and defaults shared by the configuration and `Planner`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from msgspec import Meta

from asynchicache.options import Natural, Options
from asynchicache.types import PrefetchPolicy, WritePolicy

WRITE_POLICY = WritePolicy.WRITE_THROUGH
CLEAN_SHARE = 0.125

_WaitSeconds: TypeAlias = Annotated[float, Meta(ge=0)]


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

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    base_seconds: _WaitSeconds = 2.0
    seconds_per_ki_token: _WaitSeconds = 0.1
    max_seconds: _WaitSeconds = 30.0
    min_fetch_tokens: Natural = 0
    load_or_compute: bool = False

    if TYPE_CHECKING:
        # What type checkers take, see `CacheConfig`.
        def __init__(
            self,
            *,
            policy: PrefetchPolicy | Literal["best_effort", "wait_complete", "timeout"] = ...,
            base_seconds: float = ...,
            seconds_per_ki_token: float = ...,
            max_seconds: float = ...,
            min_fetch_tokens: int = ...,
            load_or_compute: bool = ...,
        ) -> None: ...

    def deadline(self, tokens: int) -> float:
        """The seconds that a prefetch of `tokens` tokens may wait."""
        if self.policy is PrefetchPolicy.WAIT_COMPLETE:
            return self.max_seconds
        return min(self.base_seconds + self.seconds_per_ki_token * tokens / 1024, self.max_seconds)
