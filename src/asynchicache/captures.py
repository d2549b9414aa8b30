"""Lets threads of ours call CUDA while an engine captures a graph on a thread of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class beside_captures:  # noqa: N801 - it reads as a function, and costs less than a generator
    """What the body asks of CUDA breaks nobody's capture.

    In the global mode, torch's default, a capture does not survive a call of any thread that could wait
    (it asks for an event, it pins memory), unless that thread's own mode is relaxed. Torch does this where
    it pins memory itself. (CUDA: cuThreadExchangeStreamCaptureMode, which swaps the two modes)
    """

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = ctypes.c_int(_RELAXED)
        _exchange()(ctypes.byref(self._mode))

    def __exit__(self, *raised: object) -> None:
        _exchange()(ctypes.byref(self._mode))


@cache
def _exchange() -> Callable[[Any], object]:
    try:
        found: Callable[[Any], object] = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no driver, so that nobody captures
        return lambda mode: None
    return found
