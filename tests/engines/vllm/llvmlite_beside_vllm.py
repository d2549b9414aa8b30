"""Imported first, lets numba be in a worker of vLLM 0.32 on a CPU, which looks into every object it finds.

llvmlite's library answers every name, `__dict__` too, with a function that vLLM takes for a dictionary.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi

_answer = ffi._lib_wrapper.__getattr__


def _answer_names(library: Any, name: str) -> Any:
    if name == "__dict__":
        raise AttributeError(name)
    return _answer(library, name)


ffi._lib_wrapper.__getattr__ = _answer_names
