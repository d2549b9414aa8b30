"""Records requests as a trace for `asynchicache replay`: times, lengths and block numbers, no content.

A block's number stands for a salted hash of the block and of everything before it. Hashing and writing run
off the loop; a recorder that cannot keep up drops requests and counts them. Whole lines are written, a second
after the first of them at the latest, so that a killed process leaves a trace that can be read.
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

_MAX_WAITING_BYTES = 64 << 20
_WRITE_SECONDS = 1.0
_MAX_NUMBERS = 1 << 20
_HASH_BYTES = 8
_HASH_BITS = 61
"""Of an id that is a hash: above all numbers, and below the largest id of a trace."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _RecordedRequest:
    """One request: when it came, its prompt in whole pages, and once it has ended, what it generated."""

    arrival_ms: int
    words: array[int]
    seed: bytes
    prompt: int
    output: int | None = None

    def __len__(self) -> int:
        return len(self.words) * self.words.itemsize


class TraceRecorder:
    """Writes a line for each request, in order of arrival, once it has ended.

    Attributes:
        path: the file.
        recorded, dropped: requests that were written, or had to be left out because writing was slower.
    """

    def __init__(
        self,
        path: Path,
        *,
        page_words: int,
        block_size: int,
        port: Port,
        salt: bytes | None = None,
    ) -> None:
        """
        Args:
            path: the file, written anew; gzipped if it ends in `.gz`.
            page_words: ids of a page in a request's words.
            block_size: tokens of a page.
            port: of the cache.
            salt: recorders with the same salt give a block the same id, so that their files can be merged by
                time. Default: ids are numbers in order of appearance, and the salt is random.

        Raises:
            ConfigError: the file cannot be written.
        """
        self.path = path
        self.recorded = self.dropped = 0
        self._page_words = page_words
        self._block_size = block_size
        self._port = port
        self._salt = secrets.token_bytes(16) if salt is None else salt[:64]
        self._numbers: dict[int, int] | None = {} if salt is None else None
        self._began = port.now()
        self._open: dict[RequestState, _RecordedRequest] = {}
        self._waiting_bytes = 0
        self._closed = False
        self._lines: list[bytes] = []  # these two are the worker's
        self._lines_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._file = FileIO(path, "w")
        except OSError as error:
            raise ConfigError(f"trace {str(path)!r} cannot be written: {error}") from error
        self._worker = port.worker("asynchicache-trace")

    def opened(self, request: RequestState) -> None:
        """A request was entered."""
        words = request.tokens[: request.prompt // self._block_size * self._page_words]
        entry = _RecordedRequest(
            int((self._port.now() - self._began) * 1e3),
            words,
            request.seed,
            request.prompt,
        )
        if self._closed or self._waiting_bytes + len(entry) > _MAX_WAITING_BYTES:
            self.dropped += 1
            return
        self._waiting_bytes += len(entry)
        self._open[request] = entry

    def ended(self, request: RequestState) -> None:
        """A request was left: write it, once all that came before it have ended too."""
        entry = self._open.get(request)
        if entry is None:
            return
        tokens = len(request.tokens) * self._block_size // self._page_words
        entry.output = max(tokens - request.prompt, 0)
        while self._open:
            first = next(iter(self._open))
            if self._open[first].output is None:
                break
            self._worker.submit(partial(self._add, self._open.pop(first)))
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_WRITE_SECONDS, self._write_soon)

    def _write_soon(self) -> None:
        self._timer = None
        self._worker.submit(self._write)

    def _add(self, entry: _RecordedRequest) -> None:
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

    def _line(self, entry: _RecordedRequest) -> dict[str, object]:
        ids = [self._id(digest) for digest in page_digests(entry.words, self._page_words, entry.seed)]
        blocks: dict[str, object] = {"hash_ids": ids}
        if self._numbers is not None:
            blocks = {"hash_runs": [number for run in _runs(ids) for number in run]}
        return {
            "timestamp_ms": entry.arrival_ms,
            "session_id": None,
            "input_length": min(entry.prompt, (len(ids) + 1) * self._block_size - 1),
            "output_length": entry.output or 0,
            "block_size": self._block_size,
            **blocks,
        }

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
        if self._closed:
            return
        self._closed = True
        for entry in self._open.values():
            self._worker.submit(partial(self._add, entry))
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._worker.submit(self._write)
        await shielded(self._port.run_blocking(self._finish))

    def _finish(self) -> None:
        self._worker.close()
        self._file.close()


def _runs(ids: list[int]) -> Iterator[tuple[int, int]]:
    """Start and count of each run of consecutive ids."""
    first = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[at - 1] + 1:
            yield ids[first], at - first
            first = at


def _write_all(file: FileIO, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[file.write(rest) or 0 :]
