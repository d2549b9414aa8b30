"""A synthetic multi-turn chat, determined by its seed.

Sessions share a system prompt and take turns in a new random order each round. A turn appends a user message
and a response to the session's history. Sometimes a session first goes back to a point inside its last turn,
like a user who asks for another answer; the tree must then split a node.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """The shape of a chat.

    Attributes:
        sessions, rounds: every session takes one turn per round.
        system_tokens: length of the common system prompt.
        shortest, longest: bounds of a message's length in tokens, the upper one exclusive.
        regenerate_share: probability that a turn goes back before it appends.
        vocabulary: token ids are 1 to `vocabulary - 1`.
        seed: seed of numpy's default generator.
    """

    sessions: int
    rounds: int
    system_tokens: int
    shortest: int = 64
    longest: int = 448
    regenerate_share: float = 0.1
    vocabulary: int = 150_000
    seed: int = 1234


SCENARIOS: Mapping[str, ChatWorkload] = {
    "tiny": ChatWorkload(sessions=8, rounds=4, system_tokens=256),
    "chat": ChatWorkload(sessions=64, rounds=8, system_tokens=2048),
    "big": ChatWorkload(sessions=128, rounds=15, system_tokens=4096),
}


class ChatTurn(NamedTuple):
    """One request: `tokens` are the prompt (the first `prompt` tokens) and the response."""

    session: int
    round: int
    prompt: int
    tokens: array[int]


def turns(workload: ChatWorkload) -> Iterator[ChatTurn]:
    """The chat's turns, in order of arrival."""
    draw = _Draw(workload)
    system = draw.ids(workload.system_tokens)
    histories = [system] * workload.sessions
    last_turn = [len(system)] * workload.sessions  # start of the session's last turn
    for number in range(workload.rounds):
        for session in draw.order():
            history = histories[session]
            if number and draw.regenerates():
                history = history[: draw.between(last_turn[session], len(history))]
            user = draw.message()
            response = draw.message()
            last_turn[session] = len(history)
            histories[session] = np.concatenate((history, user, response))
            yield ChatTurn(session, number, len(history) + len(user), _as_array(histories[session]))


class _Draw:
    """The random choices of a chat; their order is part of the workload's definition."""

    def __init__(self, workload: ChatWorkload) -> None:
        self._workload = workload
        self._random = np.random.default_rng(workload.seed)

    def between(self, low: int, high: int) -> int:
        return int(self._random.integers(low, high))

    def ids(self, count: int) -> TokenIds:
        return self._random.integers(1, self._workload.vocabulary, count, dtype=np.int64)

    def message(self) -> TokenIds:
        return self.ids(self.between(self._workload.shortest, self._workload.longest))

    def order(self) -> list[int]:
        return [int(session) for session in self._random.permutation(self._workload.sessions)]

    def regenerates(self) -> bool:
        return bool(self._random.random() < self._workload.regenerate_share)


def _as_array(ids: TokenIds) -> array[int]:
    tokens = array("q")
    tokens.frombytes(ids.tobytes())
    return tokens


class Stats(NamedTuple):
    """Totals of a chat.

    Attributes:
        turns: number of turns.
        unique_tokens: tokens that a radix tree of single tokens would hold at the end.
        prompt_tokens: number of tokens looked up.
        digest: twelve hexadecimal digits over the tokens of all turns; equal for equal chats.
    """

    turns: int
    unique_tokens: int
    prompt_tokens: int
    digest: str


def stats(workload: ChatWorkload) -> Stats:
    """Compute a chat's totals without a tree, so that trees can be checked against them."""
    count = prompts = 0
    unique = workload.system_tokens
    digest = hashlib.sha256()
    before: dict[int, array[int]] = {}
    for turn in turns(workload):
        count += 1
        prompts += turn.prompt
        digest.update(turn.tokens)
        known = _common(before[turn.session], turn.tokens) if turn.round else workload.system_tokens
        unique += len(turn.tokens) - known
        before[turn.session] = turn.tokens
    return Stats(count, unique, prompts, digest.hexdigest()[:12])


def _common(one: array[int], other: array[int]) -> int:
    shorter = min(len(one), len(other))
    differs = np.asarray(one)[:shorter] != np.asarray(other)[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
