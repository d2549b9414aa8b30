"""Traces of real prompts: JSON with one request per line, and prompts as block ids.

The format is that of the Mooncake traces (kvcache-ai/Mooncake, FAST25-release/traces); `hash_ids` may also be
written as runs. Ids are chained: two prompts share an id only if they share everything before it. What others
write differently, and means the same, is read too: see `_Line`, and `trace_file` for how a file is packed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from math import nan
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from asynchicache.errors import ConfigError
from asynchicache.planner.hints import NO_HINT, CacheHint
from asynchicache.replay.trace_file import lines_of, say_what_it_is

TraceBlocks: TypeAlias = "array[int]"
Runs: TypeAlias = list[tuple[int, int]]
"""Start and count of each run of consecutive ids."""
_Array: TypeAlias = npt.NDArray[Any]

_LONGEST = 1 << 27
_ID_BYTES = 8
_END_OF_IDS = 1 << 8 * _ID_BYTES
_RUNS_AT_ONCE = 1 << 16
_QWEN_BLOCK = 16
"""Tokens of a block in alibaba-edu/qwen-bailian-usagetraces-anon: lines with chats, and no block size."""


class TraceRequest(NamedTuple):
    """One request of a trace.

    Attributes:
        tokens: length of the prompt.
        runs: ids of its whole blocks, as runs.
        output: tokens generated.
        session: the conversation that it belongs to, if the trace says.
        answer: ids of the blocks behind these that were cached with the answer, as runs.
        hint: what the server knew about the lengths that later prompts repeat.
    """

    tokens: int
    runs: Runs
    output: int = 0
    session: str | None = None
    answer: Runs = []  # noqa: RUF012  nobody changes it
    hint: CacheHint = NO_HINT

    def blocks(self, *, answer: bool = False) -> TraceBlocks:
        """Ids of its whole blocks, in order; and those of its answer."""
        runs = self.runs + self.answer if answer else self.runs
        return array("q", chain.from_iterable(range(start, start + count) for start, count in runs))


class TraceRequests:
    """The requests in order of arrival. Each is made when it is asked for: as objects they take many times
    the memory of their file."""

    def __init__(self, reader: _Reader, starts: _Array, counts: _Array) -> None:
        self._order = np.argsort(np.frombuffer(reader.arrivals), kind="stable")
        self._reader, self._starts, self._counts = reader, starts, counts

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, place: int) -> TraceRequest:
        reader, number = self._reader, int(self._order[place])
        tokens, output, middle, end = reader.table[4 * number : 4 * number + 4]
        begin = reader.table[4 * number - 1] if number else 0
        runs, answer = self._runs(begin, middle), self._runs(middle, end)
        hint = reader.hints.get(number, NO_HINT)
        return TraceRequest(tokens, runs, output, reader.sessions[number], answer, hint)

    def __iter__(self) -> Iterator[TraceRequest]:
        return map(self.__getitem__, range(len(self)))

    def _runs(self, begin: int, end: int) -> Runs:
        return list(zip(self._starts[begin:end].tolist(), self._counts[begin:end].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in order of arrival.

    Attributes:
        block_size: tokens of a block.
        requests: the requests; their block ids are 0 to `blocks - 1`.
        blocks: number of distinct whole blocks: the working set.
        seconds: from the first arrival to the last.
        where: the file, for errors.
        skipped: requests that are left out: without a prompt, or cut off at the end of the file.
    """

    block_size: int
    requests: TraceRequests
    blocks: int
    seconds: float
    where: str
    skipped: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


def read_trace(path: Path, block_size: int = 0, *, chained: bool = True) -> Trace:
    """Read and check a trace. A file that ends inside a line, because its writer was killed, ends before it.

    Args:
        block_size: tokens of a block if the lines do not say; 0: the lines must say.
        chained: whether ids stand for all that is before them. Otherwise they are made to.

    Raises:
        ConfigError: the file is missing or not a trace, or a value breaks its rule; names the line.
    """
    where = f"trace {str(path)!r}"
    reader = _Reader(block_size, chained=chained)
    decode = msgspec.json.Decoder(_Line).decode
    for number, text in lines_of(path):
        try:
            reader.add(decode(text))
        except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
            is_cut = type(error) is msgspec.DecodeError and not text.endswith(b"\n")
            if not (is_cut and reader.sessions):
                raise ConfigError(say_what_it_is(where, number, text, str(error))) from error
            reader.skipped += 1
    return reader.trace(where)


class _Line(msgspec.Struct):
    """One line of the file, unchecked.

    Times are milliseconds; those of Qwen's traces, which have chats, are seconds; LMBench's are strings of
    nanoseconds. Lines of closed-loop traces have a `delay` after the line before of their session instead.
    """

    input_length: float | None = None
    output_length: float | None = None
    session_id: str | int | None = None
    chat_id: str | int | None = None
    parent_chat_id: str | int | None = None
    timestamp_ms: float | str | None = None
    timestamp: float | str | None = None
    delay: float | None = None
    block_size: int | None = None
    hash_runs: list[int] | None = None
    hash_ids: list[int | str] | None = None
    answer_runs: list[int] = []
    repeats: tuple[int, ...] = ()


class _Reader:
    """Takes lines one by one and keeps of each what a replay needs: 12 bytes for a run of ids."""

    def __init__(self, block_size: int, *, chained: bool) -> None:
        self._block_size = self._given = block_size
        self._chained = chained
        self._starts, self._counts = array("Q"), array("I")
        self._latest: dict[str | None, float] = {}
        self._chats: dict[str | int | None, str] = {}
        self.arrivals = array("d")
        self.table = array("q")  # for each request: tokens, output, where its runs and its answer's end
        self.sessions: list[str | None] = []
        self.hints: dict[int, CacheHint] = {}
        self.skipped = 0

    def add(self, line: _Line) -> None:
        """
        Raises:
            ConfigError: a value breaks its rule; says which.
        """
        size = self._size(line)
        starts, counts = self._blocks(line)
        tokens = _tokens(line, int(counts.sum()) * size)
        session = self._session(line)
        arrival = self._arrival(line, session)
        if not tokens:
            self.skipped += 1
            return
        if (line.hash_runs is None) is (line.hash_ids is None):
            raise ConfigError("hash_runs or hash_ids is missing, or both are there")
        middle = self._keep(*_whole(starts, counts, tokens, size))
        end = self._keep(*_runs(line.answer_runs))
        self.table.extend((tokens, max(_number("output_length", line.output_length), 0), middle, end))
        self.arrivals.append(arrival)
        if line.repeats:
            self.hints[len(self.sessions)] = CacheHint(repeats=line.repeats)
        self.sessions.append(session)

    def _keep(self, starts: _Array, counts: _Array) -> int:
        """Keep runs; return how many there are."""
        self._starts.frombytes(starts.tobytes())
        self._counts.frombytes(counts.astype(np.uint32).tobytes())
        return len(self._starts)

    def _size(self, line: _Line) -> int:
        size = line.block_size or self._given or (_QWEN_BLOCK if line.chat_id is not None else 0)
        if size < 1:
            if line.block_size or self._given:
                raise ConfigError(f"block_size {size} must be 1 token at least")
            raise ConfigError("--block-size gives the tokens of a block: block_size is missing")
        if self.sessions and size != self._block_size:
            raise ConfigError(
                f"block_size is {size}, and {self._block_size} before; one for all lines is wanted"
            )
        self._block_size = size
        return size

    def _blocks(self, line: _Line) -> tuple[_Array, _Array]:
        """Starts and counts of the runs of a line."""
        if line.hash_ids is None:
            return _runs(line.hash_runs or [])
        ids = _ids(line.hash_ids if self._chained else _chain(line.hash_ids))
        if not len(ids):
            return ids, ids
        gaps = (ids[1:] != ids[:-1] + np.uint64(1)) | (ids[1:] == 0)
        begins = np.concatenate(([0], np.flatnonzero(gaps) + 1))
        return ids[begins], np.diff(np.append(begins, len(ids)))

    def _session(self, line: _Line) -> str | None:
        if line.session_id is not None or line.chat_id is None:
            return None if line.session_id is None else str(line.session_id)
        session = self._chats.get(line.parent_chat_id, str(line.chat_id))
        self._chats[line.chat_id] = session
        return session

    def _arrival(self, line: _Line, session: str | None) -> float:
        given = line.timestamp if line.timestamp_ms is None else line.timestamp_ms
        if given is not None:
            arrival = _milliseconds(given) * (1e3 if line.chat_id is not None else 1)
        else:
            arrival = self._latest.get(session, self._latest.get(None, 0.0)) + (line.delay or 0.0)
        self._latest[session] = self._latest[None] = arrival
        return arrival

    def trace(self, where: str) -> Trace:
        """
        Raises:
            ConfigError: there is nothing to cache.
        """
        if not self.sessions and not self.skipped:
            raise ConfigError(f"{where} is empty, or was cut in its first line; a request a line is wanted")
        starts, counts = np.frombuffer(self._starts, np.uint64), np.frombuffer(self._counts, np.uint32)
        if not len(starts):
            raise ConfigError(f"{where}: no prompt has a whole block, so nothing can be cached")
        blocks = _renumber(starts, counts)
        seconds = (max(self.arrivals) - min(self.arrivals)) / 1e3
        requests = TraceRequests(self, starts, counts)
        return Trace(self._block_size, requests, blocks, seconds, where, self.skipped)


# Rules for values.


def _tokens(line: _Line, whole: int) -> int:
    """The length of a prompt; null is that of its blocks, `whole`."""
    if line.input_length is None:
        if line.hash_ids is None and line.hash_runs is None:
            raise ConfigError("input_length and hash_ids are missing")
        return whole
    tokens = _number("input_length", line.input_length)
    if not 0 <= tokens <= _LONGEST:
        raise ConfigError(f"input_length {tokens} must be 0 to {_LONGEST} tokens")
    return tokens


def _number(name: str, value: float | None) -> int:
    """A number of tokens; null is none."""
    value = value or 0
    if not abs(value) < 1 << 53:  # or not a number at all
        raise ConfigError(f"{name} {value:g} must be a number of tokens")
    return int(value)


def _milliseconds(value: float | str) -> float:
    """A time as a number of milliseconds, or of micro- or nanoseconds since 1970."""
    try:
        number = float(value)
    except ValueError:
        number = nan
    if not abs(number) < 1e30:
        raise ConfigError(f"timestamp {value!r} must be a number of milliseconds")
    return number / (1e6 if number >= 1e17 else 1e3 if number >= 1e14 else 1)


def _runs(numbers: Sequence[int]) -> tuple[_Array, _Array]:
    starts, counts = numbers[::2], numbers[1::2]
    if len(starts) != len(counts):
        raise ConfigError(f"hash_runs has {len(numbers)} numbers; a start and a count take turns")
    if min(counts, default=1) < 1 or max(counts, default=1) > _LONGEST:
        raise ConfigError(f"counts of runs must be 1 to {_LONGEST}")
    if min(starts, default=0) < 0 or max(map(add, starts, counts), default=0) > _END_OF_IDS:
        raise ConfigError(f"ids of runs must be 0 to {_END_OF_IDS - 1}")
    return np.array(starts, np.uint64), np.array(counts, np.int64)


def _ids(ids: Sequence[int | str]) -> _Array:
    """Ids of any kind as 64-bit numbers: integers of 64 bits as they are, others by their hash."""
    found = np.array(ids) if ids and isinstance(ids[0], int) else None
    if found is not None and found.dtype.kind in "iu":
        return found.astype(np.uint64)
    return np.array([_id(one) for one in ids], np.uint64)


def _id(one: int | str) -> int:
    if isinstance(one, int) and -_END_OF_IDS // 2 <= one < _END_OF_IDS:
        return one % _END_OF_IDS
    return int.from_bytes(blake2b(str(one).encode(), digest_size=_ID_BYTES).digest())


def _chain(ids: Sequence[int | str]) -> list[int]:
    """Ids that stand for all before them too."""
    chained, before = [], b""
    for one in ids:
        before = blake2b(str(one).encode(), key=before, digest_size=_ID_BYTES).digest()
        chained.append(int.from_bytes(before))
    return chained


def _whole(starts: _Array, counts: _Array, tokens: int, size: int) -> tuple[_Array, _Array]:
    """The runs of a prompt without a partial last block of less than `size` tokens."""
    found, (whole, rest) = int(counts.sum()), divmod(tokens, size)
    if not whole <= found <= whole + bool(rest):
        raise ConfigError(
            f"{found} ids for {whole} whole blocks of {size} tokens and {rest} more; see --block-size"
        )
    if found > whole:
        counts[-1] -= 1
        last = len(counts) - (counts[-1] == 0)
        return starts[:last], counts[:last]
    return starts, counts


def _renumber(starts: _Array, counts: _Array) -> int:
    """Renumber ids without gaps, in place; return how many there are.

    Those in a trace may be hashes, and small numbers can index arrays. Consecutive ones stay consecutive.
    """
    order = np.argsort(starts)
    begins = starts[order]
    lasts = counts[order].astype(np.uint64)
    del order
    lasts += begins
    lasts -= np.uint64(1)  # the id behind the last may not have 64 bits
    np.maximum.accumulate(lasts, out=lasts)
    gaps = (begins[1:] > lasts[:-1]) & (begins[1:] - lasts[:-1] > 1)
    # The union of the runs: intervals with gaps between them, and what is added to the ids in each.
    begins = begins[np.append(True, gaps)]
    lengths = lasts[np.append(gaps, True)]
    del lasts, gaps
    lengths -= begins
    lengths += np.uint64(1)
    added = np.cumsum(lengths)
    blocks = int(added[-1])
    added -= lengths
    added -= begins  # modulo 2 ** 64
    del lengths
    for at in range(0, len(starts), _RUNS_AT_ONCE):
        part = starts[at : at + _RUNS_AT_ONCE]
        places = np.searchsorted(begins, part, side="right") - 1
        part += added[places]
    return blocks
