"""Where a prompt should end a forward so that prompts that wait behind it can resume there.

A state, or the last pages of a window, exist only where a forward ended. Of prompts that come together the
first one would leave none where they part, and the second would compute the common beginning again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import islice

import numpy as np

from asynchicache.integrations.transformers.generation import GenerationJob

_LOOKED_AT = 16
"""Waiting prompts that are compared: a comparison takes microseconds, and there is one at every chunk."""


class PromptSharing:
    """The prompts that no forward has begun yet, in their order of arrival."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._waiting: dict[GenerationJob, None] = {}

    def join(self, job: GenerationJob) -> None:
        self._waiting[job] = None

    def leave(self, job: GenerationJob) -> None:
        """The prompt's turn has come, or it ended. Idempotent."""
        self._waiting.pop(job, None)

    def cut(self, job: GenerationJob, at: int) -> int | None:
        """The length above `at` where most waiting prompts leave the prompt of `job`, in whole pages.

        Of equally many the longest; None if no waiting prompt shares that much.
        """
        place = (job.namespace, job.salt)
        others = (other for other in self._waiting if (other.namespace, other.salt) == place)
        lengths = Counter(
            length for length in self._shared(job.prompt, islice(others, _LOOKED_AT)) if length > at
        )
        return max(lengths, key=lambda length: (lengths[length], length)) if lengths else None

    def _shared(self, prompt: array[int], others: Iterable[GenerationJob]) -> Iterable[int]:
        for other in others:
            # As a match does, leave a token to compute: a longer hit is none.
            most = min(len(prompt), len(other.prompt) - 1)
            common = common_tokens(prompt, other.prompt, most)
            yield common - common % self._page_size


def common_tokens(one: array[int], other: array[int], most: int) -> int:
    """The number of leading tokens, of the first `most`, that two prompts share."""
    parts = np.frombuffer(one, np.int64)[:most] != np.frombuffer(other, np.int64)[:most]
    first = int(parts.argmax()) if most else 0
    return first if most and parts[first] else most
