"""Real text for the demo's conversations: Python's built-in help topics."""

from __future__ import annotations

import re
from pydoc_data.topics import topics

from asynchicache.integrations.transformers.demo_model import encode_text

_DECORATION = re.compile(r"[*=\-~^]{3,}|\s+")


def conversations(clients: int, rounds: int, length: int) -> list[list[list[int]]]:
    """Prompt pieces `[clients][rounds][length]`, as byte tokens.

    Each client continues in the text from round to round; clients start at different positions.
    """
    text = encode_text(_reader())
    stride = len(text) // clients
    return [
        [_cut(text, client * stride + round_ * length, length) for round_ in range(rounds)]
        for client in range(clients)
    ]


def _reader() -> str:
    """All topics, sorted by name, as continuous ASCII text: one byte is one character."""
    text = " ".join(topics[name] for name in sorted(topics))
    return _DECORATION.sub(" ", text).encode("ascii", "replace").decode()


def _cut(text: list[int], start: int, length: int) -> list[int]:
    """`length` tokens from `start` on, wrapping around at the end of the text."""
    return [text[(start + i) % len(text)] for i in range(length)]
