"""Conversations as SGLang's `bench_multiturn` has them: each request repeats all that was said before."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_servers import PAGE, Answer, Server

LEAST_TOKEN, MAX_TOKEN = 3, 500


class Turn(NamedTuple):
    """One request of one client."""

    turn: int
    client: int
    answer: Answer


class Comparison(NamedTuple):
    """How two runs differ.

    Attributes:
        turns: those that both have.
        different: (turn, client) whose tokens differ.
        largest: difference of two log-probabilities of the same token.
    """

    turns: int
    different: list[tuple[int, int]]
    largest: float


@dataclass
class Conversations:
    """Clients that talk with a server, which may change between turns.

    Attributes:
        clients: how many.
        heard: tokens that a client adds at each turn.
        said: tokens that are generated at each turn.
        at_once: clients that ask at the same time.
        turns: what was asked so far.
    """

    clients: int = 10
    heard: int = PAGE * 3 // 4
    said: int = PAGE // 4
    at_once: int = 4
    turns: list[Turn] = field(default_factory=list)
    _words: list[list[int]] = field(default_factory=list)
    _chances: list[random.Random] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._words = [[] for _ in range(self.clients)]
        self._chances = [random.Random(client) for client in range(self.clients)]

    def run(self, server: Server, turns: Iterable[int]) -> list[Turn]:
        """Ask what all clients have to say in some turns; each turn ends before the next begins."""
        added: list[Turn] = []
        for turn in turns:
            for words, chance in zip(self._words, self._chances, strict=True):
                words += [chance.randrange(LEAST_TOKEN, MAX_TOKEN) for _ in range(self.heard)]
            with ThreadPoolExecutor(self.at_once) as pool:
                answers = list(pool.map(lambda words: server.ask(words, new=self.said), self._words))
            for client, answer in enumerate(answers):
                self._words[client] += answer.tokens
                added.append(Turn(turn, client, answer))
        self.turns += added
        return added


def cached(turns: Sequence[Turn], place: str | None = None) -> int:
    """Return tokens of prompts that were not computed, of one place only if it is given."""
    return sum(each.answer.cached if place is None else each.answer.places.get(place, 0) for each in turns)


def hit_rates(turns: Sequence[Turn]) -> list[float]:
    """Return the share of prompt tokens that were not computed, turn by turn."""
    rates = []
    for turn in sorted({each.turn for each in turns}):
        answers = [each.answer for each in turns if each.turn == turn]
        rates.append(sum(each.cached for each in answers) / sum(each.prompt for each in answers))
    return rates


def compare(left: Sequence[Turn], right: Sequence[Turn]) -> Comparison:
    ours = {(each.turn, each.client): each.answer for each in left}
    theirs = {(each.turn, each.client): each.answer for each in right}
    both = sorted(ours.keys() & theirs.keys())
    different = [key for key in both if ours[key].tokens != theirs[key].tokens]
    gaps = [
        abs(mine - other)
        for key in both
        if key not in different
        for mine, other in zip(ours[key].logprobs, theirs[key].logprobs, strict=True)
    ]
    return Comparison(len(both), different, max(gaps, default=0.0))
