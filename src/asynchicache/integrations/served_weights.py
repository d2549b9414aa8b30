"""The weights that an engine computes with, as a name in keys. Engines change weights while they run."""

from __future__ import annotations

import threading
import uuid


class ServedWeights:
    """Names the weights behind the pages that an engine writes and looks up.

    Weights of which nobody gave a version get a name of their own, which no other process finds again. So
    does memory that may hold pages of several weights: from a change until the engine drops its pages.

    May be called from any thread.

    Args:
        version: of the weights at the start; empty if only the cache's `weight_version` names them.
    """

    def __init__(self, version: str = "") -> None:
        self._lock = threading.Lock()
        self._version = version
        self._mixed = ""
        self._used = False

    def name(self) -> str:
        """Return the name for the keys of a call that begins now; empty for the weights of the start."""
        with self._lock:
            self._used = True
            return self._mixed or self._version

    @property
    def mixed(self) -> bool:
        """Whether the engine may hold pages of several weights."""
        return bool(self._mixed)

    def changed(self, version: str = "") -> None:
        """The weights changed.

        Args:
            version: what names them in all processes; empty if nobody said it.
        """
        with self._lock:
            self._version = version or _unique()
            if self._used:
                self._mixed = _unique()

    def dropped(self) -> None:
        """The engine holds no page any more that was computed before."""
        with self._lock:
            self._mixed, self._used = "", False


def _unique() -> str:
    return f"unnamed-{uuid.uuid4().hex}"
