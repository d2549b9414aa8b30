"""How much patience the core has with an engine, and what it answers for one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import NamedTuple

from asynchicache.errors import ConfigError
from asynchicache.types import Outcome, check_number

_MAY_BE_ZERO = ("retries", "known_pages")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How much patience the core has with an engine.

    Attributes:
        deadline: seconds for one call of the engine. Also for what comes before it: pages that wait for
            their turn so long since they were asked for, or since another part of the same call was
            answered, are TIMEOUT, and the engine is not asked for them. Puts wait as long as it takes.
            Default: 10.
        batch_bytes: bytes of pages that one call moves at most, besides `Capabilities.batch_pages`; with
            `Capabilities.concurrency` calls at once it bounds what is under way. Default: 64 MiB.
        retries: times that pages are asked for again whose call failed at once. Only calls that change
            nothing are repeated, and none whose deadline has passed. Default: 1.
        failures: failed or late calls in a row that open the breaker. Default: 5.
        cooldown: seconds that the breaker stays open before one call may try. Default: 5.
        closing: seconds that `aclose` waits for calls that still run, and for the engine. Default: 10.
        clearing: seconds that a backend may take to clear one pool. Default: 300.
        opening: seconds that a backend may take to open one pool. Default: 60.
        known_pages: pages of a shared engine that are remembered to be there, so that it need not be
            asked again, and pages that were found damaged; 0 for none. Default: 65536.
        known_seconds: how long a page is remembered to be there: others may delete it. Default: 30.
    """

    deadline: float = 10.0
    batch_bytes: int = 64 << 20
    retries: int = 1
    failures: int = 5
    cooldown: float = 5.0
    closing: float = 10.0
    clearing: float = 300.0
    opening: float = 60.0
    known_pages: int = 1 << 16
    known_seconds: float = 30.0

    def __post_init__(self) -> None:
        for option in fields(self):
            value, least = getattr(self, option.name), option.name in _MAY_BE_ZERO
            check_number(f"storage limit {option.name}", value, whole=option.type == "int")
            if not (value > 0 or (least and value == 0)):
                rule = "0 or more" if least else "above 0"
                raise ConfigError(f"storage limit {option.name} {value!r} must be {rule}")


class BatchResult(NamedTuple):
    """What became of a call's pages.

    Attributes:
        outcomes: one a key.
        lingering: None if the slots are the caller's again. Else done as soon as the engine has let
            go of them, or cancelled if the pool was closed first: then they are never safe again.
    """

    outcomes: list[Outcome]
    lingering: asyncio.Future[None] | None = None

    @property
    def present(self) -> bytes:
        """One byte a key, 1 where the outcome is HIT: what `storage.hits` reads."""
        return bytes([outcome is Outcome.HIT for outcome in self.outcomes])
