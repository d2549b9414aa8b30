"""The flags of `bench storage`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated

from msgspec import Meta

from asynchicache.errors import ConfigError
from asynchicache.layouts import ALIGNMENT
from asynchicache.options import CommandOptions, Positive, about, check_folder, named_values


class StorageBenchOptions(CommandOptions, frozen=True):
    """What is measured.

    Raises:
        ConfigError: a value is outside its rule.
    """

    engine: Annotated[str, about("storage engine")] = "file"
    page_bytes: Annotated[int, Meta(ge=ALIGNMENT), about("bytes of a page, a multiple of 4,096")] = 1 << 20
    pages: Annotated[Positive, about("pages written and read")] = 512
    batch_bytes: Annotated[Positive, about("bytes of pages in one call")] = 16 << 20
    depth: Annotated[Positive, about("calls in flight")] = 4
    rounds: Annotated[Positive, about("measured rounds of two turns each, after a warm-up round")] = 30
    through_controller: Annotated[bool, about("also measure a whole cache, host to storage and back")] = False
    folder: Annotated[str, about("where files are made and removed; empty: the temporary folder")] = ""
    option: Annotated[tuple[str, ...], about("an option of the engine, as name=value")] = ()
    seed: int = 0

    def check(self) -> None:
        check_folder("--folder", Path(self.folder or gettempdir()))
        if self.page_bytes % ALIGNMENT:
            raise ConfigError(f"--page-bytes {self.page_bytes}: must be a multiple of {ALIGNMENT}")
        self.engine_options()

    @property
    def batch_pages(self) -> int:
        """Pages of one call, at least one."""
        return max(1, self.batch_bytes // self.page_bytes)

    def engine_options(self) -> Mapping[str, object]:
        """The engine's own options by name; values are TOML where they are not plain words.

        Raises:
            ConfigError: one has no name or no value.
        """
        return named_values("--option", self.option)
