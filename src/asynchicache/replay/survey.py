"""What a trace needs if nothing is evicted: its working set and its best possible hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asynchicache.errors import ConfigError
from asynchicache.planner.checkpoints import CheckpointPolicy
from asynchicache.replay.trace import Runs, Trace


@dataclass(frozen=True, slots=True)
class Survey:
    """Totals of a whole trace.

    Attributes:
        known: for each request, the number of its first blocks that occurred before and can be hits; at least
            one token must be computed.
        states: number of positions where the policy would keep a state.
        longest: blocks of the longest prompt, including a partial one, or of a longer one with its answer.
    """

    known: Sequence[int]
    states: int
    longest: int


def survey(trace: Trace, checkpoints: CheckpointPolicy) -> Survey:
    """Walk through a trace with unlimited memory.

    Args:
        checkpoints: the checkpoint policy, with its spacing in blocks.

    Raises:
        ConfigError: ids are not chained: a known one follows an unknown one.
    """
    seen, stated = bytearray(trace.blocks), bytearray(trace.blocks)
    known, longest = [], 0
    for number, request in enumerate(trace.requests, start=1):
        common = _count_known(seen, request.runs, f"{trace.where}, request {number} by time")
        known.append(min(common, (request.tokens - 1) // trace.block_size))
        for start, count in request.runs + request.answer:
            seen[start : start + count] = b"\1" * count
        blocks, whole = request.blocks(answer=True), len(request.blocks())
        repeats = [min(length // trace.block_size, whole) for length in request.hint.repeats]
        for cut in checkpoints.cuts(0, whole, known[-1], repeats):
            stated[blocks[cut - 1]] = 1
        if request.answer and checkpoints.output:
            stated[blocks[-1]] = 1
        longest = max(longest, -(-request.tokens // trace.block_size), len(blocks) + bool(request.answer))
    return Survey(known, sum(stated), longest)


def _count_known(seen: bytearray, runs: Runs, where: str) -> int:
    """Number of first blocks that were seen before. No later block may have been seen."""
    common = 0
    behind_unknown = False
    for start, count in runs:
        here = seen.count(1, start, start + count)
        if here and (behind_unknown or not seen.startswith(b"\1" * here, start)):
            raise ConfigError(
                f"{where}: a known block is behind an unknown one; hash_ids must be chained, so that "
                "equal ones mean that all before them is equal: --chain-ids makes them so"
            )
        common += here
        behind_unknown = behind_unknown or here < count
    return common
