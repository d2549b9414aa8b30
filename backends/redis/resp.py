"""RESP2, the protocol of Redis and Valkey, as bytes and values: nothing here touches a socket.

https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from asynchicache.errors import StorageError

NEWLINE = b"\r\n"
_MOST_DIGITS = 19  # of a 64-bit integer


class ProtocolError(StorageError):
    """Raised when the server says what RESP2 does not know; its connection means nothing any more."""


class ErrorReply(NamedTuple):
    """The server's refusal of one command; the connection is fine.

    Attributes:
        text: all of it, e.g. `OOM command not allowed when used memory > 'maxmemory'.`
    """

    text: str

    @property
    def code(self) -> str:
        """The first word, in capitals by convention: `OOM`, `LOADING`, `MOVED`, `ERR`, ..."""
        return self.text.partition(" ")[0]


Reply: TypeAlias = "bytes | int | list[Reply] | ErrorReply | None"


def command(*words: bytes) -> bytes:
    """A command as the server reads it."""
    return b"*%d\r\n" % len(words) + b"".join(map(_bulk, words))


def set_command(key: bytes, size: int, ttl_seconds: int | None) -> tuple[bytes, bytes]:
    """What goes before and after the `size` bytes of a value that is set unless there is one, which the
    server answers with a null reply; for `ttl_seconds` if given."""
    options = (b"NX",) if ttl_seconds is None else (b"NX", b"EX", b"%d" % ttl_seconds)
    head = b"*%d\r\n" % (3 + len(options)) + _bulk(b"SET") + _bulk(key) + b"$%d\r\n" % size
    return head, NEWLINE + b"".join(map(_bulk, options))


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def integer(digits: bytes) -> int:
    """
    Raises:
        ProtocolError: this is no 64-bit integer as RESP writes it.
    """
    unsigned = digits.removeprefix(b"-")
    if not unsigned.isdigit() or len(unsigned) > _MOST_DIGITS:
        raise ProtocolError(f"{digits[:40]!r} is no integer")
    return int(digits)


def length(digits: bytes, most: int) -> int | None:
    """The length that a reply announces; None for the null reply, `-1`.

    Raises:
        ProtocolError: it is no length, or above `most`.
    """
    value = integer(digits)
    if value == -1:
        return None
    if not 0 <= value <= most:
        raise ProtocolError(f"a reply of length {value}, above {most}")
    return value


def error_reply(line: bytes) -> ErrorReply:
    """The refusal that an error line, without its `-`, says."""
    return ErrorReply(line.decode("utf-8", "replace"))
