"""Which bytes of a row of vLLM's primary tier belong to a chunk.

A row holds one chunk of any KV cache group. Each worker has an area in the row, where its tensors follow one
another. Layers of several groups share a tensor, and not all fill it. The remaining bytes of a row are stale:
they belong to other chunks, perhaps of another tenant, and must not be stored.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from asynchicache.errors import ConfigError

FOLDER = Path("/dev/shm")  # noqa: S108 - beside vLLM's own rows, which workers and scheduler share
SPEC = '"spec_name": "AsynchicacheTieringSpec", "spec_module_path": "asynchicache.integrations.vllm.spec"'

_OR_WHOLE = "or store such bytes, with whole_rows set to true in the tier's options"


class MemoryRun(NamedTuple):
    """A byte range of a row."""

    offset: int
    nbytes: int


GroupRuns: TypeAlias = dict[int, tuple[MemoryRun, ...]]
"""Runs by group number, in the order in which they are stored."""


def worker_runs(caches: Any, groups: Sequence[Any], area: int, blocks_per_chunk: int) -> GroupRuns | None:
    """Return where one worker copies the blocks of a chunk, tensor by tensor.

    Follows vLLM's `create_next_worker_view`.

    Args:
        caches: vLLM's `CanonicalKVCaches`.
        groups: `OffloadingConfig.groups`, in the same order.
        area: offset of the worker's area in a row.
        blocks_per_chunk: the setting of vLLM's cache.

    Returns:
        None if vLLM packs layers into blocks (DeepSeek-V4) and moves blocks whole, with all their bytes.
    """
    sizes = [tensor.page_size_bytes for tensor in caches.tensors]
    return _group_runs(caches, groups, area, sizes, blocks_per_chunk, lambda ref: int(ref.page_size_bytes))


def canonical_runs(caches: Any, groups: Sequence[Any], blocks_per_chunk: int) -> GroupRuns | None:
    """As `worker_runs`, for vLLM's `canonical_layout`, where all workers fill one area."""
    refs = [ref for found in caches.group_data_refs for ref in found]
    if any(ref.mapping is None for ref in refs):
        return None
    sizes = [
        max(
            (ref.mapping.canonical_page_size_bytes for ref in refs if ref.tensor_idx == index),
            default=tensor.page_size_bytes,
        )
        for index, tensor in enumerate(caches.tensors)
    ]
    return _group_runs(
        caches, groups, 0, sizes, blocks_per_chunk, lambda ref: int(ref.mapping.canonical_page_size_bytes)
    )


def _group_runs(
    caches: Any, groups: Sequence[Any], area: int, sizes: Sequence[int], blocks: int, used: Any
) -> GroupRuns | None:
    starts = list(accumulate((size * blocks for size in sizes), initial=area))
    runs: GroupRuns = {}
    for group, refs in zip(groups, caches.group_data_refs, strict=True):
        if len(refs) != len(group.layer_names):
            return None
        runs[group.group_id] = tuple(
            dict.fromkeys(
                MemoryRun(starts[ref.tensor_idx] + block * sizes[ref.tensor_idx], used(ref))
                for ref in refs
                for block in range(blocks)
            )
        )
    return runs


def join(workers: Iterable[GroupRuns | None]) -> GroupRuns | None:
    """Join the runs of all workers, in rank order; None if one of them is None."""
    joined: dict[int, list[MemoryRun]] = {}
    for runs in workers:
        if runs is None:
            return None
        for group, found in runs.items():
            joined.setdefault(group, []).extend(found)
    return {group: tuple(dict.fromkeys(found)) for group, found in joined.items()}


def chunk_runs(
    config: Any, known: GroupRuns | None, *, whole_rows: bool
) -> Mapping[int, tuple[MemoryRun, ...] | None]:
    """Return the runs to store for each group; None means the whole row.

    A row is stored whole if no other group writes to the rest of it; this saves a copy.

    Args:
        config: vLLM's `OffloadingConfig`.
        known: the runs that the workers published.
        whole_rows: store rows whole, including stale bytes.

    Raises:
        ConfigError: rows hold bytes of other chunks at unknown offsets; names the fix.
    """
    whole: dict[int, tuple[MemoryRun, ...] | None] = {group.group_id: None for group in config.groups}
    if whole_rows:
        return whole
    _check_blocks(config)
    if len(whole) == 1:
        return whole
    if known is None:
        raise ConfigError(
            f"{len(whole)} KV cache groups share the rows of the primary tier, so bytes of other chunks "
            f"would be stored with each. Give {SPEC} beside cpu_bytes_to_use: it tells them apart. If that "
            f"is there, vLLM moves packed blocks, which no tier can: leave the tier out, {_OR_WHOLE}"
        )
    used = _covered(run for runs in known.values() for run in runs)
    return {group: None if _covered(known[group]) == used else known[group] for group in whole}


def _check_blocks(config: Any) -> None:
    blocks = config.cache.blocks_per_chunk
    windowed = [
        group.group_id
        for group in config.groups
        if getattr(group, "sliding_window_size_in_chunks", None) is not None
    ]
    if blocks > 1 and windowed:
        raise ConfigError(
            f"a chunk has {blocks} blocks, and groups {windowed} have windows or states: vLLM leaves out "
            "blocks that they do not need, and bytes of other chunks would be stored in their place. Remove "
            f"blocks_per_chunk and block_size, {_OR_WHOLE}"
        )


def _covered(runs: Iterable[MemoryRun]) -> list[tuple[int, int]]:
    """Merge runs into disjoint `(start, end)` ranges that are not adjacent."""
    ranges: list[tuple[int, int]] = []
    for start, nbytes in sorted(runs):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], start + nbytes)
        else:
            ranges.append((start, start + nbytes))
    return ranges


def merged(runs: Sequence[MemoryRun]) -> list[MemoryRun]:
    """Join consecutive runs that are adjacent; the order of bytes stays the same."""
    few: list[MemoryRun] = []
    for run in runs:
        if few and few[-1].offset + few[-1].nbytes == run.offset:
            few[-1] = MemoryRun(few[-1].offset, few[-1].nbytes + run.nbytes)
        else:
            few.append(run)
    return few


def tell(engine: str, rank: int, runs: GroupRuns | None) -> None:
    """Publish a worker's runs for the scheduler of the same engine, which reads them with `ask`.

    Workers and scheduler are processes on one machine, and vLLM passes no such data between them.

    Raises:
        OSError: the file cannot be written.
    """
    content = msgspec.json.encode(runs)
    descriptor, draft = tempfile.mkstemp(dir=FOLDER, prefix="asynchicache-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(draft).replace(_place(engine, rank))
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def ask(engine: str, rank: int) -> GroupRuns | None:
    """Read the runs that a worker published, and delete them.

    Raises:
        ConfigError: there are none, or another user wrote them.
    """
    place = _place(engine, rank)
    try:
        with place.open("rb") as file:
            owner = os.fstat(file.fileno()).st_uid
            content = file.read()
        if owner != os.geteuid():
            raise ConfigError(f"{place} belongs to user {owner}: another engine has the same engine_id")
        place.unlink()
        found = msgspec.json.decode(content, type=dict[int, list[tuple[int, int]]] | None)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"worker {rank} of engine {engine!r} did not tell how it lays out rows ({error}): all workers "
            "must run on the scheduler's machine"
        ) from error
    if found is None:
        return None
    return {group: tuple(MemoryRun(*run) for run in runs) for group, runs in found.items()}


def _place(engine: str, rank: int) -> Path:
    return FOLDER / f"asynchicache-{engine}-{rank}.json"
