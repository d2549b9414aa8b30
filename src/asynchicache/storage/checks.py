"""What of a read is checked by the core, and what an engine is believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome


class Checks:
    """The checks that an engine leaves to the core.

    Args:
        binding: the pool's slots.
        capabilities: `checks` and `shared` say what the engine does itself.
        port: threads; a page is hashed in one.
    """

    def __init__(self, binding: PoolBinding, capabilities: Capabilities, port: Port) -> None:
        self._binding = binding
        self._capabilities = capabilities
        self._port = port

    async def check(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], outcomes: list[Outcome]
    ) -> list[Outcome]:
        """The outcomes of a read; those of pages that are not what was sealed are CORRUPT."""
        if Outcome.HIT not in outcomes:  # in C
            return outcomes
        if not self._capabilities.checks:
            return await self._port.run_blocking(partial(_each, self._binding.check, keys, slots, outcomes))
        if self._capabilities.shared:  # others write there too, under names and at places of their choice
            return _each(self._named, keys, slots, outcomes)
        return outcomes

    def _named(self, slot: int, key: ObjectKey) -> Outcome:
        """Whether the header in `slot` is that of `key`: some microseconds, whatever the size of the page."""
        found = self._binding.identify(self._binding.header(slot))
        return Outcome.HIT if found == key else Outcome.CORRUPT


def _each(
    check: Callable[[int, ObjectKey], Outcome],
    keys: Sequence[ObjectKey],
    slots: Sequence[int],
    outcomes: list[Outcome],
) -> list[Outcome]:
    return [
        check(slot, key) if outcome is Outcome.HIT else outcome
        for key, slot, outcome in zip(keys, slots, outcomes, strict=True)
    ]
