"""Which chunks are in storage, as far as living requests have asked: answers come a step later, in batches.

The scheduler may not wait, so a first question is answered by "not known yet", and all of a step's first
questions go to storage together. Pure bookkeeping: one thread at a time, no waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Lookup:
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
        self._lookups: dict[bytes, _Lookup] = {}
        self._asked_by: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []

    def ask(self, key: bytes, request: str) -> bool | None:
        """Whether the chunk is there; None while that is not known."""
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = _Lookup()
            self._new.append(key)
        lookup.requests.add(request)
        self._asked_by.setdefault(request, set()).add(key)
        return lookup.present

    def take_new(self) -> list[bytes]:
        """Questions that nobody has put to storage yet, each once."""
        new, self._new = self._new, []
        return [key for key in dict.fromkeys(new) if key in self._lookups]

    def answer(self, keys: Iterable[bytes], present: Iterable[bool]) -> None:
        """What storage said; later news (`learn`) counts more."""
        for key, there in zip(keys, present, strict=True):
            lookup = self._lookups.get(key)
            if lookup is not None and lookup.present is None:
                lookup.present = there

    def learn(self, keys: Iterable[bytes], *, present: bool) -> None:
        """Chunks were stored, or could not be read.

        A read that failed must end as a miss: the scheduler would ask, and read, for ever.
        """
        for key in keys:
            lookup = self._lookups.get(key)
            if lookup is not None:
                lookup.present = present

    def forget(self, request: str) -> None:
        """A request has ended; answers that nobody else asked for are asked anew next time."""
        for key in self._asked_by.pop(request, ()):
            lookup = self._lookups[key]
            lookup.requests.discard(request)
            if not lookup.requests:
                del self._lookups[key]

    def __len__(self) -> int:
        return len(self._lookups)
