"""The flags of `soak`."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir
from typing import Annotated, Literal

from msgspec import Meta

from asynchicache.options import LARGEST_FLOAT, CommandOptions, FiniteSeconds, Positive, about, check_folder


class SoakOptions(CommandOptions, frozen=True):
    """How long, on what, how hard.

    Raises:
        ConfigError: a value is outside its rule.
    """

    minutes: Annotated[
        FiniteSeconds, about("how long to run; memory and hit rates are judged after the first minute")
    ] = 1.0
    storage: Annotated[Literal["file", "redis"], about("storage backend")] = "file"
    loop: Annotated[Literal["asyncio", "uvloop"], about("the event loop")] = "asyncio"
    clients: Annotated[Positive, about("turns served at once, each followed by the next")] = 12
    conversations: Annotated[
        Positive, about("conversations of each client, whose turns come in random order")
    ] = 32
    capacity_mib: Annotated[int, Meta(ge=8), about("MiB that storage holds")] = 32
    reopen_seconds: Annotated[FiniteSeconds, about("lifetime of one cache before another replaces it")] = 30.0
    fault_seconds: Annotated[
        float,
        Meta(ge=0, le=LARGEST_FLOAT),
        about("mean time between storage faults; 0: no faults, and hits are judged"),
    ] = 2.0
    stall_ms: Annotated[
        FiniteSeconds, about("longest allowed block of the loop; time without a core is not counted")
    ] = 100.0
    folder: Annotated[str, about("where stores are made and removed; empty: the temporary folder")] = ""
    seed: int = 0

    def check(self) -> None:
        check_folder("--folder", Path(self.folder or gettempdir()))
