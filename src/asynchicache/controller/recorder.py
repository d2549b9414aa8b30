"""Records requests as a trace for `asynchicache replay`: times, lengths and block numbers, no content.

A block's number stands for a salted hash of the block and of everything before it. Hashing and writing run
off the loop; a recorder that cannot keep up drops requests and counts them. Whole lines are written, a second
after their requests ended at the latest, so that a killed process leaves a trace that can be read.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import secrets
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from io import FileIO
from pathlib import Path

from asynchicache.controller.tasks import shielded
from asynchicache.errors import ConfigError
from asynchicache.hashing import page_digests
from asynchicache.planner.request_state import RequestState
from asynchicache.ports import Port
from asynchicache.types import KEY_WORDS

_MAX_WAITING_BYTES = 64 << 20
_WRITE_SECONDS = 1.0
_MAX_NUMBERS = 1 << 20
_HASH_BYTES = 8
_HASH_BITS = 61
"""Of an id that is a hash: above all numbers, and below the largest id of a trace."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class RecordedRequest:
    """One request: when it came, its prompt in whole pages; once it has ended, how many tokens it generated,
    and in `words` the whole pages of them that were cached."""

    arrival_ms: float
    words: array[int]
    seed: bytes
    prompt: int
    repeats: tuple[int, ...]
    output: int = 0

    def __len__(self) -> int:
        return len(self.words) * self.words.itemsize


class TraceRecorder:
    """Writes a line for each request once it has ended.

    Attributes:
        closed: whether it has ended.
        recorded, dropped: requests that were written, or had to be left out because writing was slower.
    """

    def __init__(
        self,
        path: Path,
        *,
        page_keys: bool,
        block_size: int,
        port: Port,
        salt: bytes | None = None,
    ) -> None:
        """
        Args:
            path: the file, written anew; gzipped if it ends in `.gz`.
            page_keys: whether requests have keys of pages, and not tokens.
            block_size: tokens of a page.
            salt: recorders with the same salt give a block the same id, so that their files can be merged by
                time. Default: ids are numbers in order of appearance, and the salt is random.

        Raises:
            ConfigError: the file cannot be written, or `salt` is not bytes.
        """
        if salt is not None and not isinstance(salt, bytes):
            raise ConfigError(f"salt of a trace is a {type(salt).__name__}: pass bytes, as text.encode()")
        self.path = path
        self.recorded = self.dropped = 0
        self._page_words = KEY_WORDS if page_keys else block_size
        self._by_token = not page_keys
        self._block_size = block_size
        self._port = port
        self._salt = secrets.token_bytes(16) if salt is None else salt[:64]
        self._numbers: dict[int, int] | None = {} if salt is None else None
        self._began, self._latest_ms = port.now(), 0.0
        self._sessions: dict[int | bytes, dict[bytes, str]] = {}  # by last block, and by what is behind it
        self._open: set[RecordedRequest] = set()
        self._waiting_bytes = 0
        self.closed = False
        self._lines: list[bytes] = []  # these two are the worker's
        self._lines_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._file = FileIO(path, "w")
        except OSError as error:
            raise ConfigError(f"trace {str(path)!r} cannot be written: {error}") from error
        self._worker = port.worker("asynchicache-trace")

    def opened(self, request: RequestState) -> RecordedRequest | None:
        """A request was entered. Returns its record, unless writing is too slow for it."""
        # Of page keys there may be fewer than the prompt has pages.
        known = (len(request.tokens) // self._page_words + 1) * self._block_size - 1
        prompt = min(request.prompt, known)
        pages, rest = divmod(prompt, self._block_size)
        words = request.tokens[: pages * self._page_words + (rest if self._by_token else 0)]
        # No two are equal, so that sorting by time restores the order.
        self._latest_ms = max((self._port.now() - self._began) * 1e3, self._latest_ms + 1e-3)
        entry = RecordedRequest(
            round(self._latest_ms, 3),
            words,
            request.seed,
            prompt,
            request.hint.repeats,
        )
        if self.closed or self._waiting_bytes + len(entry) > _MAX_WAITING_BYTES:
            self.dropped += 1
            return None
        self._waiting_bytes += len(entry)
        self._open.add(entry)
        return entry

    def ended(self, entry: RecordedRequest, request: RequestState) -> None:
        """`request`, which is the recorded one or goes on with its answer, was left: write it. Idempotent."""
        if entry not in self._open:
            return
        self._open.remove(entry)
        entry.output = max(len(request.tokens) * self._block_size // self._page_words - entry.prompt, 0)
        cached = max(request.borrowed, max(request.published.pages, default=0)) * self._page_words
        answer = request.tokens[len(entry.words) : cached]
        self._waiting_bytes += len(answer) * answer.itemsize
        entry.words += answer
        self._worker.submit(partial(self._add, entry))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WRITE_SECONDS, self._write_soon)

    def _write_soon(self) -> None:
        self._timer = None
        self._worker.submit(self._write)

    def _add(self, entry: RecordedRequest) -> None:
        """Hash a request; on the worker's thread."""
        line = json.dumps(self._line(entry), separators=(",", ":")) + "\n"
        self._lines.append(line.encode())
        self._lines_bytes += len(entry)

    def _write(self) -> None:
        """Write the lines made so far, all or none; on the worker's thread."""
        lines, self._lines = self._lines, []
        nbytes, self._lines_bytes = self._lines_bytes, 0
        if not lines:
            return
        chunk, end = b"".join(lines), self._file.tell()
        if self.path.suffix == ".gz":
            chunk = gzip.compress(chunk)  # a member of its own: what precedes it is whole without it
        try:
            _write_all(self._file, chunk)
        except OSError as error:
            _log.warning("trace %s: %d requests are not recorded: %s", self.path, len(lines), error)
            self._file.truncate(end)
            self._file.seek(end)
            self._port.post(partial(self._count, len(lines), nbytes, recorded=False))
        else:
            self._port.post(partial(self._count, len(lines), nbytes, recorded=True))

    def _count(self, requests: int, nbytes: int, *, recorded: bool) -> None:
        self._waiting_bytes -= nbytes
        self.recorded += requests * recorded
        self.dropped += requests * (not recorded)

    def _line(self, entry: RecordedRequest) -> dict[str, object]:
        ids = [self._id(digest) for digest in page_digests(entry.words, self._page_words, entry.seed)]
        whole = entry.prompt // self._block_size
        prompt, answer = ids[:whole], ids[whole:]
        blocks: dict[str, object] = {"hash_ids": prompt}
        if self._numbers is not None:
            blocks = {"hash_runs": _runs(prompt)}
        if entry.repeats:
            blocks["repeats"] = entry.repeats
        if answer:
            blocks["answer_runs"] = _runs(answer)
        return {
            "timestamp_ms": entry.arrival_ms,
            "session_id": self._session(entry, ids),
            "input_length": entry.prompt,
            "output_length": entry.output,
            "block_size": self._block_size,
            **blocks,
        }

    def _session(self, entry: RecordedRequest, ids: list[int]) -> str:
        """The name of its conversation: that of the longest earlier prompt which it repeats, as far as the
        earlier one's client expected that; or its own."""
        own = blake2b(entry.seed + entry.words.tobytes(), key=self._salt, digest_size=_HASH_BYTES).hexdigest()
        name = next(self._continued(entry, ids), own)
        for length in entry.repeats or (entry.prompt,):
            if len(self._sessions) < _MAX_NUMBERS:
                page, rest = divmod(min(length, entry.prompt), self._block_size)
                ends = self._sessions.setdefault(ids[page - 1] if page else entry.seed, {})
                ends.setdefault(self._behind(entry, page, rest), name)
        return name

    def _continued(self, entry: RecordedRequest, ids: list[int]) -> Iterator[str]:
        """The conversations whose prompts it repeats, the longest prompt first."""
        size = self._block_size
        for page in range(entry.prompt // size, -1, -1):
            ends = self._sessions.get(ids[page - 1] if page else entry.seed, {})
            for rest in range(min(size - 1, entry.prompt - page * size), -1, -1) if ends else ():
                name = ends.get(self._behind(entry, page, rest))
                if name is not None:
                    yield name

    def _behind(self, entry: RecordedRequest, page: int, rest: int) -> bytes:
        """The words of the first `rest` tokens behind a page."""
        begin = page * self._page_words
        return entry.words[begin : begin + (rest if self._by_token else 0)].tobytes()

    def _id(self, digest: bytes) -> int:
        """The id of a block, from its digest, which covers everything before it."""
        hashed = blake2b(digest, key=self._salt, digest_size=_HASH_BYTES).digest()
        value = int.from_bytes(hashed) >> (8 * _HASH_BYTES - _HASH_BITS)
        if self._numbers is None:
            return value
        number = self._numbers.get(value)
        if number is None:
            if len(self._numbers) >= _MAX_NUMBERS:
                return value | 1 << _HASH_BITS  # bounded memory: later blocks keep their hash
            number = self._numbers[value] = len(self._numbers)
        return number

    async def aclose(self) -> None:
        """Write what waits, requests that are still open too, and close the file; idempotent."""
        if self.closed:
            return
        self.closed = True
        for entry in self._open:
            self._worker.submit(partial(self._add, entry))
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._worker.submit(self._write)
        await shielded(self._port.run_blocking(self._finish))

    def _finish(self) -> None:
        self._worker.close()
        self._file.close()


def _runs(ids: list[int]) -> list[int]:
    """Start and count of each run of consecutive ids, taking turns."""
    numbers: list[int] = []
    for one in ids:
        if numbers and one == numbers[-2] + numbers[-1]:
            numbers[-1] += 1
        else:
            numbers += (one, 1)
    return numbers


def _write_all(file: FileIO, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) or 0 :]
