"""What several tests of running servers look at, and do to stores."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_conversations import Conversations, Turn
from sglang_servers import PAGE, Server

MODELS = ("llama", "qwen3_5_alternating", "qwen3_next_alternating", "mellum")
HYBRID = "qwen3_5_alternating"
ROUNDS = 12

Start = Callable[..., Server]
Uncached = Callable[[str], list[Turn]]


def reachable(talk: Conversations, turn: int) -> int:
    """Return tokens of a turn's prompts that can be cached: whole pages of what was computed before it.

    The last token that a turn generates is never computed.
    """
    computed = (talk.heard + talk.said) * turn - 1
    return talk.clients * (max(computed, 0) // PAGE * PAGE)


def of_turn(turns: Sequence[Turn], turn: int) -> list[Turn]:
    return [each for each in turns if each.turn == turn]


def crowd_out(server: Server, device_tokens: int = 2048) -> None:
    """Ask for so much else that the device evicts all that it holds."""
    for place in range(2):
        server.ask([11 + place] * (device_tokens - 3 * PAGE), new=1)


def damage(folder: Path, pattern: str = "**/*.pages", share: int = 4096) -> int:
    """Change a byte in every `share` of the files of a store that no server has open; return how many."""
    chance, changed = random.Random(7), 0
    for path in sorted(folder.glob(pattern)):
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size, share):
                place = start + chance.randrange(share)
                file.seek(place)
                byte = file.read(1)
                if byte:
                    file.seek(place)
                    file.write(bytes([byte[0] ^ 0x5A]))
                    changed += 1
    return changed
