"""Run a trace through the tree, the planner and the policies in virtual time, without bytes or waiting.

Requests run one after the other, so a block can be hit as soon as the request that computed it has arrived.
Answers are cached as far as the trace says what they were.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from asynchicache.planner.checkpoints import CheckpointPolicy
from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.options import PlannerOptions
from asynchicache.planner.planner import Planner
from asynchicache.replay.options import ReplayOptions
from asynchicache.replay.player import IDS_A_BLOCK, Player
from asynchicache.replay.report import ReplayReport, ReplayTally
from asynchicache.replay.sizes import Sizes, plan_sizes, share_memory
from asynchicache.replay.survey import Survey, survey
from asynchicache.replay.tokens import TokenPlayer, TokenTrace
from asynchicache.replay.trace import Trace, read_trace
from asynchicache.reports import Advance
from asynchicache.specs import ModelSpec
from asynchicache.testing.specs import synthetic_spec
from asynchicache.tree.node import FULL_DEVICE, place_of
from asynchicache.types import Tier, WritePolicy


def run_replay(options: ReplayOptions, progress: Advance) -> ReplayReport:
    """Replay a trace.

    Raises:
        ConfigError: the trace cannot be read, or does not fit the options.
    """
    begun = time.perf_counter()
    trace = read_trace(Path(options.trace), options.block_size, chained=not options.chain_ids)
    checkpoints = options.checkpoints(trace.block_size)
    found = survey(trace, checkpoints)
    if options.by_token:
        return _by_token(options, trace, found, progress, begun)
    spec = synthetic_spec(
        IDS_A_BLOCK,
        options.names,
        window_pages=-(-options.window // trace.block_size),
        token_bytes=trace.block_size,
        state_bytes=2 * IDS_A_BLOCK * options.state_tokens,
    )
    spaced = replace(checkpoints, spacing=checkpoints.spacing * IDS_A_BLOCK)
    planner, sizes = _planner(options, spec, trace, found, spaced)
    tally = _play(planner, trace, found.known, progress)
    ceiling = sum(found.known) * trace.block_size / trace.prompt_tokens
    return _report(Path(options.trace).name, planner.inventory, trace, sizes, tally, ceiling, begun)


def _by_token(
    options: ReplayOptions, trace: Trace, found: Survey, progress: Advance, begun: float
) -> ReplayReport:
    """Replay with pages of another size, with outputs, or with ends inside a page."""
    size = options.page_size or trace.block_size
    spec = synthetic_spec(size, options.names, state_bytes=2 * options.state_tokens)
    paged = _in_pages(trace, size, outputs=options.outputs)
    ends = replace(
        found, states=found.states + len(trace.requests), longest=found.longest * trace.block_size // size + 2
    )
    checkpoints = CheckpointPolicy.parse(options.checkpoint)
    planner, sizes = _planner(options, spec, paged, ends, checkpoints, tails=options.tails)
    player, tally = TokenPlayer(planner, TokenTrace(trace), outputs=options.outputs), ReplayTally()
    for number in range(len(trace.requests)):
        tally.add(player.serve(number))
        progress(tally.requests, len(trace.requests))
    ceiling = player.reachable / trace.prompt_tokens
    report = _report(Path(options.trace).name, planner.inventory, paged, sizes, tally, ceiling, begun)
    return replace(report, tokens_per_end=planner.inventory.tokens_per_end())


def _planner(
    options: ReplayOptions,
    spec: ModelSpec,
    trace: Trace,
    found: Survey,
    checkpoints: CheckpointPolicy,
    *,
    tails: bool = False,
) -> tuple[Planner, Sizes]:
    """A planner with the slots that the options give it for a trace, and these slots."""
    sizes = plan_sizes(spec, options.shares(), trace, found)
    memory: dict[Tier, int] = {}
    if options.memory_share:
        sizes, memory = share_memory(spec, options.memory_share, sizes)
    planner = Planner(
        spec,
        sizes.slots,
        PlannerOptions(
            write_policy=WritePolicy(options.write_policy),
            eviction=options.policy,
            checkpoints=str(checkpoints),
            tails=tails,
        ),
        memory=memory,
    )
    planner.inventory.tree.pack = partial(array, "I")  # a trace has millions of blocks
    return planner, sizes


def _in_pages(trace: Trace, size: int, *, outputs: bool) -> Trace:
    """The trace's working set in pages: of its blocks and outputs, and one where each sequence ends."""
    tokens = trace.blocks * trace.block_size
    tokens += sum(request.output for request in trace.requests) if outputs else 0
    return replace(trace, block_size=size, blocks=-(-tokens // size) + 2 * len(trace.requests))


def _play(planner: Planner, trace: Trace, known: Iterable[int], progress: Advance) -> ReplayTally:
    player, tally = Player(planner, trace), ReplayTally()
    for request, blocks in zip(trace.requests, known, strict=True):
        tally.add(player.serve(request, blocks))
        progress(tally.requests, len(trace.requests))
    return tally


def _report(
    title: str,
    inventory: SlotInventory,
    trace: Trace,
    sizes: Sizes,
    tally: ReplayTally,
    ceiling: float,
    begun: float,
) -> ReplayReport:
    tiers = (Tier.DEVICE, Tier.HOST)
    evicted = {
        name: {tier.name.lower(): inventory.counters.evicted[place_of(component_id, tier)] for tier in tiers}
        for component_id, name in enumerate(inventory.names)
    }
    return ReplayReport(
        title=title,
        requests=tally.requests,
        skipped=trace.skipped,
        prompt_tokens=tally.prompt_tokens,
        trace_seconds=trace.seconds,
        hit_rate=tally.hit_tokens / tally.prompt_tokens,
        request_hit_rate=tally.hits / tally.requests,
        ceiling=ceiling,
        tokens_by_tier={tier.name.lower(): tokens for tier, tokens in tally.by_tier.items()},
        hit_rate_by_tier={t.name.lower(): hit / tally.prompt_tokens for t, hit in tally.by_tier.items()},
        working_set=sizes.working_set,
        slots={name: {"device": device, "host": host} for name, (device, host) in sizes.slots.items()},
        evicted_pages=inventory.counters.evicted[FULL_DEVICE],
        evicted=evicted,
        states_kept=_states_kept(inventory),
        block_size=trace.block_size,
        longest_prompt=max(request.tokens for request in trace.requests),
        tokens_per_end=inventory.tokens_per_end() // IDS_A_BLOCK * trace.block_size,
        misses=tally.missed(),
        reasons={reason.value: count for reason, count in tally.reasons.items()},
        problems=inventory.verify(),
        seconds=time.perf_counter() - begun,
    )


def _states_kept(inventory: SlotInventory) -> int:
    """Number of nodes with a state in any tier."""
    states = [
        component
        for component in inventory.tree.components
        if not inventory.spec.owners[component.id].per_token
    ]
    return sum(component.tier(node) is not None for node in inventory.tree.nodes() for component in states)
