"""The flags of `bench ranks`. Imports little, so that `--help` and flag errors are fast."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from asynchicache.options import CommandOptions, Positive, about

ROUNDS = 4
"""Turns of a conversation."""


class RanksOptions(CommandOptions, frozen=True):
    """What is played; lengths are in tokens."""

    ranks: Annotated[int, Meta(ge=2, le=64), about("processes, the leader included")] = 4
    conversations: Annotated[Positive, about(f"conversations of {ROUNDS} turns")] = 24
    request_length: Annotated[Positive, about("new tokens of a turn")] = 2048
    page_size: Annotated[Positive, about("tokens per page")] = 64
    decode_steps: Annotated[Positive, about("steps behind each prompt that load and publish nothing")] = 8
    collectives: Annotated[Positive, about("all-reduces to measure, in all")] = 200
    simulated: Annotated[
        bool, about("all ranks in this process and in virtual time, with the pools of a 397B model")
    ] = False
    seed: int = 0

    @property
    def pages(self) -> int:
        """Whole pages of a conversation's last prompt."""
        return -(-ROUNDS * self.request_length // self.page_size)
