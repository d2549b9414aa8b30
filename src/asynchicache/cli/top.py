"""`asynchicache top URL`: a live view of a server's cache in the terminal."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from asynchicache.cli.options import TopOptions
from asynchicache.cli.output import CommandResult, Output
from asynchicache.errors import ConfigError, WireFormatError

_SECONDS = 5.0


def run(options: TopOptions, output: Output) -> CommandResult:
    """Show what the server says, again and again; once with `--once`, or where there is no terminal.

    Raises:
        ConfigError: the address is none.
        OSError: the server does not answer to the first look.
        WireFormatError: it is no server of this kind.
    """
    seen = look(options.url)
    if options.once or not output.console.is_terminal:
        return CommandResult(seen, present(seen))
    with Live(present(seen), console=output.console, auto_refresh=False) as live:
        while True:  # until Ctrl-C
            time.sleep(options.interval)
            try:
                live.update(present(look(options.url)), refresh=True)
            except OSError as error:  # it may come back
                live.update(Text(f"{options.url} does not answer: {error}", "red"), refresh=True)


def look(url: str) -> dict[str, Any]:
    """What the server at `url` knows about its cache."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"URL {url!r} must be an address such as http://127.0.0.1:8000")
    address = url.rstrip("/") + "/stats"
    try:
        with urlopen(address, timeout=_SECONDS) as answer:  # noqa: S310  the scheme is checked above
            found: dict[str, Any] = json.load(answer)
    except URLError as error:
        raise ConnectionError(f"{address} does not answer: {error.reason}") from error
    except ValueError as error:
        raise WireFormatError(f"{address} is no `asynchicache serve`: {error}") from error
    return found


def present(seen: dict[str, Any]) -> RenderableType:
    """All that is known, as tables."""
    return Group(
        _headline(seen),
        Columns([_pools(seen["pools"], seen["memory_bytes"]), _reasons(seen)]),
        _storage(seen["storage"]),
        _prefixes(seen),
    )


def _headline(seen: dict[str, Any]) -> RenderableType:
    requests, tokens, first = seen["requests"], seen["tokens"], seen["first_token_ms"]
    tiers = ", ".join(f"{tier} {count:,}" for tier, count in tokens["by_tier"].items())
    return Text(
        f"{seen['model']}: {requests['running']} running, {requests['waiting']} waiting, "
        f"{requests['answered']:,} answered, up {seen['uptime_s']:.0f} s\n"
        f"hit rate {_share(tokens['cached'], tokens['prompt'])} of {tokens['prompt']:,} tokens ({tiers})\n"
        f"first token p50 {_ms(first['p50'])}, p90 {_ms(first['p90'])}\n"
    )


def _pools(pools: dict[str, Any], memory: dict[str, int]) -> RenderableType:
    sizes = ", ".join(f"{nbytes / 2**30:.4g} GiB on the {tier}" for tier, nbytes in memory.items())
    table = Table("pool", "tier", "", "held", "of", "evicted", title=f"pools: {sizes}")
    for name, tiers in pools.items():
        for tier, one in tiers.items():
            bar = ProgressBar(max(one["capacity"], 1), one["held"], width=16)
            up_to = "up to " if "most_bytes" in one else ""
            most, evicted = f"{up_to}{one['capacity']:,}", f"{one['evicted']:,}"
            table.add_row(name, tier, bar, f"{one['held']:,}", most, evicted)
    return table


def _reasons(seen: dict[str, Any]) -> RenderableType:
    table = Table("reason", "requests", title="why not more")
    for reason, count in sorted(seen["reasons"].items(), key=lambda pair: -pair[1]):
        table.add_row("nothing was missed" if reason == "none" else reason, f"{count:,}")
    return table


def _storage(storage: dict[str, Any]) -> RenderableType:
    title = f"storage: {storage['name']}, {storage['state']}" if storage["name"] else "storage: none"
    table = Table("pool", "breaker", "read p50", "p90", "write p90", title=title)
    for name, one in storage["pools"].items():
        get, put = one["get_ms"], one["put_ms"]
        table.add_row(name, one["breaker"], _ms(get["p50"]), _ms(get["p90"]), _ms(put["p90"]))
    return table


def _prefixes(seen: dict[str, Any]) -> RenderableType:
    top = Tree("prefixes that are continued most often")
    branches: list[Tree] = []
    for one in seen["prefixes"]:
        above = top if one["parent"] < 0 else branches[one["parent"]]
        where = ", ".join(one["tiers"]) or "storage"
        words = (
            f"{one['digest'] or '·'} to token {one['end']:,}: {one['continuations']:,} continuations, {where}"
        )
        branches.append(above.add(Text(words)))
    return top


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"<= {value:g} ms"
