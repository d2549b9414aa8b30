"""What a trace would need if nothing were ever evicted: how much to keep, and the most that can be hit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asynchicache.bench.replay.trace import Ids, Trace
from asynchicache.errors import ConfigError
from asynchicache.planner.checkpoints import CheckpointPolicy


@dataclass(frozen=True, slots=True)
class Survey:
    """One look at a whole trace.

    Attributes:
        known: of each request, how many of its first blocks came before, as far as they can be hit: one
            token at least is left to compute.
        states: places where the policy would keep a state.
        longest: blocks of the longest prompt, one that is not whole included.
    """

    known: Sequence[int]
    states: int
    longest: int


def survey(trace: Trace, checkpoints: CheckpointPolicy) -> Survey:
    """Walk through a trace with unlimited memory.

    Args:
        trace: what was asked.
        checkpoints: where states are kept; its spacing is in blocks.

    Raises:
        ConfigError: ids are not chained: a known one follows on an unknown one.
    """
    seen = np.zeros(trace.blocks, bool)
    stated = np.zeros(trace.blocks, bool)
    known = []
    for number, request in enumerate(trace.requests, start=1):
        blocks = request.blocks()
        common = _count_known(seen[blocks], number)
        known.append(min(common, (request.tokens - 1) // trace.block_size))
        seen[blocks] = True
        stated[_state_places(blocks, known[-1], checkpoints)] = True
    longest = max(-(-request.tokens // trace.block_size) for request in trace.requests)
    return Survey(known, int(stated.sum()), longest)


def _count_known(seen: np.typing.NDArray[np.bool_], number: int) -> int:
    count = int(seen.sum())
    if not seen[:count].all():
        raise ConfigError(
            f"request {number} of the trace has a known block behind an unknown one; ids must be chained, "
            "so that equal ones mean that all before them is equal"
        )
    return count


def _state_places(blocks: Ids, known: int, checkpoints: CheckpointPolicy) -> Ids:
    """The blocks at whose ends a state would be kept."""
    cuts = checkpoints.cuts(0, len(blocks), known)
    return blocks[np.array(cuts, np.int64) - 1]
