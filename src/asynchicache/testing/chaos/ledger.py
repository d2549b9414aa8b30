"""What a run did, and what was wrong with it."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Ledger:
    """What a run did, and what was wrong with it.

    Attributes:
        operations: calls of the cache, by name.
        faults: what went wrong on purpose, by `faults.KINDS`.
        violations: what must never happen, in words.
        served: tokens of prompts, by the tier they came from, or `nowhere`.
        costs: pages that were asked for, read and written, by `costs.KINDS`.
    """

    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    costs: Counter[str] = field(default_factory=Counter)


def error_text(error: BaseException) -> str:
    """An error in one line, with the last place of this library that it came through."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "asynchicache" in frame.filename
    ]
    where = f" at {frames[-1].filename.rpartition('asynchicache/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {'; '.join(map(str.strip, str(error).splitlines()))}{where}"
