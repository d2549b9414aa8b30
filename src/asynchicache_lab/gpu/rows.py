"""What a step of the GPU hour prints: a JSON object a line, at once, so that a step that dies keeps them."""
# ruff: noqa: T201

from __future__ import annotations

import json
import time


def tell(**found: object) -> None:
    print(json.dumps(found), flush=True)


class Deadline:
    """Seconds that a step may take; what does not fit is left out, in an order that the step chose.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    @property
    def passed(self) -> bool:
        return self.left <= 0
