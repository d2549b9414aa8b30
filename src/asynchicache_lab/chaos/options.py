"""The flags of `chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from asynchicache.errors import ConfigError
from asynchicache.options import CommandOptions, Natural, Positive, about, check_folder


class ChaosOptions(CommandOptions, frozen=True):
    """The flags of `chaos`.

    Attributes:
        seed: the only one to run, instead of many.
    """

    seeds: Annotated[Positive, about("how many seeds to run")] = 200
    first: Annotated[Natural, about("first seed")] = 0
    jobs: Annotated[Natural, about("processes; 0: one per processor")] = 0
    script: Annotated[str, about("replay this script instead of searching")] = ""
    found: Annotated[str, about("folder for the scripts of findings")] = "chaos-found"
    engine_memory: Annotated[bool, about("an engine owns the device memory")] = False
    ranks: Annotated[bool, about("search groups of two to four ranks instead of single caches")] = False
    seed: int | None = None

    def check(self) -> None:
        if self.ranks and self.script:
            raise ConfigError("--script holds no groups of ranks: replay one with --ranks --seed N")
        if not self.script:
            check_folder("--found", Path(self.found), made=True)
