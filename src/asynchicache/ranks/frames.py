"""Frames: messages as bytes, in an order that cannot be changed unnoticed. Sans-IO.

A frame is a header of length and checksum, and a msgpack array of messages. The checksum continues over all
frames of a direction, from a start that the incarnation of the group gives. A frame that is damaged, cut,
lost, repeated, overtaken, or of another group does not match (rule R1: one order).

An engine may carry these bytes in a message that it sends anyway. `ranks.links` sends them itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Generic, TypeVar
from zlib import crc32

import msgspec

from asynchicache.errors import RankProtocolError

_HEADER = Struct("<II")  # bytes of the body, checksum

MAX_FRAME = 64 << 20
"""The most bytes of a frame's body. A longer one is refused before memory is allocated for it."""

M = TypeVar("M")


class FrameWriter(Generic[M]):
    """Collects messages and packs them into one frame at a time."""

    def __init__(self, incarnation: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._chain = incarnation & 0xFFFFFFFF
        self._messages: list[bytes] = []

    def add(self, message: M) -> None:
        encoded = self._encoder.encode(message)
        self._messages.append(encoded)

    def __len__(self) -> int:
        """Messages that no frame holds yet."""
        return len(self._messages)

    def take(self) -> bytes:
        """All messages added since the last call, as frames; empty if there are none."""
        frames: list[bytes] = []
        part: list[bytes] = []
        size = 0
        for encoded in self._messages:
            if part and size + len(encoded) > MAX_FRAME // 2:
                frames.append(self._frame(part))
                part, size = [], 0
            part.append(encoded)
            size += len(encoded)
        if part:
            frames.append(self._frame(part))
        self._messages = []
        return b"".join(frames)

    def _frame(self, messages: Sequence[bytes]) -> bytes:
        body = self._encoder.encode([msgspec.Raw(one) for one in messages])
        if len(body) > MAX_FRAME:
            raise RankProtocolError(f"a message of {len(body)} bytes is longer than a frame ({MAX_FRAME})")
        self._chain = crc32(body, self._chain)
        return _HEADER.pack(len(body), self._chain) + body


class FrameReader(Generic[M]):
    """Unpacks frames, as bytes arrive in any portions."""

    def __init__(self, incarnation: int, messages: object, *, max_frame: int = MAX_FRAME) -> None:
        """
        Args:
            incarnation: as the writer has it.
            messages: the type of a message, a union of tagged structs.
            max_frame: the most bytes of a frame's body.
        """
        self._max_frame = max_frame
        self._decoder: msgspec.msgpack.Decoder[list[M]] = msgspec.msgpack.Decoder(
            list[messages]  # type: ignore[valid-type]
        )
        self._chain = incarnation & 0xFFFFFFFF
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Add bytes; yields the messages of all complete frames.

        Raises:
            RankProtocolError: a frame is too long, out of order, damaged, or holds no messages of this type.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            size, checksum = _HEADER.unpack_from(self._buffer)
            if size > self._max_frame:
                raise RankProtocolError(f"a frame of {size} bytes is longer than {self._max_frame}")
            if len(self._buffer) < _HEADER.size + size:
                return
            body = bytes(self._buffer[_HEADER.size : _HEADER.size + size])
            del self._buffer[: _HEADER.size + size]
            self._chain = crc32(body, self._chain)
            if self._chain != checksum:
                raise RankProtocolError("a frame is damaged, missing, repeated, or of another group")
            yield from self._decode(body)

    def _decode(self, body: bytes) -> list[M]:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RankProtocolError(f"a frame holds no valid messages: {error}") from error

    def rest(self) -> bytes:
        """Bytes behind the last complete frame; they are given away."""
        rest, self._buffer = bytes(self._buffer), bytearray()
        return rest
