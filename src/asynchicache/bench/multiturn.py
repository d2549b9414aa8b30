"""Conversations of many rounds: how much of each prompt is served from the cache?

After SGLang's `benchmark/hicache/bench_multiturn.py --disable-random-sample`, with clients in a fixed
order: every round, each of them sends its whole history and new request tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction

from asynchicache.bench.options import check_minimums, option
from asynchicache.bench.synthetic import Transcript, draw_tokens
from asynchicache.bench.tally import HitReport, Limit, Progress, Tally
from asynchicache.bench.turns import Sizes, open_runner
from asynchicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MultiturnOptions:
    """The flags of `bench multiturn`; lengths are in tokens."""

    num_clients: int = option(10, "conversations", minimum=1)
    num_rounds: int = option(12, "turns of each conversation", minimum=1)
    request_length: int = option(1024, "new prompt tokens of a turn", minimum=1)
    output_length: int = option(1024, "tokens generated in a turn", minimum=1)
    page_size: int = option(64, "tokens of a page", minimum=1)
    checkpoint_interval: int = option(256, "tokens between positions where a state can be kept", minimum=1)
    mamba_slots: int = option(6, "states that the device holds", minimum=3)
    window: int = option(0, "tokens of a sliding window, in place of recurrent states; 0: none", minimum=0)
    host_ratio: float = option(2.0, "host slots for each device slot", minimum=0)
    offload_mamba: bool = option(True, "let states leave the device for host memory and storage")
    move_bytes: bool = option(False, "move real bytes through the whole cache, ten times slower")
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self)
        if not self.window and self.checkpoint_interval % self.page_size:
            raise ConfigError(
                f"--checkpoint-interval {self.checkpoint_interval}: "
                f"must be a multiple of --page-size {self.page_size}"
            )

    def prompt(self, round_: int) -> int:
        """Tokens of the prompt of round `round_`."""
        return self._history(round_) + self.request_length

    def kept(self, round_: int) -> int:
        """Tokens of that prompt that can be restored at best.

        The last token of a history was never computed; before it, the last multiple of the checkpoint
        interval has a state, and the last whole page a window.
        """
        computed = max(self._history(round_) - 1, 0)
        return computed // self.interval * self.interval

    def _history(self, round_: int) -> int:
        return round_ * (self.request_length + self.output_length)

    @property
    def interval(self) -> int:
        """Tokens between positions at which a prompt can be resumed."""
        return self.page_size if self.window else self.checkpoint_interval

    @property
    def sizes(self) -> Sizes:
        """Room for every page; and for states, or for a window of each conversation and, for the one that
        is running, of what it resumes from, what it computes, and a chunk between them."""
        if not self.window:
            return Sizes(
                self.pages, self.mamba_slots, host_ratio=self.host_ratio, offload_states=self.offload_mamba
            )
        window = -(-self.window // self.page_size)
        slots = (self.num_clients + 3) * window + 1
        return Sizes(self.pages, windows=slots, window_pages=window, host_ratio=self.host_ratio)

    @property
    def pages(self) -> int:
        """Pages of all conversations at their end."""
        return self.num_clients * -(-self._history(self.num_rounds) // self.page_size)


def ceiling(options: MultiturnOptions) -> Fraction:
    """The hit rate if nothing is ever lost."""
    rounds = range(options.num_rounds)
    return Fraction(sum(map(options.kept, rounds)), sum(map(options.prompt, rounds)))


async def run_multiturn(options: MultiturnOptions, progress: Progress) -> HitReport:
    """Play all turns; storage holds everything.

    Raises:
        CapacityError: a conversation, or its states, does not fit on the device.
    """
    rng = random.Random(options.seed)
    turns = options.num_clients * options.num_rounds
    histories = [Transcript(options.page_size) for _ in range(options.num_clients)]
    async with open_runner(
        options.page_size, options.sizes, options.interval, real=options.move_bytes
    ) as runner:
        tally = Tally(options.num_rounds, turns, progress)
        for number in range(turns):
            round_, client = divmod(number, options.num_clients)
            prompt = draw_tokens(rng, number, options.request_length)
            output = draw_tokens(rng, number, options.output_length)
            tally.add(round_, await runner.run(histories[client], prompt, output))
        return tally.report(Limit("ceiling", float(ceiling(options))), runner.problems())
