"""Lookups of chunks in storage: sent in batches, answered in a later scheduler step.

The scheduler must not block, so the first lookup of a chunk returns "not known yet", and all first lookups of
a step go to storage in one batch. Bookkeeping only: never blocks; one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Lookup:
    """The lookup of one chunk.

    Attributes:
        present: the answer; None until it is known.
        requests: requests that asked; the answer is kept until all of them have ended.
    """

    present: bool | None = None
    requests: set[str] = field(default_factory=set)


class Lookups:
    """Pending and answered lookups."""

    def __init__(self) -> None:
        self._lookups: dict[bytes, _Lookup] = {}
        self._asked_by: dict[str, set[bytes]] = {}
        self._new: list[bytes] = []

    def ask(self, key: bytes, request: str) -> bool | None:
        """Return whether storage has the chunk; None until the answer arrives."""
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = _Lookup()
            self._new.append(key)
        lookup.requests.add(request)
        self._asked_by.setdefault(request, set()).add(key)
        return lookup.present

    def take_new(self) -> list[bytes]:
        """Return the lookups that have not been sent to storage, each once."""
        new, self._new = self._new, []
        return [key for key in dict.fromkeys(new) if key in self._lookups]

    def answer(self, keys: Iterable[bytes], present: Iterable[bool]) -> None:
        """Record storage's answers; values already set by `learn` take precedence."""
        for key, there in zip(keys, present, strict=True):
            lookup = self._lookups.get(key)
            if lookup is not None and lookup.present is None:
                lookup.present = there

    def learn(self, keys: Iterable[bytes], *, present: bool) -> None:
        """Record that chunks were stored, or could not be read.

        A read that failed must become a miss, or the scheduler would look up and read the chunk forever.
        """
        for key in keys:
            lookup = self._lookups.get(key)
            if lookup is not None:
                lookup.present = present

    def forget(self, request: str) -> None:
        """Drop a request that has ended, and the answers that no other request uses."""
        for key in self._asked_by.pop(request, ()):
            lookup = self._lookups[key]
            lookup.requests.discard(request)
            if not lookup.requests:
                del self._lookups[key]

    def __len__(self) -> int:
        return len(self._lookups)
