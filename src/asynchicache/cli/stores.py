"""`ls`, `verify`, `clear` and `gc`: what lies in a store, for those who run it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from operator import add
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from asynchicache.backends.file.clear import Cleared, clear_store
from asynchicache.backends.file.verify import StoreReport, verify_store
from asynchicache.cli.options import ClearOptions, GcOptions, ListOptions, StoreOptions, VerifyOptions
from asynchicache.cli.output import CommandResult, Output
from asynchicache.config import open_inventory
from asynchicache.errors import StorageFormatError
from asynchicache.hashing import namespace_id, namespace_seed
from asynchicache.layouts import HEADER_BYTES
from asynchicache.ports import AsyncioPort
from asynchicache.reports import facts
from asynchicache.storage.labels import (
    Inventory,
    PageReading,
    PagesChecked,
    PoolListing,
    Tidying,
    check_clock,
    check_clocks,
)

_ALL = 1 << 62
_LEFT_SECONDS = 3600.0
"""Nobody has been sending the same pages for so long: what says so was left by a process that died."""


class _Removed(NamedTuple):
    """What went of a pool; `whole`: all that was to go, since nobody has begun to use it."""

    pool: PoolListing
    pages: int
    whole: bool


def verify(options: VerifyOptions, output: Output) -> CommandResult:
    """Read every page; not ok if one cannot be read, or something is damaged and was not repaired."""
    engine, found = options.engine()
    if engine != "file":
        checked = asyncio.run(_checked(options, output))
        return CommandResult(
            checked, facts([(n, str(v)) for n, v in checked.items()], "pages"), not checked["corrupt"]
        )
    with output.console.status(escape(f"reading {options.place}")):
        report = verify_store(Path(str(found["path"])), repair=options.repair)
    return CommandResult(report.as_json(), _report(report), report.ok)


def list_pools(options: ListOptions, output: Output) -> CommandResult:
    """What a store has."""
    now = time.time()
    with output.console.status(escape(f"listing {options.place}")):
        pools = asyncio.run(_listed(options))
    rows = [_row(pool, options, now) for pool in pools]
    pages = sum(_pages(pool, options) for pool in pools)
    total = {"pages": pages, "bytes": _total([_bytes(pool, options) for pool in pools])}
    problems = [pool.problem for pool in pools if pool.problem]
    shown = Group(_table(rows), *map(Text, problems))
    return CommandResult({"pools": rows, **total}, shown, not problems)


def clear(options: ClearOptions, output: Output) -> CommandResult:
    """Remove the pools that are named."""
    engine, found = options.engine()
    plain = not (options.model or options.version or options.namespace or options.dry_run)
    if engine == "file" and plain:  # a damaged manifest or label is no obstacle
        cleared = clear_store(Path(str(found["path"])), options.pool, options.fingerprint)
        return CommandResult(cleared._asdict(), _cleared(cleared))
    removed, kept = asyncio.run(_removed(options, output, lambda pool: True))
    return _removal(removed, kept, options)


def collect(options: GcOptions, output: Output) -> CommandResult:
    """Remove the pools whose label has expired, and what writers that died have left in the others."""
    now = time.time()
    removed, kept = asyncio.run(_removed(options, output, lambda pool: pool.state(now) == "expired", now))
    return _removal(removed, kept, options)


@asynccontextmanager
async def opened(options: StoreOptions, *, writes: bool = False) -> AsyncIterator[Inventory]:
    """The pools of a store, for the duration of an `async with`.

    Raises:
        ConfigError, StorageError: as `open_inventory`.
    """
    async with (
        aclosing(AsyncioPort(threads=2)) as port,
        aclosing(open_inventory(*options.engine(), port, writes=writes)) as inventory,
    ):
        yield inventory


async def _listed(options: StoreOptions) -> list[PoolListing]:
    async with opened(options) as inventory:
        return await _chosen(inventory, options)


async def _checked(options: VerifyOptions, output: Output) -> dict[str, int]:
    """Read the pages of pools, and count those that are damaged."""
    async with opened(options) as inventory:
        pools = await _chosen(inventory, options)
        assert isinstance(inventory, PageReading)
        total, every = PagesChecked(0, 0, 0), sum(_pages(pool, options) for pool in pools)
        with output.bar("reading") as advance:
            for pool in pools:
                async for some in inventory.check(pool):
                    total = PagesChecked(*map(add, total, some))
                    advance(total.pages, every)
                    if options.per_second:
                        await asyncio.sleep(some.pages / options.per_second)
    return {
        "pages": total.pages - total.corrupt,
        "corrupt": total.corrupt,
        "orphaned": 0,
        "bytes": total.nbytes,
    }


async def _chosen(inventory: Inventory, options: StoreOptions) -> list[PoolListing]:
    return [pool for pool in await inventory.pools() if _fits(pool, options)]


def _fits(pool: PoolListing, options: StoreOptions) -> bool:
    label, wanted = pool.label, options.fingerprint.lower()
    count = min(len(wanted), len(pool.fingerprint))
    return (
        options.pool in ("", pool.pool)
        and pool.fingerprint[:count] == wanted[:count]
        and (not wanted or bool(pool.fingerprint))
        and (not options.model or (label is not None and label.model == options.model))
        and (not options.version or (label is not None and label.weight_version == options.version))
        and (not options.namespace or _namespace(options) in pool.pages)
    )


def _namespace(options: StoreOptions) -> bytes | None:
    return namespace_id(namespace_seed(options.namespace)) if options.namespace else None


async def _removed(
    options: GcOptions, output: Output, going: Callable[[PoolListing], bool], now: float | None = None
) -> tuple[list[_Removed], list[PoolListing]]:
    """Remove pools, or their pages of a namespace: what went, and what stays."""
    async with opened(options, writes=not options.dry_run) as inventory:
        pools = await inventory.pools()
        if problems := [pool.problem for pool in pools if pool.problem]:
            raise StorageFormatError(problems[0])  # that pool might be one of those that are meant
        if now is not None:
            check_clock(pools, now)
            await check_clocks(inventory, now)
        chosen = [pool for pool in pools if _fits(pool, options) and going(pool)]
        gone = []
        with output.bar("removing") as advance:
            for done, pool in enumerate(chosen):
                advance(done, len(chosen))
                gone.append(await _remove(inventory, pool, options, going))
        whole = [one.pool for one in gone if one.whole]
        kept = [pool for pool in pools if pool not in whole]
        if now is not None and not options.dry_run and isinstance(inventory, Tidying):
            for pool in (pool for pool in kept if _fits(pool, options)):
                await inventory.tidy(pool, now - _LEFT_SECONDS)
    return gone, kept


async def _remove(
    inventory: Inventory, pool: PoolListing, options: GcOptions, going: Callable[[PoolListing], bool]
) -> _Removed:
    """Remove a pool, or its pages of a namespace, as long as nobody begins to use it."""
    whole = True

    async def go_on(pages: int) -> int:
        nonlocal whole
        if pages and options.per_second:
            await _pause(pages / options.per_second)
        whole = going(pool._replace(label=await inventory.label(pool)))
        return (options.per_second or _ALL) if whole else 0

    if options.dry_run:
        return _Removed(pool, _pages(pool, options) if await go_on(0) else 0, whole)
    return _Removed(pool, await inventory.remove(pool, _namespace(options), go_on), whole)


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _pages(pool: PoolListing, options: StoreOptions) -> int:
    namespace = _namespace(options)
    return sum(pool.pages.values()) if namespace is None else pool.pages.get(namespace, 0)


def _bytes(pool: PoolListing, options: StoreOptions) -> int | None:
    """Bytes of a pool, or of its pages of a namespace; None if nobody knows."""
    if not options.namespace:
        return pool.nbytes
    if pool.label is None:
        return None
    return _pages(pool, options) * (HEADER_BYTES + pool.label.page_bytes)


def _total(sizes: Sequence[int | None]) -> int | None:
    """The sum; None if one is not known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _row(pool: PoolListing, options: StoreOptions, now: float) -> dict[str, object]:
    label = pool.label
    return {
        "name": pool.name,
        "pool": pool.pool,
        "shard": pool.shard,
        "fingerprint": pool.fingerprint,
        "model": label.model if label is not None else None,
        "weight_version": label.weight_version if label is not None else None,
        "written_by": label.written_by if label is not None else None,
        "pages": _pages(pool, options),
        "namespaces": {one.hex(): count for one, count in sorted(pool.pages.items())},
        "bytes": _bytes(pool, options),
        "state": pool.state(now),
        "until": label.until if label is not None else None,
        "problem": pool.problem or None,
    }


def _table(rows: list[dict[str, object]]) -> RenderableType:
    table = Table(title="pools" if rows else "no pool fits")
    for name in ("pool", "fingerprint", "model", "weights", "pages", "MB", "state"):
        table.add_column(name, overflow="fold")
    for row in rows:
        pool = f"{row['pool']} {row['shard']}".strip() or str(row["name"])
        cells = [pool, str(row["fingerprint"])[:12], row["model"], row["weight_version"], f"{row['pages']:,}"]
        size = row["bytes"]
        cells += [f"{size / 1e6:,.1f}" if isinstance(size, int) else None, row["state"]]
        table.add_row(*(Text("?" if cell is None else str(cell)) for cell in cells))
    return table


def _removal(removed: list[_Removed], kept: list[PoolListing], options: GcOptions) -> CommandResult:
    whole = [one.pool for one in removed if one.whole]
    names, stay = [pool.name for pool in whole], [pool.name for pool in kept]
    pages = sum(one.pages for one in removed)
    result = {
        "pools": names,
        "pages": pages,
        "bytes": None if options.namespace else _total([pool.nbytes for pool in whole]),
        "kept": stay,
        "unknown": [pool.name for pool in kept if pool.label is None],
        "dry_run": options.dry_run,
    }
    title = "would be removed" if options.dry_run else "removed"
    table = Table(title=title if removed else "nothing to remove; pools", show_header=False)
    table.add_column(overflow="fold")
    again = [f"{one.pool.name}: in use again, the rest stays" for one in removed if not one.whole]
    for name in [*names, *again] or stay or ["none is there"]:
        table.add_row(Text(name))
    if removed:
        table.add_row(f"{pages:,} pages")
    return CommandResult(result, table)


def _report(report: StoreReport) -> RenderableType:
    numbers = {
        "whole pages": report.pages,
        "damaged": report.corrupt,
        "repaired": report.repaired,
        "unfinished": report.unfinished,
        "named twice": report.orphaned,
        "pools not read": report.unread,
        "bytes": report.bytes,
    }
    table = facts([(name, f"{number:,}") for name, number in numbers.items()], f"pools: {len(report.pools)}")
    return Group(table, *map(Text, report.problems))  # as they are: brackets are no markup


def _cleared(cleared: Cleared) -> RenderableType:
    """What was removed; where nothing was, what is there: the name may have been mistyped."""
    table = Table(title="cleared" if cleared.pools else "nothing to clear; pools", show_header=False)
    table.add_column(overflow="fold")
    for name in cleared.pools or cleared.kept or ["none is there"]:
        table.add_row(Text(name))  # as it is: brackets are no markup
    if cleared.pools:
        table.add_row(f"{cleared.bytes:,} bytes")
    return table
