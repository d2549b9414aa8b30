"""The map of pages to slots of files, in SQLite. Every change is one transaction, durable when it is
answered; any number of processes of a host may have it open.

Each reservation gives a slot a new generation. Clients name slot and generation of a page, so calls about a
slot that was reused meanwhile have no effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from asynchicache.backends.hf3fs.metadata.database import FILE, open_database, transaction, undamaged
from asynchicache.backends.hf3fs.metadata.words import (
    LEASE_SECONDS,
    Claim,
    Located,
    OpenedNamespace,
    Reserved,
    SlotVersion,
    Verdict,
)
from asynchicache.errors import StorageError, StorageFormatError, UsageError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_FREE, _RESERVED, _HELD = range(3)


class UnknownNamespaceError(StorageError):
    """Raised for a handle that another store made, such as after its folder was replaced."""


class MetadataStore:
    """All namespaces of one database. Not thread-safe: one call at a time.

    Args:
        folder: the folder of the database; created if it is missing.
        lease_seconds: how long a reservation or a read lease lasts unless its client ends it.
        now: seconds on a clock that all processes of the host share.
        seconds: how long a call waits for those of other processes.

    Raises:
        StorageError: the folder cannot be used; its subclasses say why.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lease_seconds: float = LEASE_SECONDS,
        now: Callable[[], float] = time.monotonic,
        seconds: float = 5.0,
    ) -> None:
        self._database = open_database(folder, seconds)
        self._lease_seconds = lease_seconds
        self._now = now
        with undamaged(folder / FILE):
            self.id: str = self._one("SELECT id FROM store")
            self._begin_anew()

    def _begin_anew(self) -> None:
        """With its host the clock started anew: nobody reads, and reservations get a full lease."""
        boot = _BOOT.read_text("ascii").strip() if _BOOT.exists() else ""
        with transaction(self._database):
            if self._one("SELECT boot FROM store") != boot:
                self._database.execute("UPDATE store SET boot = ?", (boot,))
                self._database.execute("DELETE FROM reads")
                self._database.execute("UPDATE slots SET ends = ? WHERE state = ?", (self._end(), _RESERVED))

    def _end(self) -> float:
        return self._now() + self._lease_seconds

    def open(self, name: str, slots: int, frame_bytes: int) -> OpenedNamespace:
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
        return OpenedNamespace(f"{self.id}.{number}", self.id, slots)

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
        with transaction(self._database, durable=False):
            held = self._held(namespace, keys)
            self._use(namespace, held, reversed(keys))
            lease = uuid4().int >> 66 if held else 0
            rows = [(namespace, place.slot, lease, self._end()) for place in held.values()]
            self._database.executemany("INSERT INTO reads VALUES (?, ?, ?, ?)", rows)
        return Located(lease, [held.get(key) for key in keys])

    def touch(self, namespace: int, keys: Sequence[str]) -> int:
        """Count pages as used now, the last one most recently; return how many are held."""
        with transaction(self._database, durable=False):
            held = self._held(namespace, keys)
            self._use(namespace, held, keys)
        return len(held)

    def end_reads(self, leases: Iterable[int]) -> None:
        with transaction(self._database, durable=False):
            self._database.executemany("DELETE FROM reads WHERE lease = ?", [(lease,) for lease in leases])

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
            self._reclaim(namespace)
            held = self._held(namespace, keys)
            self._use(namespace, held, reversed(keys))
            places = self._reserved(namespace, token)
            wanted = [key for key in keys if key not in held and key not in places]
            own = {place.slot for place in held.values()}
            places |= self._assign(namespace, token, wanted, own)
        return Reserved(
            existed=[key in held for key in keys],
            places=[None if key in held else places.get(key) for key in keys],
        )

    def confirm(self, namespace: int, claims: Sequence[Claim]) -> list[Verdict]:
        """Make written pages visible. Repeating the call gives the same answer."""
        with transaction(self._database):
            # The first page of a path is the most recently used.
            return [self._confirm(namespace, claim) for claim in reversed(claims)][::-1]

    def release(self, namespace: int, places: Sequence[SlotVersion]) -> int:
        """Release slots that were reserved but not written; return their number."""
        with transaction(self._database):
            return sum(self._free(namespace, place, _RESERVED) for place in places)

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

    def leaving(self, namespace: int, pages: int) -> list[str]:
        """The pages that make room for so many new ones, the first to go first."""
        held, reserved, _ = self.counts(namespace)
        limit = self._one("SELECT slots FROM namespaces WHERE number = ?", namespace)
        rows = self._database.execute(
            "SELECT key FROM slots WHERE namespace = ? AND state = ? ORDER BY used, slot LIMIT ?",
            (namespace, _HELD, max(0, pages - (limit - held - reserved))),
        )
        return [key for (key,) in rows]

    def counts(self, namespace: int) -> tuple[int, int, int]:
        """How many pages are held and reserved, and were evicted."""
        return tuple(
            self._database.execute(
                "SELECT (SELECT count(*) FROM slots WHERE namespace = number AND state = ?), "
                "(SELECT count(*) FROM slots WHERE namespace = number AND state = ?), evicted "
                "FROM namespaces WHERE number = ?",
                (_HELD, _RESERVED, namespace),
            ).fetchone()
        )

    def close(self) -> None:
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

    def _use(self, namespace: int, held: dict[str, SlotVersion], keys: Iterable[str]) -> None:
        """Count pages as used, the last one most recently."""
        slots = [held[key].slot for key in keys if key in held]
        last = self._one("UPDATE store SET clock = clock + ? RETURNING clock", len(slots))
        self._database.executemany(
            "UPDATE slots SET used = ? WHERE namespace = ? AND slot = ?",
            [(last - len(slots) + 1 + index, namespace, slot) for index, slot in enumerate(slots)],
        )

    def _reclaim(self, namespace: int) -> None:
        """Free the slots of expired write leases."""
        self._database.execute(
            "UPDATE slots SET state = 0, used = 0, key = NULL, token = NULL "
            "WHERE namespace = ? AND state = 1 AND ends <= ?",
            (namespace, self._now()),
        )

    def _assign(
        self, namespace: int, token: str, keys: Sequence[str], keep: set[int]
    ) -> dict[str, SlotVersion]:
        """Reserve a slot for each key, as far as there are slots; each gets a generation of its own."""
        slots = self._take(namespace, len(keys), keep)
        last = self._one("UPDATE store SET generation = generation + ? RETURNING generation", len(slots))
        places = [SlotVersion(slot, last - len(slots) + 1 + index) for index, slot in enumerate(slots)]
        assigned = dict(zip(keys, places, strict=False))
        self._database.executemany(
            "INSERT OR REPLACE INTO slots (namespace, slot, state, generation, key, token, ends) "
            "VALUES (?, ?, 1, ?, ?, ?, ?)",
            [
                (namespace, place.slot, place.generation, key, token, self._end())
                for key, place in assigned.items()
            ],
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
        busy = keep | self._being_read(namespace)
        rows = self._database.execute(
            "SELECT slot FROM slots WHERE namespace = ? AND state = ? ORDER BY used, slot LIMIT ?",
            (namespace, state, count + len(busy)),
        )
        return [slot for (slot,) in rows if slot not in busy][:count]

    def _being_read(self, namespace: int) -> set[int]:
        """Slots under a read lease, which must not be reused yet."""
        self._database.execute(
            "DELETE FROM reads WHERE namespace = ? AND ends <= ?", (namespace, self._now())
        )
        rows = self._database.execute("SELECT slot FROM reads WHERE namespace = ?", (namespace,))
        return {slot for (slot,) in rows}

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
        used = self._one("UPDATE store SET clock = clock + 1 RETURNING clock")
        self._database.execute(
            "UPDATE slots SET state = 2, used = ?, token = NULL WHERE namespace = ? AND slot = ?",
            (used, namespace, claim.slot),
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
