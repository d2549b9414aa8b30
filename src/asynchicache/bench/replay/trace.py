"""Traces of real prompts: plain or gzipped JSONL with one request per line, and prompts as block ids.

The format is that of the Mooncake traces (kvcache-ai/Mooncake, FAST25-release/traces); `hash_ids` may also be
written as runs. Ids are chained: two prompts share an id only if they share everything before it.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias, cast

import msgspec

from asynchicache.errors import ConfigError

TraceBlocks: TypeAlias = "array[int]"
Runs: TypeAlias = list[tuple[int, int]]
"""Start and count of each run of consecutive ids."""

_GZIP = b"\x1f\x8b"
_LARGEST_ID = 1 << 62
_LONGEST = 1 << 27


class TraceRequest(NamedTuple):
    """One request of a trace.

    Attributes:
        tokens: length of the prompt.
        runs: ids of its whole blocks, as runs.
        output: tokens generated.
        session: the conversation that it belongs to, if the trace says.
    """

    tokens: int
    runs: Runs
    output: int = 0
    session: str | None = None

    def blocks(self) -> TraceBlocks:
        """Ids of its whole blocks, in order."""
        return array("q", chain.from_iterable(range(start, start + count) for start, count in self.runs))

    def whole_tokens(self, block_size: int) -> int:
        """Tokens of its whole blocks."""
        return sum(count for _, count in self.runs) * block_size


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in order of arrival.

    Attributes:
        block_size: tokens of a block.
        requests: the requests; their block ids are 0 to `blocks - 1`.
        blocks: number of distinct whole blocks: the working set.
        seconds: from the first arrival to the last.
    """

    block_size: int
    requests: list[TraceRequest]
    blocks: int
    seconds: float

    @property
    def prompt_tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


def read_trace(path: Path, block_size: int = 0) -> Trace:
    """Read and check a trace.

    Args:
        path: the file.
        block_size: tokens of a block if the lines do not say; 0: the lines must say.

    Raises:
        ConfigError: the file is missing or not a trace, or a value breaks its rule; names the line.
    """
    lines = _checked(_read(path), block_size, f"trace {str(path)!r}")
    requests, blocks = _renumbered([line.request() for line in lines])
    if not blocks:
        raise ConfigError(f"trace {str(path)!r}: no prompt has a whole block, so nothing can be cached")
    seconds = (lines[-1].arrival_ms - lines[0].arrival_ms) / 1e3
    return Trace(lines[0].block_size, requests, blocks, seconds)


class _Line(msgspec.Struct):
    """One line of the file, unchecked."""

    input_length: int
    output_length: int = 0
    session_id: str | None = None
    timestamp_ms: float | None = None
    timestamp: float | None = None
    block_size: int = 0
    hash_runs: list[int] | None = None
    hash_ids: list[int] | None = None

    @property
    def arrival_ms(self) -> float:
        return (self.timestamp if self.timestamp_ms is None else self.timestamp_ms) or 0.0

    @property
    def numbers(self) -> list[int]:
        """Starts and counts of its runs, alternating."""
        if self.hash_runs is not None:
            return self.hash_runs
        return list(chain.from_iterable((block, 1) for block in self.hash_ids or ()))

    def request(self) -> TraceRequest:
        """The request, without a partial last block."""
        numbers = self.numbers
        runs = list(zip(numbers[::2], numbers[1::2], strict=True))
        if runs and sum(numbers[1::2]) > self.input_length // self.block_size:
            start, count = runs.pop()
            runs += [(start, count - 1)] if count > 1 else []
        return TraceRequest(self.input_length, runs, max(self.output_length, 0), self.session_id)


def _read(path: Path) -> list[_Line]:
    """Read the lines of a file.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request.
    """
    decode = msgspec.json.Decoder(_Line).decode
    number = 0
    lines = []
    try:
        with _open(path) as file:
            for number, text in enumerate(file, start=1):  # noqa: B007  the except clause uses it
                lines.append(decode(text))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"trace {str(path)!r}, line {number}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}") from error
    return lines


def _open(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        is_packed = file.read(len(_GZIP)) == _GZIP
    return cast("BinaryIO", gzip.open(path)) if is_packed else path.open("rb")


# Rules for lines.


def _checked(lines: list[_Line], block_size: int, where: str) -> list[_Line]:
    if not lines:
        raise ConfigError(f"{where} is empty; a request a line is wanted")
    for line in lines:
        line.block_size = line.block_size or block_size
    for number, line in enumerate(lines, start=1):
        if (problem := _problem(line)) is not None:
            raise ConfigError(f"{where}, line {number}: {problem}")
    for number, (before, line) in enumerate(pairwise(lines), start=2):
        if line.arrival_ms < before.arrival_ms:
            raise ConfigError(
                f"{where}, line {number}: it is earlier than the line before; sort them by time"
            )
        if line.block_size != before.block_size:
            sizes = f"{line.block_size}, and {before.block_size} before"
            raise ConfigError(f"{where}, line {number}: block_size is {sizes}; one for all lines is wanted")
    return lines


def _problem(line: _Line) -> str | None:
    """Describe what is wrong with a single line, if anything."""
    if line.timestamp is None and line.timestamp_ms is None:
        return "timestamp_ms is missing"
    if not 1 <= line.input_length <= _LONGEST:
        return f"input_length {line.input_length} must be 1 to {_LONGEST} tokens"
    if line.block_size < 1:
        return (
            f"block_size {line.block_size} must be 1 token at least; --block-size gives one that is missing"
        )
    if (line.hash_runs is None) is (line.hash_ids is None):
        return "hash_runs or hash_ids is missing, or both are there"
    return _run_problem(line.numbers, *divmod(line.input_length, line.block_size))


def _run_problem(runs: list[int], whole: int, rest: int) -> str | None:
    starts, counts = runs[::2], runs[1::2]
    if len(starts) != len(counts):
        return f"hash_runs has {len(runs)} numbers; a start and a count take turns"
    if min(starts, default=0) < 0 or max(starts, default=0) > _LARGEST_ID or min(counts, default=1) < 1:
        return f"ids must be 0 to {_LARGEST_ID}, and counts of runs 1 at least"
    if not whole <= sum(counts) <= whole + bool(rest):
        return f"{sum(counts)} ids for {whole} whole blocks of the prompt and {rest} more tokens"
    return None


# Ids.


def _renumbered(requests: list[TraceRequest]) -> tuple[list[TraceRequest], int]:
    """Renumber block ids without gaps; return the requests and the number of ids.

    Ids in a trace may be hashes; small numbers can index arrays.
    """
    begins, ends = _intervals([run for request in requests for run in request.runs])
    firsts = [0, *accumulate(end - begin for begin, end in zip(begins, ends, strict=True))]
    renumbered = []
    for request in requests:
        runs = []
        for start, count in request.runs:
            interval = bisect_right(begins, start) - 1
            runs.append((firsts[interval] + start - begins[interval], count))
        renumbered.append(request._replace(runs=runs))
    return renumbered, firsts[-1]


def _intervals(runs: Runs) -> tuple[list[int], list[int]]:
    """The union of runs as sorted, non-adjacent half-open intervals: their starts and ends."""
    begins: list[int] = []
    ends: list[int] = []
    for start, count in sorted(runs):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], start + count)
        else:
            begins.append(start)
            ends.append(start + count)
    return begins, ends
