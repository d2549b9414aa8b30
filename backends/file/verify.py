"""Reads every slot of a store that nobody writes to, and says what is whole, damaged and forgotten."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from asynchicache.backends.file import entries
from asynchicache.backends.file.entries import Entry
from asynchicache.backends.file.folder import MANIFEST, StoreFolder
from asynchicache.backends.file.manifest import read
from asynchicache.backends.file.recovery import Identify, PageReader
from asynchicache.backends.file.segments import Segments
from asynchicache.errors import StorageError, StorageFormatError


@dataclass(slots=True)
class StoreReport:
    """What is in a store.

    Attributes:
        pages: named, and whole.
        corrupt: named, but damaged or not there; and damaged names.
        repaired: of those, forgotten or named again.
        unfinished: named by the last writes before a crash, which left them in part; nobody was told that
            they are stored. They are forgotten when the store is opened, or repaired.
        orphaned: whole, but no longer named: evicted, deleted, or never acknowledged. They do no harm, their
            slots are used again.
        bytes: of all files.
        pools: names of the pools' folders.
        problems: in words.
    """

    pages: int = 0
    corrupt: int = 0
    repaired: int = 0
    unfinished: int = 0
    orphaned: int = 0
    bytes: int = 0
    pools: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged, or is no longer."""
        return self.corrupt == self.repaired

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def verify_store(path: Path, identify: Identify, *, repair: bool = False) -> StoreReport:
    """Check a store; nothing is changed unless `repair`.

    Args:
        path: its folder.
        identify: `storage.binding.sealed_key`.
        repair: forget pages that are damaged; name those again whose names are damaged.

    Raises:
        StorageLockedError: a writer has it open; with `repair`, anybody.
        StorageFormatError: the folder holds no store.
        StorageError: it cannot be read, or written.
    """
    if not path.exists():
        raise StorageFormatError(f"{path} does not exist")
    folder = StoreFolder(path, read_only=not repair, new=False)
    report = StoreReport()
    try:
        for pool in folder.pools():
            report.pools.append(pool.name)
            _check_pool(pool, identify, report, repair=repair)
        report.bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be verified: {error}") from error
    finally:
        folder.close()
    return report


def _check_pool(folder: Path, identify: Identify, report: StoreReport, *, repair: bool) -> None:
    if not (folder / MANIFEST).exists():
        report.problems.append(f"{folder} has no {MANIFEST}: its pages are checked once it has been open")
        return
    try:
        manifest = read(folder / MANIFEST)
    except StorageFormatError as error:
        report.corrupt += 1
        report.problems.append(str(error))
        if repair:  # written again when the pool is opened: its sizes follow from its fingerprint
            (folder / MANIFEST).unlink()
            report.repaired += 1
        return
    segments = Segments(folder, manifest.frame_bytes, read_only=not repair, direct=True)
    try:
        reader = PageReader(segments, manifest, identify)
        check = PoolCheck(manifest.pool, segments, reader, report, repair=repair)
        check.run()
    finally:
        segments.close()
    if check.doubtful and repair:
        report.problems.append(f"no page is what {folder / MANIFEST} says: it is written anew, too")
        (folder / MANIFEST).unlink()


class PoolCheck:
    """One pool's slots, one by one.

    Attributes:
        doubtful: pages are whole, and none is what the manifest says. The manifest is what is damaged, so
            nothing was forgotten.

    Args:
        pool: its name.
        segments: its files.
        reader: of the same files.
        report: gets what is found.
        repair: see `verify_store`.
    """

    def __init__(
        self, pool: str, segments: Segments, reader: PageReader, report: StoreReport, *, repair: bool
    ) -> None:
        self._pool = pool
        self._segments = segments
        self._reader = reader
        self._report = report
        self._repair = repair
        self._named: set[bytes] = set()
        self._lost: list[int] = []
        self.doubtful = False

    def run(self) -> None:
        """Check every slot that exists or has an entry.

        Raises:
            OSError: entries cannot be read, or written.
        """
        found = entries.load(self._segments)
        by_slot = {entry.slot: entry for entry in found.pages}
        self._named = {entry.digest for entry in found.pages}
        for slot in found.damaged:
            self._check_damaged(slot)
        seen: set[bytes] = set()
        for slot in sorted(by_slot.keys() | set(range(self._segments.slots)).difference(found.damaged)):
            digest = self._reader.digest_in(slot)
            if slot not in by_slot:
                self._report.orphaned += digest is not None
            elif digest != by_slot[slot].digest:
                self._forget(by_slot[slot], found.trusted)
            elif digest in seen:  # stored twice at once, and a crash came: one will be forgotten
                self._report.orphaned += 1
            else:
                self._report.pages += 1
                seen.add(digest)
        self.doubtful = self._reader.strangers > 0 and not seen
        if self._repair:
            entries.erase(self._segments, () if self.doubtful else self._lost)
            self._segments.sync_all()

    def _forget(self, entry: Entry, trusted: int) -> None:
        if entry.stamp < trusted:
            self._note(f"slot {entry.slot} does not hold page {entry.digest.hex()}")
        else:
            self._report.unfinished += 1
        self._lost.append(entry.slot)

    def _check_damaged(self, slot: int) -> None:
        self._note(f"the name of slot {slot} is damaged")
        if not self._repair:
            return
        digest = self._reader.digest_in(slot)
        if digest is None or digest in self._named:
            entries.erase(self._segments, [slot])
        else:
            entries.write(self._segments, Entry(0, slot, digest))
            self._named.add(digest)
            self._report.pages += 1

    def _note(self, problem: str) -> None:
        self._report.corrupt += 1
        self._report.repaired += self._repair
        self._report.problems.append(f"{self._pool}: {problem}")
