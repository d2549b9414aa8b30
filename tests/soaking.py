"""Parameters of which `make test` tries the first, and `make soak` all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def first(count: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Values of one parameter, or tuples of several; those behind the first `count` are marked soak."""
    soak = [pytest.mark.soak]
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=soak if at >= count else [])
        for at, value in enumerate(values)
    ]
