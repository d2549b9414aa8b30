"""Whether to read a prefix from storage or to compute it again, by measured costs. Pure.

Reading takes a latency, and time in proportion to the bytes, with those of other reads in flight. Computing
takes time in proportion to the tokens, and to the tokens times their context. Both are fitted to what was
seen while running, the recent past counting most, so a slower disk or a busier engine is noticed.
"""

from __future__ import annotations

from asynchicache.errors import ConfigError

_READ_MEMORY = 0.9
_COMPUTE_MEMORY = 0.98
_LEAST_MEASURED = 8
_EXPLORE_EVERY = 64
_EXPLORED_SHARE = 0.02
"""What may be spent on choices that seem worse, so that an estimate can recover: a share of all time."""


class DecayingFit:
    """Seconds as a sum of two features times what each costs, by least squares; old values fade.

    Attributes:
        count: values seen.
    """

    __slots__ = ("_aa", "_ab", "_ay", "_bb", "_by", "_memory", "count")

    def __init__(self, memory: float) -> None:
        """`memory`: what a value counts after the next one."""
        self._memory = memory
        self._aa = self._ab = self._bb = self._ay = self._by = 0.0
        self.count = 0

    def add(self, a: float, b: float, seconds: float) -> None:
        """Features of one value, and what it took. Relative errors count alike, whatever the size."""
        weight = 1.0 / max(seconds, 1e-9) ** 2
        keep = self._memory
        self._aa = self._aa * keep + weight * a * a
        self._ab = self._ab * keep + weight * a * b
        self._bb = self._bb * keep + weight * b * b
        self._ay = self._ay * keep + weight * a * seconds
        self._by = self._by * keep + weight * b * seconds
        self.count += 1

    def seconds(self, a: float, b: float) -> float:
        """The estimate for these features; costs are not negative."""
        determinant = self._aa * self._bb - self._ab * self._ab
        if determinant > 1e-9 * self._aa * self._bb:
            of_a = (self._ay * self._bb - self._by * self._ab) / determinant
            of_b = (self._by * self._aa - self._ay * self._ab) / determinant
            if of_a >= 0 and of_b >= 0:
                return of_a * a + of_b * b
        of_a = self._ay / self._aa if self._aa else 0.0
        of_b = self._by / self._bb if self._bb else 0.0
        error_a = of_a * (of_a * self._aa - 2 * self._ay)  # of either feature alone, but for a constant
        error_b = of_b * (of_b * self._bb - 2 * self._by)
        return of_a * a if error_a < error_b else of_b * b


class LoadCosts:
    """Decides between storage and computing.

    Attributes:
        reading_bytes: bytes of reads in flight.
        loads, computes, explored: decisions of either kind, and those that went against the estimate.
    """

    def __init__(self, min_tokens: int = 0) -> None:
        """`min_tokens`: a prefix of fewer tokens is computed as long as nothing was measured."""
        self._min_tokens = min_tokens
        self._reads = DecayingFit(_READ_MEMORY)
        self._prefills = DecayingFit(_COMPUTE_MEMORY)
        self._spent = self._wasted = 0.0
        self._since = 0
        self.reading_bytes = 0
        self.loads = self.computes = self.explored = 0

    def computed(self, tokens: int, context: int, seconds: float) -> None:
        """A prefill of `tokens` tokens behind `context` others took this long.

        Raises:
            ConfigError: a number is negative, or nothing was computed.
        """
        if tokens < 1 or context < 0 or not seconds > 0:
            raise ConfigError(
                f"computed {tokens} tokens behind {context} in {seconds} s: 1 token and some time at least"
            )
        self._prefills.add(tokens, tokens * (context + tokens / 2), seconds)

    def read(self, nbytes: int, queued: int, seconds: float) -> None:
        """A read of `nbytes`, behind `queued` bytes of others, took this long."""
        self._reads.add(1.0, nbytes + queued, max(seconds, 1e-9))

    def load_seconds(self, nbytes: int) -> float:
        """Estimate of a read that begins now."""
        return self._reads.seconds(1.0, nbytes + self.reading_bytes)

    def compute_seconds(self, tokens: int, context: int) -> float:
        """Estimate of a prefill of `tokens` tokens behind `context` others."""
        return self._prefills.seconds(tokens, tokens * (context + tokens / 2))

    @property
    def measured(self) -> bool:
        """Whether both costs are known."""
        return min(self._reads.count, self._prefills.count) >= _LEAST_MEASURED

    def worth_loading(self, tokens: int, context: int, nbytes: int, *, busy: float = 0.0) -> bool:
        """Whether to read these tokens from storage.

        Args:
            tokens: tokens that storage adds.
            context: tokens before them.
            nbytes: bytes to read for them, states included.
            busy: how busy the engine is, from 0, idle, to 1, prefills wait; computing then costs twice.
        """
        if not self.measured:
            load = tokens >= self._min_tokens
        else:
            load = self._choose(self.load_seconds(nbytes), (1 + busy) * self.compute_seconds(tokens, context))
        self.loads += load
        self.computes += not load
        return load

    def _choose(self, load: float, compute: float) -> bool:
        """The cheaper way; now and then the other one, as far as its price allows."""
        best, other = min(load, compute), max(load, compute)
        self._since += 1
        self._spent += best
        explores = (
            self._since >= _EXPLORE_EVERY and self._wasted + other - best <= _EXPLORED_SHARE * self._spent
        )
        if explores:
            self._since = 0
            self._wasted += other - best
            self.explored += 1
        return (load < compute) is not explores
