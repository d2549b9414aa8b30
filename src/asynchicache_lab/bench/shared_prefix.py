"""Groups of prompts with a common system prompt: check that only the first prompt of a group computes it.

After SGLang's `bench_serving --dataset-name generated-shared-prefix`, with one turn per prompt in a fixed
order: the first prompt of every group, then the second of every group, and so on.
"""

from __future__ import annotations

import random
from fractions import Fraction

from asynchicache.reports import Advance
from asynchicache_lab.bench.options import SharedPrefixOptions
from asynchicache_lab.bench.synthetic import Transcript, draw_tokens
from asynchicache_lab.bench.tally import HitLimit, HitReport, HitTally
from asynchicache_lab.bench.turns import open_runner


def ideal_hit_rate(options: SharedPrefixOptions) -> Fraction:
    """The hit rate if all prompts but the first of a group hit the whole pages of the system prompt."""
    prompts = options.gsp_prompts_per_group
    length = options.gsp_system_prompt_len + options.gsp_question_len
    return Fraction(prompts - 1, prompts) * Fraction(options.shared, length)


async def run_shared_prefix(options: SharedPrefixOptions, progress: Advance) -> HitReport:
    """Serve all prompts, with unbounded storage.

    The bench checkpoints the state at the end of the system prompt, as a server that knows its chat template
    does: a recurrent state exists only where a forward ended, and the cache cannot know this position before
    the second prompt of a group arrives.
    """
    rng = random.Random(options.seed)
    systems = [draw_tokens(rng, n, options.gsp_system_prompt_len) for n in range(options.gsp_num_groups)]
    async with open_runner(
        options.page_size, options.sizes, options.page_size, real=options.move_bytes
    ) as runner:
        tally = HitTally(options.gsp_prompts_per_group, options.prompts, progress)
        for number in range(options.prompts):
            round_, group = divmod(number, options.gsp_num_groups)
            question = draw_tokens(rng, number, options.gsp_question_len)
            output = draw_tokens(rng, number, options.gsp_output_len)
            prompt = systems[group] + question
            turn = await runner.run(Transcript(options.page_size), prompt, output, marks=[options.shared])
            tally.add(round_, turn)
        limit = HitLimit("ideal_hit_rate", float(ideal_hit_rate(options)))
        return tally.report("shared prefix", limit, runner.problems())
