"""Files of traces: how they are packed, where a request begins and ends, and what a file is that is none."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import msgspec

from asynchicache.errors import ConfigError

zstandard: Any = None
with suppress(ImportError):
    zstandard = import_module("zstandard")

_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, getattr(zstandard, "ZstdError", OSError))
_BOM = b"\xef\xbb\xbf"
_ZSTD = b"\x28\xb5\x2f\xfd"
_UNPACKERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_WANTED = (
    "wanted is JSON with one request a line, each with input_length, hash_ids and timestamp, plain or packed "
    "by gzip, zstd, bzip2 or xz; `serve --record-trace` writes one"
)


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers; of an array, its elements.

    Raises:
        ConfigError: the file cannot be read, or is no JSON.
    """
    where = f"trace {str(path)!r}"
    try:
        with ExitStack() as stack:
            yield from _requests(_opened(path, where, stack), where)
    except _BROKEN as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _opened(path: Path, where: str, stack: ExitStack) -> IO[bytes]:
    file = stack.enter_context(path.open("rb"))
    head = file.peek(6)
    if head.startswith(_ZSTD):
        if zstandard is None:
            raise ConfigError(f"{where} is packed by zstd: pip install 'asynchicache[zstd]', or unzstd it")
        return BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
    unpacker = next((one for magic, one in _UNPACKERS.items() if head.startswith(magic)), None)
    unpacked: IO[bytes] = file if unpacker is None else stack.enter_context(unpacker(file))
    return unpacked


def _requests(file: IO[bytes], where: str) -> Iterator[tuple[int, bytes]]:
    lines = _lines(file)
    number, text = next(lines, (0, b""))
    if text.startswith(b"["):
        yield from _array(text + file.read(), where)
    elif text:
        if not text.startswith(b"{"):
            raise ConfigError(_no_json(where, number, text))
        yield number, text
        yield from lines


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers; the last one is half a line if a packed file was cut."""
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if not text.isspace():
                yield number, text.lstrip()
    except EOFError:
        if not number:
            raise
        yield number + 1, b"{"


def _array(text: bytes, where: str) -> Iterator[tuple[int, bytes]]:
    try:
        found = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where} begins as a JSON array and is none: {error}; {_WANTED}") from error
    found.reverse()  # each is freed when it has been read
    for number in range(1, len(found) + 1):
        yield number, bytes(found.pop()) + b"\n"


def _no_json(where: str, number: int, text: bytes) -> str:
    """What a file is that does not begin as JSON."""
    if b"\0" in text or text[:4] == b"PAR1" or b"\x80" <= text[:1] < b"\xc0" or text[:1] >= b"\xfe":
        return f"{where}, line {number}: the file is no text; {_WANTED}"
    begin = text[:60].decode("utf-8", "replace").rstrip()
    kind = "CSV" if max(text.count(b","), text.count(b"\t"), text.count(b";")) > 1 else "plain text"
    return f"{where}, line {number}: {begin!r} looks like {kind}; {_WANTED}"


def say_what_it_is(where: str, number: int, text: bytes, problem: str) -> str:
    """The words for a line that is no request of a trace."""
    words, keys = f"{where}, line {number}: {problem}", list[str]()
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        keys = list(msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
    if "hash_ids" in keys or "hash_runs" in keys:
        return words
    has = f": it has {', '.join(keys[:6])}, and no ids of blocks" if keys else ""
    return f"{words}{has}; {_WANTED}"
