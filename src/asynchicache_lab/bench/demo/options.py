"""Flags of the demo, and derived numbers of tokens and pages. Loads no model, so that `--help` is fast."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from asynchicache.errors import ConfigError
from asynchicache.options import CommandOptions, Natural, Positive, about, check_folder

PAGE_SIZE = 8
"""Small, so that short conversations have many pages; servers use 16 to 64 and more."""


class DemoOptions(CommandOptions, frozen=True):
    """The flags of `demo`; lengths are in tokens.

    Raises:
        ConfigError: a value is outside its rule.
    """

    num_clients: Annotated[Positive, about("conversations")] = 6
    num_rounds: Annotated[Positive, about("turns of each conversation")] = 12
    request_length: Annotated[Positive, about("new prompt tokens of a turn")] = 32
    output_length: Annotated[int, Meta(ge=2), about("tokens generated in a turn")] = 32
    num_visitors: Annotated[Natural, about("clients of the second act, all at once; 0: none")] = 24
    report: Annotated[str, about("path of the HTML report")] = "demo-report/index.html"
    seed: int = 0

    def check(self) -> None:
        if self.report.endswith("/") or Path(self.report).is_dir():
            raise ConfigError(f"--report {self.report!r}: must be a file, such as report/index.html")
        check_folder("--report", Path(self.report).parent, made=True)

    def history(self, round_: int) -> int:
        """Tokens of a conversation before round `round_`."""
        return round_ * (self.request_length + self.output_length)

    def prompt(self, round_: int) -> int:
        """Tokens of the prompt of round `round_`."""
        return self.history(round_) + self.request_length

    def kept(self, round_: int) -> int:
        """Maximum number of that prompt's tokens that can be restored.

        The last token of a history was never fed to the model, so of `h` tokens `h - 1` are computed. Only
        whole pages of these can be restored.
        """
        return max(self.history(round_) - 1, 0) // PAGE_SIZE * PAGE_SIZE

    @property
    def pages(self) -> int:
        """Pages of one finished conversation."""
        return -(-self.history(self.num_rounds) // PAGE_SIZE)


def ceiling(options: DemoOptions) -> Fraction:
    """The hit rate of the whole run if the cache loses nothing."""
    rounds = range(options.num_rounds)
    return Fraction(sum(map(options.kept, rounds)), sum(map(options.prompt, rounds)))


def round_ceilings(options: DemoOptions) -> list[float]:
    """The same hit rate for each round."""
    return [options.kept(r) / options.prompt(r) for r in range(options.num_rounds)]
