"""The flags of `bench serve`, and what they mean in tokens. Needs no model, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass

from asynchicache.bench.options import check_minimums, option
from asynchicache.errors import ConfigError

CONTEXT = 4096
"""Tokens that the tiny model knows positions for."""

STORAGES = ("file", "redis")


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    """What is played; lengths are in tokens.

    Raises:
        ConfigError: a value is outside its rule.
    """

    num_clients: int = option(50, "conversations, all at once", minimum=1)
    num_rounds: int = option(6, "turns of each", minimum=2)
    first_length: int = option(1024, "tokens of a conversation's first prompt", minimum=1)
    request_length: int = option(32, "new prompt tokens of each later turn", minimum=1)
    output_length: int = option(8, "tokens generated in a turn", minimum=1)
    page_size: int = option(16, "tokens of a page", minimum=1)
    max_running: int = option(
        4, "requests that a server computes at a time; a CPU gains little by more", minimum=1
    )
    storage: str = option("file", "what is killed and comes back: a folder, or a server", choices=STORAGES)
    plain_clients: int = option(3, "conversations whose answers plain transformers gives too", minimum=0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self)
        longest = self.prompt(self.num_rounds - 1) + self.output_length
        if longest > CONTEXT:
            raise ConfigError(
                f"conversations of {longest} tokens: the tiny model has room for {CONTEXT}; "
                "lower --num-rounds, --first-length, --request-length or --output-length"
            )

    def prompt(self, round_: int) -> int:
        """Tokens of the prompt of a round."""
        return self.first_length + round_ * (self.output_length + self.request_length)

    def kept(self, round_: int) -> int:
        """Tokens of that prompt that can be restored at best.

        Everything that was computed, down to whole pages. The last token of an answer was never fed to the
        model. Checkpoints are kept at the end of each prompt and of each answer, in whole pages.
        """
        if not round_:
            return 0
        return (self.prompt(round_) - self.request_length - 1) // self.page_size * self.page_size

    @property
    def ceiling(self) -> int:
        """Cached tokens of the whole run if nothing is lost."""
        return self.num_clients * sum(map(self.kept, range(self.num_rounds)))

    @property
    def prompt_tokens(self) -> int:
        return self.num_clients * sum(map(self.prompt, range(self.num_rounds)))

    @property
    def pages(self) -> int:
        """Pages of all conversations at their end."""
        longest = self.prompt(self.num_rounds - 1) + self.output_length
        return self.num_clients * -(-longest // self.page_size)
