"""RESP2, the protocol of Redis and Valkey: bytes to values and back, without a socket.

https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from asynchicache.errors import StorageError

NEWLINE = b"\r\n"
_MAX_DIGITS = 19  # of a 64-bit integer


class ProtocolError(StorageError):
    """Raised when the server sends something that is not RESP2. The connection cannot be used further."""


class ErrorReply(NamedTuple):
    """An error reply to one command; the connection stays usable.

    Attributes:
        text: the whole message, e.g. `OOM command not allowed when used memory > 'maxmemory'.`
    """

    text: str

    @property
    def code(self) -> str:
        """The first word, in capitals by convention: `OOM`, `LOADING`, `MOVED`, `ERR`, ..."""
        return self.text.partition(" ")[0]


RespReply: TypeAlias = "bytes | int | list[RespReply] | ErrorReply | None"


def command(*words: bytes) -> bytes:
    """Encode a command."""
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def set_command(key: bytes, size: int, ttl_seconds: int | None) -> tuple[bytes, bytes]:
    """Encode a SET of a value of `size` bytes, to expire after `ttl_seconds` if given. The server sets it
    only if the key is new, and sends a null reply otherwise.

    Returns:
        What to send before and after the value.
    """
    options = (b"NX",) if ttl_seconds is None else (b"NX", b"EX", b"%d" % ttl_seconds)
    head = b"*%d\r\n" % (3 + len(options)) + _bulk(b"SET") + _bulk(key) + b"$%d\r\n" % size
    return head, NEWLINE + b"".join(map(_bulk, options))


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def integer(digits: bytes) -> int:
    """
    Raises:
        ProtocolError: it is not a 64-bit integer as RESP writes it.
    """
    unsigned = digits.removeprefix(b"-")
    if not unsigned.isdigit() or len(unsigned) > _MAX_DIGITS:
        raise ProtocolError(f"{digits[:40]!r} is no integer")
    return int(digits)


def length(digits: bytes, most: int) -> int | None:
    """The announced length of a reply; None for the null reply, `-1`.

    Raises:
        ProtocolError: it is not a length, or exceeds `most`.
    """
    value = integer(digits)
    if value == -1:
        return None
    if not 0 <= value <= most:
        raise ProtocolError(f"a reply of length {value}, above {most}")
    return value


def error_reply(line: bytes) -> ErrorReply:
    """The error reply on a line, without its `-`."""
    return ErrorReply(line.decode("utf-8", "replace"))
