"""What each engine makes of the same calls, and what one server of it does and costs.

Requests are the fewest that an engine's code can send: its reads come in calls, and an object that two calls
read counts once (for a warm prompt of 32k tokens, 17 GETs and 16 lists, where 29 and 25 were sent).

Rates are of docs/benchmarks/storage.md, with pages of 1 MiB on two virtual cores: less than a server does.
Those of requests: EXISTS of one Redis beside other work, and two calls for each page that one Redis names.
Prices are round list prices of 2026, in dollars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from asynchicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Figures:
    """One server of an engine. None: without a limit, or nobody has measured it.

    Attributes:
        put_mb_s, get_mb_s: bytes that it takes and gives, 10^6 a second.
        requests_s: requests that it answers, or that the one service of names answers.
        gb: what it holds.
        gb_month: dollars for a GB for a month.
        put_million, get_million: dollars for a million requests that write or list, and of others.
        name_bytes: what an object's name takes, where names are in memory.
    """

    put_mb_s: float | None = None
    get_mb_s: float | None = None
    requests_s: float | None = None
    gb: float | None = None
    gb_month: float = 0.0
    put_million: float = 0.0
    get_million: float = 0.0
    name_bytes: float = 0.0


class PlannedStore(NamedTuple):
    """How an engine works.

    Attributes:
        figures: of one server.
        puts, gets: its requests, as a sum of fields of `fleet.Traffic`.
        objects: the field that counts its objects.
        shared: whether nodes find each other's pages. Otherwise each node is a server.
        central: whether one service answers all requests, however many servers hold the bytes.
    """

    figures: Figures
    puts: Sequence[str]
    gets: Sequence[str]
    objects: str = "put_pages"
    shared: bool = True
    central: bool = False


ENGINES: Mapping[str, PlannedStore] = {
    "file": PlannedStore(
        Figures(put_mb_s=5000, get_mb_s=2500, gb=4000, gb_month=0.08),
        puts=["put_calls"],
        gets=["got_calls"],
        shared=False,
    ),
    "redis": PlannedStore(
        Figures(2700, 2700, 30_000, gb=200, gb_month=3.0, name_bytes=200),
        puts=["offered_pages", "put_pages"],
        gets=["asked_pages", "got_pages"],
    ),
    "object": PlannedStore(
        Figures(gb_month=0.023, put_million=5.0, get_million=0.4),
        puts=["asked_groups", "put_objects"],
        gets=["got_objects"],
        objects="put_objects",
    ),
    "mooncake": PlannedStore(
        Figures(gb=256, gb_month=3.0, name_bytes=500),
        puts=["offered_pages", "put_pages"],  # a beginning and an end
        gets=["asked_pages", "got_pages"],
        central=True,
    ),
    "hf3fs": PlannedStore(
        Figures(requests_s=17_000, gb=50_000, gb_month=0.16, name_bytes=400),
        puts=["offered_pages", "put_pages"],  # a slot, and its end
        gets=["asked_pages", "got_pages"],
        central=True,
    ),
}


def figures(measured: Sequence[str], given: Mapping[str, Any]) -> dict[str, Figures]:
    """The figures of each engine, with those of the user in place of ours.

    Args:
        measured: files that `bench storage --json` wrote.
        given: numbers by `engine.figure`.

    Raises:
        ConfigError: a file or a figure is none.
    """
    found = {name: engine.figures for name, engine in ENGINES.items()}
    for file in measured:
        try:
            report = json.loads(Path(file).read_text("utf-8"))
            name, rates = report["engine"], {key: report[key] for key in ("put_mb_s", "get_mb_s")}
            found[name] = replace(found[name], **rates)
        except (OSError, ValueError, KeyError, TypeError) as error:
            rule = f"must be the JSON of bench storage, of one of {sorted(ENGINES)}"
            raise ConfigError(f"--measured {file}: {rule} ({error!r})") from error
    known = [one.name for one in fields(Figures)]
    for name, value in given.items():
        engine, _, figure = name.partition(".")
        if engine not in ENGINES or figure not in known:
            rule = f"must be one of {sorted(ENGINES)}, a dot, and one of {known}"
            raise ConfigError(f"--rate {name}: {rule}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"--rate {name}={value}: must be a number above 0")
        found[engine] = replace(found[engine], **{figure: float(value)})
    return found
