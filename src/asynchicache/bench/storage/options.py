"""The flags of `bench storage`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from asynchicache.bench import options as flags
from asynchicache.errors import ConfigError
from asynchicache.layouts import ALIGNMENT


@dataclass(frozen=True, slots=True)
class StorageBenchOptions:
    """What is measured.

    Raises:
        ConfigError: a value is outside its rule.
    """

    engine: str = flags.option("file", "storage engine")
    page_bytes: int = flags.option(1 << 20, "bytes of a page, a multiple of 4,096", minimum=ALIGNMENT)
    pages: int = flags.option(512, "pages that are written and read", minimum=1)
    batch_bytes: int = flags.option(16 << 20, "bytes of the pages of one call", minimum=1)
    depth: int = flags.option(4, "calls in flight", minimum=1)
    rounds: int = flags.option(30, "measured rounds of two turns each, after one that warms up", minimum=1)
    through_controller: bool = flags.option(False, "also from host to storage and back through a whole cache")
    folder: str = flags.option("", "where files are made and removed; empty: the system's temporary folder")
    option: tuple[str, ...] = flags.option((), "an option of the engine, as name=value")
    seed: int = 0

    def __post_init__(self) -> None:
        flags.check_minimums(self)
        flags.check_folder("--folder", Path(self.folder or gettempdir()))
        if self.page_bytes % ALIGNMENT:
            raise ConfigError(f"--page-bytes {self.page_bytes}: must be a multiple of {ALIGNMENT}")
        self.engine_options()

    @property
    def batch_pages(self) -> int:
        """Pages of one call, one at least."""
        return max(1, self.batch_bytes // self.page_bytes)

    def engine_options(self) -> Mapping[str, object]:
        """The engine's own options by name; values are TOML where they are not plain words.

        Raises:
            ConfigError: one has no name or no value.
        """
        return flags.named_values("--option", self.option)
