"""Reads every slot of a store that nobody writes to, and says what is whole, damaged and forgotten."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from asynchicache.backends.file.blocks import BlockFile
from asynchicache.backends.file.folder import MANIFEST, NAMES, StoreFolder
from asynchicache.backends.file.manifest import Manifest, parse
from asynchicache.backends.file.names import Entry, NameFile
from asynchicache.backends.file.segments import Segments
from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.hashing import ObjectKey

SealedKey = Callable[[memoryview, memoryview], ObjectKey | None]
"""The page that a header and a page were sealed as; None if one of them is damaged."""


@dataclass(slots=True)
class StoreReport:
    """What is in a store.

    Attributes:
        pages: named, and whole.
        corrupt: named, but damaged or not there; and damaged names.
        repaired: of those, forgotten or named again.
        orphaned: whole, but no longer named: evicted, deleted, or never acknowledged. They do no harm, their
            slots are used again.
        bytes: of all files.
        pools: names of the pools' folders.
        problems: in words.
    """

    pages: int = 0
    corrupt: int = 0
    repaired: int = 0
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


def verify_store(path: Path, sealed_key: SealedKey, *, repair: bool = False) -> StoreReport:
    """Check a store; nothing is changed unless `repair`.

    Args:
        path: its folder.
        sealed_key: `storage.binding.sealed_key`.
        repair: forget pages that are damaged; name those again whose names are damaged.

    Raises:
        StorageLockedError: a writer has it open; with `repair`, anybody.
        StorageFormatError: the folder holds no store.
        StorageError: it cannot be read, or written.
    """
    if not path.exists():
        raise StorageFormatError(f"{path} does not exist")
    folder = StoreFolder(path, read_only=not repair)
    report = StoreReport()
    try:
        for pool in folder.pools():
            report.pools.append(pool.name)
            _check_pool(pool, sealed_key, report, repair=repair)
        report.bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be verified: {error}") from error
    finally:
        folder.close()
    return report


def _check_pool(folder: Path, sealed_key: SealedKey, report: StoreReport, *, repair: bool) -> None:
    if not (folder / MANIFEST).exists():
        report.problems.append(f"{folder} has no {MANIFEST}: its pages are checked once it has been open")
        return
    try:
        manifest = parse((folder / MANIFEST).read_bytes(), folder / MANIFEST)
    except StorageFormatError as error:
        report.corrupt += 1
        report.problems.append(str(error))
        if repair:  # written again when the pool is opened: its sizes follow from its fingerprint
            (folder / MANIFEST).unlink()
            report.repaired += 1
        return
    file = BlockFile(folder / NAMES, read_only=not repair, direct=False)
    segments = Segments(folder, manifest.frame_bytes, read_only=not repair, direct=True)
    try:
        PoolCheck(manifest, segments, NameFile(file), sealed_key, report, repair=repair).run()
    finally:
        file.close()
        segments.close()


class PoolCheck:
    """One pool's slots, one by one.

    Args:
        manifest: whose they are.
        segments, names: the files.
        sealed_key: see `verify_store`.
        report: gets what is found.
        repair: see `verify_store`.
    """

    def __init__(
        self,
        manifest: Manifest,
        segments: Segments,
        names: NameFile,
        sealed_key: SealedKey,
        report: StoreReport,
        *,
        repair: bool,
    ) -> None:
        self._manifest = manifest
        self._segments = segments
        self._names = names
        self._sealed_key = sealed_key
        self._report = report
        self._repair = repair
        self._header = memoryview(mmap.mmap(-1, manifest.header_bytes))
        self._page = memoryview(mmap.mmap(-1, manifest.slot_bytes))
        self._named: set[bytes] = set()

    def run(self) -> None:
        """Check every slot that exists or has an entry.

        Raises:
            OSError: the names cannot be read, or written.
        """
        found = self._names.load()
        by_slot = {slot: digest for digest, slot in found.pages}
        self._named = {digest for digest, _ in found.pages}
        for slot in found.damaged:
            self._check_damaged(slot)
        seen: set[bytes] = set()
        for slot in sorted(by_slot.keys() | set(range(self._segments.slots)).difference(found.damaged)):
            self._check(slot, by_slot.get(slot), seen)
        if self._repair:
            self._names.sync()

    def _check(self, slot: int, digest: bytes | None, seen: set[bytes]) -> None:
        found = self._find(slot)
        if digest is None:
            self._report.orphaned += found is not None
        elif found != self._manifest.key(digest):
            self._note(f"slot {slot} does not hold page {digest.hex()}")
            if self._repair:
                self._names.write([Entry(0, slot, None)])
        elif digest in seen:  # stored twice at once, and a crash came: one will be forgotten
            self._report.orphaned += 1
        else:
            self._report.pages += 1
            seen.add(digest)

    def _check_damaged(self, slot: int) -> None:
        self._note(f"the name of slot {slot} is damaged")
        if not self._repair:
            return
        found = self._find(slot)
        digest = None if found is None or found.digest in self._named else found.digest
        self._names.write([Entry(0, slot, digest)])
        if digest is not None:
            self._named.add(digest)
            self._report.pages += 1

    def _note(self, problem: str) -> None:
        self._report.corrupt += 1
        self._report.repaired += self._repair
        self._report.problems.append(f"{self._manifest.pool}: {problem}")

    def _find(self, slot: int) -> ObjectKey | None:
        """The page of this pool that lies whole in a slot."""
        if not self._segments.holds(slot):
            return None
        try:
            self._segments.read(slot, [self._header, self._page])
        except OSError:
            return None
        found = self._sealed_key(self._header, self._page)
        return found if found is not None and found == self._manifest.key(found.digest) else None
