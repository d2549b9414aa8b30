"""The map of pages to slots of files. Every change is one transaction, durable before it is answered.

Each reservation gives a slot a new generation. Clients name slot and generation of a page, so calls about a
slot that was reused meanwhile have no effect.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asynchicache.backends.hf3fs.metadata.database import FILE, open_database, transaction, undamaged
from asynchicache.backends.hf3fs.metadata.leases import Slot, SlotLeases
from asynchicache.backends.hf3fs.metadata.messages import (
    Claim,
    Located,
    NamespaceStatus,
    Opened,
    Reserved,
    SlotVersion,
    Status,
    Verdict,
)
from asynchicache.errors import ConfigError, StorageFormatError, UsageError

LEASE_SECONDS = 60.0
_MAX_TOUCHES = 4096
_FREE, _RESERVED, _HELD = range(3)


class UnknownNamespaceError(UsageError):
    """Raised for a handle that another store made, such as after the service was given another folder."""


class MetadataStore:
    """All namespaces of one service. Not thread-safe: one call at a time.

    Args:
        folder: the folder of the database; created if it is missing.
        lease_seconds: how long a reservation or a read lease lasts unless its client renews or ends it.
        now: a monotonic clock, in seconds.

    Raises:
        ConfigError: `lease_seconds` is not above 0, or infinite.
        StorageError: the folder cannot be used; its subclasses say why.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lease_seconds: float = LEASE_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < lease_seconds < math.inf:
            raise ConfigError(f"lease_seconds={lease_seconds!r} must be above 0, and finite")
        self._database = open_database(folder)
        self._leases = SlotLeases(lease_seconds, now)
        self._touched: dict[Slot, int] = {}
        with undamaged(folder / FILE):
            self.id: str = self._one("SELECT id FROM store")
            self._clock: int = self._one("SELECT coalesce(max(used), 0) FROM slots")
            found = self._database.execute("SELECT namespace, slot FROM slots WHERE state = ?", (_RESERVED,))
            self._leases.write([Slot(*row) for row in found])

    def open(self, name: str, slots: int, frame_bytes: int) -> Opened:
        """Create a namespace, or return the existing one. It grows if it has fewer slots, but never shrinks,
        because its other users would lose their pages.

        Raises:
            StorageFormatError: the namespace exists with frames of another size.
        """
        with transaction(self._database):
            self._database.execute(
                "INSERT INTO namespaces (name, frame_bytes, slots) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO UPDATE SET slots = max(slots, excluded.slots)",
                (name, frame_bytes, slots),
            )
            number, found, slots = self._database.execute(
                "SELECT number, frame_bytes, slots FROM namespaces WHERE name = ?", (name,)
            ).fetchone()
            if found != frame_bytes:
                raise StorageFormatError(f"{name} has frames of {found} bytes, {frame_bytes} were asked for")
        return Opened(f"{self.id}.{number}", self.id, slots, self._leases.seconds)

    def number(self, handle: str) -> int:
        """Return the number of the namespace that a handle of `open` names.

        Raises:
            UnknownNamespaceError: there is none.
        """
        store, _, text = handle.partition(".")
        number = int(text) if store == self.id and text.isdecimal() and len(text) < 19 else 0
        row = self._database.execute("SELECT 1 FROM namespaces WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise UnknownNamespaceError(f"this store has no namespace {handle!r}; open it first")
        return number

    def exists(self, namespace: int, keys: Sequence[str]) -> list[bool]:
        """Whether each page is there."""
        held = self._held(namespace, keys)
        return [key in held for key in keys]

    def locate(self, namespace: int, keys: Sequence[str]) -> Located:
        """Locate pages, count them as used (the first one most recently), and lease their slots."""
        held = self._held(namespace, keys)
        self._use(namespace, held, reversed(keys))
        slots = [Slot(namespace, place.slot) for place in held.values()]
        return Located(self._leases.read(slots) if slots else 0, [held.get(key) for key in keys])

    def touch(self, namespace: int, keys: Sequence[str]) -> int:
        """Count pages as used now, the last one most recently; return how many are held."""
        held = self._held(namespace, keys)
        self._use(namespace, held, keys)
        return len(held)

    def end_reads(self, leases: Iterable[int]) -> None:
        self._leases.end_reads(leases)

    def reserve(self, namespace: int, token: str, keys: Sequence[str]) -> Reserved:
        """Reserve slots for missing pages: free slots, then new ones, then those of the least recently used
        pages without a read lease that `keys` does not name. If there are too few, the last of `keys` get
        none. The same token gets the same slots again.

        Raises:
            UsageError: a key is repeated; its pages would be written to one slot.
        """
        if len(set(keys)) != len(keys):
            raise UsageError("a key is given twice in one reservation")
        with transaction(self._database):
            expired = self._reclaim(namespace)
            held = self._held(namespace, keys)
            self._touch(self._slots(namespace, held, reversed(keys)))
            self._write_touches()
            places = self._reserved(namespace, token)
            wanted = [key for key in keys if key not in held and key not in places]
            own = {place.slot for place in held.values()}
            places |= self._assign(namespace, token, wanted, own)
        self._leases.end_writes(expired)
        self._leases.write(Slot(namespace, place.slot) for place in places.values())
        return Reserved(
            existed=[key in held for key in keys],
            places=[None if key in held else places.get(key) for key in keys],
        )

    def confirm(self, namespace: int, claims: Sequence[Claim]) -> list[Verdict]:
        """Make written pages visible. Repeating the call gives the same answer."""
        with transaction(self._database):
            # The first page of a path is the most recently used.
            verdicts = [self._confirm(namespace, claim) for claim in reversed(claims)][::-1]
        self._leases.end_writes(
            Slot(namespace, claim.slot)
            for claim, verdict in zip(claims, verdicts, strict=True)
            if verdict != "lost"
        )
        return verdicts

    def release(self, namespace: int, places: Sequence[SlotVersion]) -> int:
        """Release slots that were reserved but not written; return their number."""
        with transaction(self._database):
            freed = [place.slot for place in places if self._free(namespace, place, _RESERVED)]
        self._leases.end_writes(Slot(namespace, slot) for slot in freed)
        return len(freed)

    def forget(self, namespace: int, claims: Sequence[Claim]) -> list[bool]:
        """Drop pages that a reader found damaged, unless their slots were reused meanwhile."""
        with transaction(self._database):
            return [
                self._free(namespace, SlotVersion(claim.slot, claim.generation), _HELD) for claim in claims
            ]

    def delete(self, namespace: int, keys: Sequence[str]) -> list[bool]:
        """Drop pages by key; return whether each was held. A repeated key counts only once."""
        with transaction(self._database):
            held = self._held(namespace, keys)
            for place in held.values():
                self._free(namespace, place, _HELD)
        return [held.pop(key, None) is not None for key in keys]

    def clear(self, namespace: int) -> int:
        """Drop every page of this namespace only; return their number."""
        with transaction(self._database):
            return self._database.execute(
                "UPDATE slots SET state = ?, used = 0, key = NULL WHERE namespace = ? AND state = ?",
                (_FREE, namespace, _HELD),
            ).rowcount

    def status(self) -> Status:
        rows = self._database.execute(
            "SELECT name, slots, (SELECT count(*) FROM slots WHERE namespace = number AND state = ?), "
            "(SELECT count(*) FROM slots WHERE namespace = number AND state = ?), evicted "
            "FROM namespaces ORDER BY number",
            (_HELD, _RESERVED),
        )
        return Status(self.id, [NamespaceStatus(*row) for row in rows])

    def close(self) -> None:
        """Save the latest uses, and close the database."""
        with transaction(self._database):
            self._write_touches()
        self._database.close()

    def _one(self, query: str, *values: int) -> Any:
        return self._database.execute(query, values).fetchone()[0]

    def _held(self, namespace: int, keys: Sequence[str]) -> dict[str, SlotVersion]:
        rows = self._database.execute(
            "SELECT key, slot, generation FROM slots "
            "WHERE namespace = ? AND state = 2 AND key IN (SELECT value FROM json_each(?))",
            (namespace, msgspec.json.encode(keys).decode()),
        )
        return {key: SlotVersion(slot, generation) for key, slot, generation in rows}

    def _reserved(self, namespace: int, token: str) -> dict[str, SlotVersion]:
        rows = self._database.execute(
            "SELECT key, slot, generation FROM slots WHERE namespace = ? AND state = 1 AND token = ?",
            (namespace, token),
        )
        return {key: SlotVersion(slot, generation) for key, slot, generation in rows}

    def _slots(self, namespace: int, held: dict[str, SlotVersion], keys: Iterable[str]) -> list[Slot]:
        """Slots of the held pages, in the order of `keys`."""
        return [Slot(namespace, held[key].slot) for key in keys if key in held]

    def _use(self, namespace: int, held: dict[str, SlotVersion], keys: Iterable[str]) -> None:
        """Count pages as used, the last one most recently; write the counts once there are many."""
        self._touch(self._slots(namespace, held, keys))
        if len(self._touched) > _MAX_TOUCHES:
            with transaction(self._database):
                self._write_touches()

    def _touch(self, slots: Iterable[Slot]) -> None:
        """Mark slots as the most recently used; the next change writes this to the database."""
        for slot in slots:
            self._clock += 1
            self._touched[slot] = self._clock

    def _write_touches(self) -> None:
        rows = [(used, *slot) for slot, used in self._touched.items()]
        self._database.executemany(
            "UPDATE slots SET used = ? WHERE namespace = ? AND slot = ? AND state = 2", rows
        )
        self._touched.clear()

    def _reclaim(self, namespace: int) -> list[Slot]:
        """Free the slots of expired write leases."""
        expired = self._leases.expired_writes(namespace)
        self._database.executemany(
            "UPDATE slots SET state = 0, used = 0, key = NULL, token = NULL "
            "WHERE namespace = ? AND slot = ? AND state = 1",
            [(namespace, slot) for slot in expired],
        )
        return [Slot(namespace, slot) for slot in expired]

    def _assign(
        self, namespace: int, token: str, keys: Sequence[str], keep: set[int]
    ) -> dict[str, SlotVersion]:
        """Reserve a slot for each key, as far as there are slots; each gets a generation of its own."""
        slots = self._take(namespace, len(keys), keep)
        last = self._one("UPDATE store SET generation = generation + ? RETURNING generation", len(slots))
        places = [SlotVersion(slot, last - len(slots) + 1 + index) for index, slot in enumerate(slots)]
        assigned = dict(zip(keys, places, strict=False))
        self._database.executemany(
            "INSERT OR REPLACE INTO slots (namespace, slot, state, generation, key, token) "
            "VALUES (?, ?, 1, ?, ?, ?)",
            [(namespace, place.slot, place.generation, key, token) for key, place in assigned.items()],
        )
        return assigned

    def _take(self, namespace: int, count: int, keep: set[int]) -> list[int]:
        """Up to `count` slots, none of `keep`, ascending, so that pages that are written together lie in one
        run."""
        slots = self._oldest(namespace, _FREE, count, keep)
        known = self._one("SELECT coalesce(max(slot) + 1, 0) FROM slots WHERE namespace = ?", namespace)
        limit = self._one("SELECT slots FROM namespaces WHERE number = ?", namespace)
        slots += range(known, min(limit, known + count - len(slots)))
        evicted = self._oldest(namespace, _HELD, count - len(slots), keep)
        self._database.execute(
            "UPDATE namespaces SET evicted = evicted + ? WHERE number = ?", (len(evicted), namespace)
        )
        return sorted(slots + evicted)

    def _oldest(self, namespace: int, state: int, count: int, keep: set[int]) -> list[int]:
        if count < 1:
            return []
        busy = keep | self._leases.being_read(namespace)
        rows = self._database.execute(
            "SELECT slot FROM slots WHERE namespace = ? AND state = ? ORDER BY used, slot LIMIT ?",
            (namespace, state, count + len(busy)),
        )
        return [slot for (slot,) in rows if slot not in busy][:count]

    def _confirm(self, namespace: int, claim: Claim) -> Verdict:
        row = self._database.execute(
            "SELECT state, key FROM slots WHERE namespace = ? AND slot = ? AND generation = ?",
            (namespace, claim.slot, claim.generation),
        ).fetchone()
        if row is None or row[0] == _FREE or row[1] != claim.key:
            return "lost"
        if row[0] == _HELD:  # its answer did not arrive
            return "stored"
        if self._held(namespace, [claim.key]):
            self._free(namespace, SlotVersion(claim.slot, claim.generation), _RESERVED)
            return "existed"
        self._clock += 1
        self._database.execute(
            "UPDATE slots SET state = 2, used = ?, token = NULL WHERE namespace = ? AND slot = ?",
            (self._clock, namespace, claim.slot),
        )
        return "stored"

    def _free(self, namespace: int, place: SlotVersion, state: int) -> bool:
        """Free a slot if it is in that state, and still of that generation."""
        changed = self._database.execute(
            "UPDATE slots SET state = 0, used = 0, key = NULL, token = NULL "
            "WHERE namespace = ? AND slot = ? AND generation = ? AND state = ?",
            (namespace, place.slot, place.generation, state),
        ).rowcount
        return changed == 1
