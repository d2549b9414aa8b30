"""What an engine may promise."""

from __future__ import annotations

import pytest

from asynchicache.errors import ConfigError
from asynchicache.storage.protocol import Capabilities


@pytest.mark.parametrize("name", ["batch_pages", "batch_keys", "object_pages", "concurrency"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "0 must be above 0"),
        (-1, "-1 must be above 0"),
        (1.5, "1.5 must be a whole number"),
        ("8", "'8' must be a whole number"),
        (True, "True must be a whole number"),
    ],
)
def test_limits_are_whole_numbers_above_0(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"capability {name} {message}"):
        Capabilities(durable=False, checks=True, **{name: value})


def test_a_limit_of_one_is_a_limit() -> None:
    limits = Capabilities(durable=False, checks=True, batch_pages=1, batch_keys=1, concurrency=1)

    assert (limits.batch_pages, limits.batch_keys, limits.concurrency) == (1, 1, 1)
