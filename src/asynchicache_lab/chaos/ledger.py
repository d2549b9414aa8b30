"""A record of one run: its operations, faults and violations."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Ledger:
    """A record of one run: its operations, faults and violations.

    Attributes:
        operations: calls of the cache, by name.
        faults: injected faults, by `faults.KINDS`.
        violations: descriptions of broken invariants.
        served: prompt tokens by the tier that served them, or `nowhere`.
        costs: pages that were looked up, read and written, by `costs.KINDS`.
        calls_failed: calls of storage that raised, or were answered with a failure.
        lines: lines that storage wrote to the log; one for each of these calls, and few more.
    """

    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    costs: Counter[str] = field(default_factory=Counter)
    calls_failed: int = 0
    lines: int = 0


def error_text(error: BaseException) -> str:
    """An error in one line, with the innermost line of this library in its traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "asynchicache" in frame.filename
    ]
    where = f" at {frames[-1].filename.rpartition('asynchicache/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {'; '.join(map(str.strip, str(error).splitlines()))}{where}"
