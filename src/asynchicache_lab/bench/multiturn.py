"""Multi-round conversations: measure the share of each prompt that the cache serves.

After SGLang's `benchmark/hicache/bench_multiturn.py --disable-random-sample`, with clients in a fixed
order: in every round, each client sends its whole history plus new request tokens.
"""

from __future__ import annotations

import random
from fractions import Fraction

from asynchicache.reports import Advance
from asynchicache_lab.bench.options import MultiturnOptions
from asynchicache_lab.bench.synthetic import Transcript, draw_tokens
from asynchicache_lab.bench.tally import HitLimit, HitReport, HitTally
from asynchicache_lab.bench.turns import open_runner


def ceiling(options: MultiturnOptions) -> Fraction:
    """The hit rate if the cache loses nothing."""
    rounds = range(options.num_rounds)
    return Fraction(sum(map(options.kept, rounds)), sum(map(options.prompt, rounds)))


async def run_multiturn(options: MultiturnOptions, progress: Advance) -> HitReport:
    """Play all turns, with unbounded storage.

    Raises:
        CapacityError: a conversation or its states do not fit on the device.
    """
    rng = random.Random(options.seed)
    turns = options.num_clients * options.num_rounds
    histories = [Transcript(options.page_size) for _ in range(options.num_clients)]
    async with open_runner(
        options.page_size, options.sizes, options.interval, real=options.move_bytes, tails=options.tails
    ) as runner:
        tally = HitTally(options.num_rounds, turns, progress)
        for number in range(turns):
            round_, client = divmod(number, options.num_clients)
            prompt = draw_tokens(rng, number, options.request_length)
            output = draw_tokens(rng, number, options.output_length)
            tally.add(round_, await runner.run(histories[client], prompt, output))
        return tally.report("multiturn", HitLimit("ceiling", float(ceiling(options))), runner.problems())
