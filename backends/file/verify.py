"""Read every slot of a store without writers, and report which pages are valid, damaged or torn."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from asynchicache.backends.file.entries import (
    PageReader,
    empty_entries,
    entry_blocks,
    load_entries,
    write_blocks,
)
from asynchicache.backends.file.folder import MANIFEST, Manifest, StoreFolder, disk_errors, read
from asynchicache.backends.file.segments import Segments
from asynchicache.errors import StorageError, StorageFormatError


@dataclass(slots=True, eq=False)
class StoreReport:
    """The result of `verify_store`.

    Attributes:
        pages: pages with a valid entry and undamaged bytes.
        corrupt: entries whose page is damaged or missing, damaged entries, and damaged manifests.
        repaired: the corrupt entries that were erased and corrupt manifests that were removed.
        unfinished: pages torn by a crash during the last writes, which were never acknowledged. Opening or
            repairing the store drops them.
        orphaned: undamaged pages with a second entry: two calls stored the page when the crash came. Opening
            the store drops one of the two.
        unread: pools that could not be checked: without a manifest the page size is unknown. The next opening
            of such a pool writes the manifest again.
        bytes: bytes of all files.
        pools: names of the pools' folders.
        problems: messages that describe the corrupt and unread items.
    """

    pages: int = 0
    corrupt: int = 0
    repaired: int = 0
    unfinished: int = 0
    orphaned: int = 0
    unread: int = 0
    bytes: int = 0
    pools: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every pool was checked, and all damage found was repaired."""
        return self.corrupt == self.repaired and not self.unread

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def verify_store(path: Path, *, repair: bool = False) -> StoreReport:
    """Check a store; nothing is changed unless `repair`.

    Args:
        repair: erase the entries of damaged pages, damaged entries and damaged manifests.

    Raises:
        StorageLockedError: a writer has the store open; with `repair`, also if a reader has.
        StorageFormatError: the folder is not a store.
        StorageError: the store cannot be read or written.
    """
    if not path.exists():
        raise StorageFormatError(f"{path} does not exist")
    report = StoreReport()
    with (
        closing(StoreFolder(path, read_only=not repair, new=False)) as folder,
        disk_errors(f"{path} cannot be verified"),
    ):
        for pool in folder.pools():
            report.pools.append(pool.name)
            _check_pool(folder, pool, report, repair=repair)
        report.bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return report


def _check_pool(store: StoreFolder, folder: Path, report: StoreReport, *, repair: bool) -> None:
    if not (folder / MANIFEST).exists():
        report.unread += 1
        report.problems.append(f"{folder} has no {MANIFEST}: its pages can be read once it was open")
        return
    try:
        manifest = _manifest(store, folder)
    except StorageFormatError as error:
        report.corrupt += 1
        report.problems.append(str(error))
        if repair:  # opening the pool writes it again from the model's sizes
            (folder / MANIFEST).unlink()
            report.repaired += 1
        report.unread += 1
        return
    segments = Segments(folder, manifest.slot_bytes, manifest.identity, read_only=not repair, direct=True)
    with closing(segments):
        _check_pages(manifest, segments, report, repair=repair)


def _manifest(store: StoreFolder, folder: Path) -> Manifest:
    """Read the manifest of a pool's folder.

    Raises:
        StorageFormatError: the manifest is damaged, or belongs to another folder.
    """
    manifest = read(folder / MANIFEST)
    try:
        theirs = store.pool_path(manifest.pool, manifest.shard, bytes.fromhex(manifest.fingerprint))
    except StorageError as error:
        raise StorageFormatError(f"{folder / MANIFEST} is damaged: {error}") from error
    if theirs != folder:  # with the wrong identity, all entries would look damaged
        raise StorageFormatError(f"{folder / MANIFEST} is damaged: it is that of {theirs}")
    return manifest


def _check_pages(manifest: Manifest, segments: Segments, report: StoreReport, *, repair: bool) -> None:
    """Check every slot that has an entry.

    Raises:
        OSError: entries cannot be read or written.
    """
    found = load_entries(segments)
    reader = PageReader(segments, manifest)
    lost = list(found.damaged)
    problems = [f"the name of slot {slot} is damaged" for slot in found.damaged]
    seen: set[bytes] = set()
    for entry in sorted(found.pages, key=lambda entry: entry.slot):
        if not reader.holds(entry):
            lost.append(entry.slot)
            if entry.stamp < found.trusted:
                problems.append(f"slot {entry.slot} does not hold page {entry.digest.hex()}")
            else:
                report.unfinished += 1
        elif entry.digest in seen:  # two calls stored it before a crash: recovery drops one
            report.orphaned += 1
        else:
            report.pages += 1
            seen.add(entry.digest)
    report.corrupt += len(problems)
    report.problems += [f"{manifest.pool}: {problem}" for problem in problems]
    if repair:
        with segments.barrier(lost) as sync:
            write_blocks(segments, entry_blocks(empty_entries(lost), segments.shape.slots))
            sync()
        report.repaired += len(problems)
