"""Lets threads of ours call CUDA while an engine captures a graph on a thread of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """CUDA calls of the body do not break a graph capture of another thread.

    In the global mode, torch's default, a capture does not survive a call of any thread that could wait
    (it asks for an event, it pins memory), unless that thread's own mode is relaxed. Torch does this where
    it pins memory itself. (CUDA: cuThreadExchangeStreamCaptureMode, which swaps the two modes)
    """
    mode = ctypes.c_int(_RELAXED)
    _exchange()(ctypes.byref(mode))
    try:
        yield
    finally:
        _exchange()(ctypes.byref(mode))


@cache
def _exchange() -> Callable[[Any], object]:
    try:
        found: Callable[[Any], object] = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # no driver, hence no capture
        return lambda mode: None
    return found
