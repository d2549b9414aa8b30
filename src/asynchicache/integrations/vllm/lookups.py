"""Which chunks are in storage, as far as living requests have asked: answers come a step later, in batches.

The scheduler may not wait, so a first question is answered by "not known yet", and all of a step's first
questions go to storage together. Pure bookkeeping: one thread at a time, no waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Question:
    """One chunk that somebody asked for.

    Attributes:
        present: the answer; None until there is one.
        requests: who asked; the answer lives as long as one of them.
    """

    present: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Questions, and answers to them."""

    def __init__(self) -> None:
        self._questions: dict[bytes, _Question] = {}
        self._asked_by: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []

    def ask(self, key: bytes, request: str) -> bool | None:
        """Whether the chunk is there; None while that is not known."""
        question = self._questions.get(key)
        if question is None:
            question = self._questions[key] = _Question()
            self._new.append(key)
        question.requests.add(request)
        self._asked_by.setdefault(request, set()).add(key)
        return question.present

    def take_new(self) -> list[bytes]:
        """Questions that nobody has put to storage yet, each once."""
        new, self._new = self._new, []
        return [key for key in dict.fromkeys(new) if key in self._questions]

    def answer(self, keys: Iterable[bytes], present: Iterable[bool]) -> None:
        """What storage said; later news (`learn`) counts more."""
        for key, there in zip(keys, present, strict=True):
            question = self._questions.get(key)
            if question is not None and question.present is None:
                question.present = there

    def learn(self, keys: Iterable[bytes], *, present: bool) -> None:
        """Chunks were stored, or could not be read.

        A read that failed must end as a miss: the scheduler would ask, and read, for ever.
        """
        for key in keys:
            question = self._questions.get(key)
            if question is not None:
                question.present = present

    def forget(self, request: str) -> None:
        """A request has ended; answers that nobody else asked for are asked anew next time."""
        for key in self._asked_by.pop(request, ()):
            question = self._questions[key]
            question.requests.discard(request)
            if not question.requests:
                del self._questions[key]

    def __len__(self) -> int:
        return len(self._questions)
