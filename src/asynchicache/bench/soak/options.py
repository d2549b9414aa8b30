"""The flags of `soak`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from asynchicache.bench.options import check_folder, check_minimums, option
from asynchicache.errors import ConfigError

LOOPS = ("asyncio", "uvloop")
STORES = ("file", "redis")


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """How long, on what, how hard.

    Raises:
        ConfigError: a value is outside its rule.
    """

    minutes: float = option(1.0, "how long; memory and hit rates are judged after the first minute")
    storage: str = option("file", "where pages go", choices=STORES)
    loop: str = option("asyncio", "the event loop", choices=LOOPS)
    clients: int = option(12, "turns that are served at once, each followed by the next", minimum=1)
    talks: int = option(32, "conversations for each client, whose turns come in no order", minimum=1)
    capacity_mib: int = option(32, "MiB that storage holds", minimum=8)
    reopen_seconds: float = option(30.0, "how long one cache lives before another takes its place")
    fault_seconds: float = option(
        2.0, "mean time between two things that go wrong with storage; 0: nothing does, and hits are judged"
    )
    stall_ms: float = option(
        100.0, "the loop may not be blocked for longer; time without a core is not counted"
    )
    folder: str = option("", "where stores are made and removed; empty: the system's temporary folder")
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self)
        check_folder("--folder", Path(self.folder or gettempdir()))
        if not 0 <= self.fault_seconds < float("inf"):
            raise ConfigError(f"--fault-seconds {self.fault_seconds}: must be a number, 0 or more")
        for name in ("minutes", "reopen_seconds", "stall_ms"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be a number above 0")
        for name, known in (("storage", STORES), ("loop", LOOPS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"--{name} {getattr(self, name)}: must be one of {', '.join(known)}")
