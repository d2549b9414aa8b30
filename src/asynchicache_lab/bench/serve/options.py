"""The flags of `bench serve`, and derived numbers of tokens. Loads no model, so that `--help` is fast."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asynchicache.errors import ConfigError
from asynchicache.options import CommandOptions, Natural, Positive, about

CONTEXT = 4096
"""Tokens that the tiny model knows positions for."""

STORAGES = ("file", "redis")


class ServeBenchOptions(CommandOptions, frozen=True):
    """What is played; lengths are in tokens.

    Raises:
        ConfigError: a value is outside its rule.
    """

    num_clients: Annotated[Positive, about("conversations, all at once")] = 50
    num_rounds: Annotated[int, Meta(ge=2), about("turns of each conversation")] = 6
    first_length: Annotated[Positive, about("tokens of a conversation's first prompt")] = 1024
    request_length: Annotated[Positive, about("new prompt tokens of each later turn")] = 32
    output_length: Annotated[Positive, about("tokens generated in a turn")] = 8
    page_size: Annotated[Positive, about("tokens per page")] = 16
    max_running: Annotated[
        Positive, about("requests that a server computes at once; a CPU gains little from more")
    ] = 4
    storage: Annotated[Literal["file", "redis"], about("storage that is killed and comes back")] = "file"
    plain_clients: Annotated[Natural, about("conversations that are checked against plain transformers")] = 3
    seed: int = 0

    def check(self) -> None:
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
        """Maximum number of that prompt's tokens that can be restored.

        These are all whole pages of computed tokens. The last token of an answer was never fed to the model.
        Checkpoints are kept at the last page boundary of each prompt and each answer.
        """
        if not round_:
            return 0
        return (self.prompt(round_) - self.request_length - 1) // self.page_size * self.page_size

    @property
    def ceiling(self) -> int:
        """Cached tokens of the whole run if the cache loses nothing."""
        return self.num_clients * sum(map(self.kept, range(self.num_rounds)))

    @property
    def prompt_tokens(self) -> int:
        return self.num_clients * sum(map(self.prompt, range(self.num_rounds)))

    @property
    def pages(self) -> int:
        """Total pages of all finished conversations."""
        longest = self.prompt(self.num_rounds - 1) + self.output_length
        return self.num_clients * -(-longest // self.page_size)


class HandoverOptions(CommandOptions, frozen=True):
    """What is measured by `bench handover`.

    Raises:
        ConfigError: the tiny model has no positions for so many tokens.
    """

    model: Annotated[Literal["qwen3_5", "deepseek_v4"], about("class of the small random model")] = "qwen3_5"
    tokens: Annotated[int, Meta(ge=64), about("tokens of a prompt")] = 2000
    rounds: Annotated[Positive, about("prompts")] = 20
    page_size: Annotated[Positive, about("tokens per page")] = 16
    seed: int = 0

    def check(self) -> None:
        if self.tokens > CONTEXT - self.page_size:
            raise ConfigError(f"--tokens {self.tokens}: the models have room for {CONTEXT}, with an answer")

    @property
    def whole(self) -> int:
        """Tokens of a prompt that can be restored."""
        return (self.tokens - 1) // self.page_size * self.page_size
